"""Processes and machines of a run: starting ranks, their collectives, signals, watchdog and
heartbeat, instruments, child processes and scratch folders."""
