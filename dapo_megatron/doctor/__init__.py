"""Diagnostic commands for users, one file each: env, nodes, run, layouts, sync."""
