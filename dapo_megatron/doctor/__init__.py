"""Proofs a user can run on their own config. `layouts`: any layout of the model, any split into
micro-batches, packed or padded, gives the gradient of one process; `layouts.py` is the proof."""
