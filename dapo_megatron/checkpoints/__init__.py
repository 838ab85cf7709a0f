"""Checkpoints of a run: written in the background, published atomically, verified before use."""

from dapo_megatron.checkpoints.folder import fault_of, newest, read_state, restoring
from dapo_megatron.checkpoints.saver import CheckpointSaver

__all__ = ["CheckpointSaver", "fault_of", "newest", "read_state", "restoring"]
