"""Prompt sources, the resumable prompt stream, and the way from graded groups to token batches:
assembling, splitting into mini-batches, packing into micro-batches balanced over ranks."""
