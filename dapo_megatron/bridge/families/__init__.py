"""Model families: what a checkpoint of each holds, and which rank holds which part of it.

One file per family declares its parameters and its config.json; `cuts.py` has the ways a parameter
is cut, `layout.py` makes the table of who holds what, `fields.py` reads config.json. A new family
is a new file and its name in `registry.py`.
"""

from dapo_megatron.bridge.families.architecture import Architecture, Latent, Place, Rope, Scoring
from dapo_megatron.bridge.families.cuts import Part, Slot
from dapo_megatron.bridge.families.fields import architecture, read_architecture
from dapo_megatron.bridge.families.layout import engine_pieces, hf_tensors, layout_of, shards_of
from dapo_megatron.bridge.families.registry import FAMILIES

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
    "shards_of",
]
