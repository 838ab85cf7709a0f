"""The checks of tools/gpu_check.py: one module per subject. `catalog.py` lists the checks.

A check is a generator of figures (`figures.py`). It runs in its own process, on models with random
weights in published shapes (`shapes.py`). Policy and engine are built as in a run (`rig.py`). Most
checks also run on CPU in a tiny shape, which shows only that their code runs.
"""
