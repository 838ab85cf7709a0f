"""Weights on disk: HF folders, Megatron folders and training checkpoints. They are read and written
by HF name, slice by slice, converted into each other, and compared bit by bit."""
