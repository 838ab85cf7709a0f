"""DAPO's formulas as functions of tensors and plain numbers, without ranks, config or backends.

The docstring of each file lists how it differs from the paper (arXiv 2503.14476).
"""
