"""Models: HF config.json, tensors, and the part of them that each rank holds.

`hf_config.py`, with the other files `hf_*.py`, is the only reader of config.json. `families/` has
one file per family, with its parameters and its own fields. To add a family, add a file and a line
in `families/__init__.py`. `published.py` has the dimensions of published models, for plans without
a checkpoint.
`sharding.py` has the ways to shard a parameter, and `tensors.py` lists the parts of each rank.
`placement.py` chooses the ranks of each engine.
"""

from dapo_megatron.model.adapters import (
    ADAPTER,
    AdapterParts,
    adapter_name,
    adapters_of,
    shared_inputs,
)
from dapo_megatron.model.architecture import (
    Architecture,
    ChunkPlace,
    Delta,
    GroupedRouting,
    Latent,
    Rope,
)
from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.hf_config import (
    architecture,
    mtp_layers,
    planned_architecture,
    published_notes,
    read_architecture,
    stop_ids,
    text_fields,
    to_hf_config,
    with_teacher,
    without_mtp,
)
from dapo_megatron.model.placement import Groups, engine_groups, place_engines
from dapo_megatron.model.sharding import LocalParameter, ParameterPart
from dapo_megatron.model.tensors import engine_slices, hf_tensors, layout_of

__all__ = [
    "ADAPTER",
    "FAMILIES",
    "AdapterParts",
    "Architecture",
    "ChunkPlace",
    "Delta",
    "GroupedRouting",
    "Groups",
    "Latent",
    "LocalParameter",
    "ParameterPart",
    "Rope",
    "adapter_name",
    "adapters_of",
    "architecture",
    "engine_groups",
    "engine_slices",
    "hf_tensors",
    "layout_of",
    "mtp_layers",
    "place_engines",
    "planned_architecture",
    "published_notes",
    "read_architecture",
    "shared_inputs",
    "stop_ids",
    "text_fields",
    "to_hf_config",
    "with_teacher",
    "without_mtp",
]
