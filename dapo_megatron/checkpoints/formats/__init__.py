"""Weights on disk: HF folders, Megatron folders and training checkpoints, read and written by HF
name, slice by slice; conversion between them, and the proof that two hold the same."""

from dapo_megatron.checkpoints.formats.file import TensorInfo
from dapo_megatron.checkpoints.formats.folder import copy_companions, publish
from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import Store, read_into

__all__ = [
    "HfWriter",
    "Store",
    "TensorInfo",
    "copy_companions",
    "open_store",
    "publish",
    "read_into",
]
