"""The adapter of a training checkpoint as a folder that PEFT loads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box, Reading
from dapo_megatron.config import Config
from dapo_megatron.files import write_json
from dapo_megatron.model import adapter_name, hf_tensors, read_architecture, shared_inputs
from dapo_megatron.types import torch_dtype

FOLDER = "adapter"
"""Name of the folder in a checkpoint."""


def write_peft(checkpoint: Path, config: Config) -> None:
    """Write the adapter of `checkpoint`, whose weights are complete, into it. Raises OSError and
    CheckpointError.

    PEFT has no fused layers, so weights that share a lora_A here have one each there.
    """
    lora, arch = config.policy.lora, read_architecture(config)
    assert lora is not None
    boxes, tensors, modules = [], {}, []
    shapes = hf_tensors(arch)
    for weight, first in shared_inputs(arch, lora.targets).items():
        rows, columns = shapes[weight]
        modules.append(weight.removesuffix(".weight"))
        halves = {"lora_A": (first, (lora.rank, columns)), "lora_B": (weight, (rows, lora.rank))}
        for half, (owner, shape) in halves.items():
            values = torch.empty(shape, dtype=torch_dtype(config.policy.precision))
            boxes.append(Box(adapter_name(owner, half), (0, 0), shape, values))
            tensors[f"base_model.model.{modules[-1]}.{half}.weight"] = values
    Reading(checkpoint, boxes).run()
    folder = checkpoint / FOLDER
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", about)
