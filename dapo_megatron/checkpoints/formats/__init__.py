"""Weights on disk: HF folders, Megatron folders and training checkpoints, read and written by HF
name, slice by slice; conversion between them, and the proof that two hold the same."""
