"""The optimizer's state in memory, and the tensors of a training checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box, Reading, read_metadata


def state_tensors(optimizer: Any, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return moments, step and main weights of each part that this rank's optimizer updates, as
    optimizer/PARAMETER[START:STOP]/FIELD."""
    from dapo_megatron.policy.optimizer import MAIN, MOMENTS, owned_parts

    tensors: dict[str, Tensor] = {}
    names = {id(param): name for name, param in params.items()}
    for owned in owned_parts(optimizer):
        key = f"optimizer/{names[id(owned.param)]}[{owned.start}:{owned.stop}]"
        if owned.copy is not None:
            tensors[f"{key}/{MAIN}"] = owned.copy.data
        tensors.update({f"{key}/{field}": owned.state[field] for field in MOMENTS})
        group_step = torch.tensor(float(owned.group.get("step", 0)))
        tensors[f"{key}/step"] = group_step if owned.counts_in_group else owned.state["step"]
    return tensors


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the whole tensors of a training checkpoint, by key."""
    boxes = []
    for key, info in read_metadata(folder).state_dict_metadata.items():
        if hasattr(info, "properties"):
            values = torch.empty(info.size, dtype=info.properties.dtype)
            boxes.append(Box(key, (0,) * values.dim(), tuple(info.size), values))
    Reading(folder, boxes).run()
    return {box.key: box.values for box in boxes}
