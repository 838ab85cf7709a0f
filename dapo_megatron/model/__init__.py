"""What a model is: its HF config.json, its tensors, and which rank holds which part of them.

`hf_config.py` is the only reader of config.json. `families/` has one file per family, with its
parameters and its own fields; a new family is a new file and a line in `families/__init__.py`.
`published.py` knows the dimensions of published models, for plans without a checkpoint.
`sharding.py` has the ways to split a parameter, `tensors.py` lists what each rank holds.
"""

from dapo_megatron.model.architecture import Architecture, GroupedRouting, Latent, Place, Rope
from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.hf_config import (
    architecture,
    planned_architecture,
    published_notes,
    read_architecture,
    to_hf_config,
)
from dapo_megatron.model.sharding import Part, Slot
from dapo_megatron.model.tensors import engine_pieces, hf_tensors, layout_of

__all__ = [
    "FAMILIES",
    "Architecture",
    "GroupedRouting",
    "Latent",
    "Part",
    "Place",
    "Rope",
    "Slot",
    "architecture",
    "engine_pieces",
    "hf_tensors",
    "layout_of",
    "planned_architecture",
    "published_notes",
    "read_architecture",
    "to_hf_config",
]
