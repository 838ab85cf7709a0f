"""What a run needs of the machines under it: ranks, signals, watchdog, preflight.

`environment` is the first look at one machine, behind `doctor env`."""
