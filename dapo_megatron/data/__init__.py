"""Prompt sources, the resumable prompt stream, and token batches: assembled from graded groups,
split into mini-batches, and packed into micro-batches that balance work over ranks."""
