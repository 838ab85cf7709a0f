"""What tools/gpu_check.py runs: a module per subject, `catalog.py` lists the checks.

A check is a generator of figures (`figures.py`), run in a process of its own on models of random
weights in published shapes (`shapes.py`), with policy and engine built as a run builds them
(`rig.py`). All of them run on CPU too, in a tiny shape: what that proves is that they are spelled
right.
"""
