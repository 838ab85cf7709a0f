"""Weights on disk: HF folders, Megatron folders, checkpoints of Megatron-core and of runs. They are
read and written by HF name, slice by slice, converted into each other, and compared bit by bit."""
