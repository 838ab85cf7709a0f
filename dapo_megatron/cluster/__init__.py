"""Processes and machines of a run: starting ranks and engine servers, collectives, keys, signals,
watchdog and heartbeat, instruments, child processes and scratch folders."""
