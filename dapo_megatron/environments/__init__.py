"""Environments: what a completion does between two turns of the model, in killable processes.

`interface.py` turns a user's class into tools, `process.py` runs its instances, one per completion,
and `pool.py` starts, asks and kills them. Nothing here knows of engines or tokens.
"""
