"""Checks for users. Each command is in the file of its name: env, nodes, run, layouts, sync."""
