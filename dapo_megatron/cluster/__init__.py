"""The machines and processes under a run: starting ranks, their collectives, signals, watchdog and
heartbeat, instruments, child processes and scratch folders."""
