"""Model families: what a checkpoint of each holds, and which rank holds which part of it.

One file per family declares its parameters and its config.json; `sharding.py` has the ways a
parameter is cut, `tensors.py` makes the table of who holds what, `hf_config.py` reads config.json.
A new family is a new file and its name in `families/registry.py`.
"""

from dapo_megatron.model.architecture import Architecture, Latent, Place, Rope, Scoring
from dapo_megatron.model.families.registry import FAMILIES
from dapo_megatron.model.hf_config import architecture, read_architecture
from dapo_megatron.model.sharding import Part, Slot
from dapo_megatron.model.tensors import engine_pieces, hf_tensors, layout_of

__all__ = [
    "FAMILIES",
    "Architecture",
    "Latent",
    "Part",
    "Place",
    "Rope",
    "Scoring",
    "Slot",
    "architecture",
    "engine_pieces",
    "hf_tensors",
    "layout_of",
    "read_architecture",
]
