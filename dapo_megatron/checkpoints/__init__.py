"""Checkpoints of a run: written in the background, published atomically, verified before use."""
