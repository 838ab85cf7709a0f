"""What a run needs of the machines under it: ranks, starting them, signals, preflight.

`environment` is the first look at one machine, behind `doctor env`."""
