"""Prompt sources, the resumable prompt stream, and the way from graded groups to token batches:
assembling, splitting into mini-batches, packing into micro-batches balanced over ranks."""

from dapo_megatron.data.batch import assemble, counted, fresh_mask, split
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.data.sources import LoadedSource, load_source
from dapo_megatron.data.stream import PromptStream

__all__ = [
    "LoadedSource",
    "PromptStream",
    "assemble",
    "counted",
    "fresh_mask",
    "load_source",
    "plan_microbatches",
    "split",
]
