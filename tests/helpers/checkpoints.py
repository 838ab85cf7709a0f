"""Write random checkpoints of any size, block by block, and convert, compare and damage them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import Store, blocks, read_parameter
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.torch_dist.boxes import Box, write_boxes, write_metadata
from dapo_megatron.checkpoints.formats.torch_dist.model_config import MARK
from dapo_megatron.checkpoints.formats.torch_dist.names import (
    KeyEntry,
    Name,
    key_entry,
    parameters_of,
)
from dapo_megatron.checkpoints.formats.torch_dist.reading import COMMON
from dapo_megatron.checkpoints.formats.torch_dist.store import write_about
from dapo_megatron.checkpoints.formats.weights_folder import copy_companions, publish
from dapo_megatron.model import architecture, hf_tensors
from dapo_megatron.types import whole
from tests.helpers.torch_dist import to_torch_dist
from tools import convert_checkpoint
from tools.converting.compare import compare

SHARED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
LARGE_TENSORS: dict[str, Any] = {
    **SHARED,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32768,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
"""HF config of a model whose embedding and head have 64 MiB each in bfloat16."""


def write_random(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    max_file_bytes: int = 4 * 2**30,
) -> Path:
    """Write a model of `config` with normal weights of standard deviation 0.02. Return `folder`."""
    folder.mkdir(parents=True)
    infos = {
        name: TensorInfo(shape, dtype) for name, shape in hf_tensors(architecture(config)).items()
    }
    generator = torch.Generator().manual_seed(seed)
    writer = HfWriter(folder, infos, max_file_bytes)
    writer.create()
    for name, info in infos.items():
        for box in blocks(whole(info.shape), info.dtype.itemsize):
            value = torch.empty(box.shape, dtype=dtype).normal_(0.0, 0.02, generator=generator)
            if name.endswith("linear_attn.norm.weight"):
                value += 1  # Megatron stores it minus 1
            writer.write(name, value, box)
    writer.finish()
    named = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(named, indent=2), encoding="utf-8")
    settings = {"do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder


# Sizes are deliberately no powers of two, and the vocabulary size is odd.
ODD = {
    **SHARED,
    "hidden_size": 36,
    "intermediate_size": 60,
    "num_hidden_layers": 7,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_153,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "vocab_size": 101,
}
BIASED_MOE = {  # the first of three layers is dense
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 3,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 11,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_hidden_layers": 3,
    "vocab_size": 101,
}
LATENT = {
    **BIASED_MOE,
    "num_key_value_heads": 9,
    "q_lora_rank": 22,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
GLM4_MOE_LITE = {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]}
GLM4_MOE = {
    **BIASED_MOE,
    "n_shared_experts": 12,
    "head_dim": 12,
    "use_qk_norm": True,
    "attention_bias": True,
}
DELTA = {  # four layers of which the last has attention
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "vocab_size": 101,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**ODD, "model_type": "llama"},
    "llama_tied": {**ODD, "model_type": "llama", "tie_word_embeddings": True},
    "mistral": {**ODD, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**ODD, "model_type": "qwen2", "use_sliding_window": False},
    "qwen2_tied": {**ODD, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**ODD, "model_type": "qwen3", "head_dim": 14},
    "qwen3_moe": {**ODD, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 14},
    "deepseek_v3": {**ODD, **LATENT, "model_type": "deepseek_v3"},
    "glm4_moe_lite": {**ODD, **GLM4_MOE_LITE, "model_type": "glm4_moe_lite"},
    "glm4_moe": {**ODD, **GLM4_MOE, "model_type": "glm4_moe"},
    "qwen3_5": {**ODD, **DELTA, "model_type": "qwen3_5_text"},
    "qwen3_5_moe": {
        **ODD,
        **EXPERTS,
        **DELTA,
        "shared_expert_intermediate_size": 12,
        "model_type": "qwen3_5_moe_text",
    },
}


def to_hf(source: Store, folder: Path, max_file_bytes: int = 2**30) -> Store:
    with publish(folder, overwrite=True) as partial:
        writer = HfWriter(partial, source.tensors, max_file_bytes)
        writer.create()
        writer.copy(source, source.tensors, lambda _: None)
        writer.finish()
        copy_companions(source.model_folder, partial)
    return open_store(folder)


def differences(left: Store, right: Store) -> list[str]:
    return [
        f"{difference.name}: {difference.kind}: {difference.text}"
        for difference in compare(left, right, lambda _: None)
    ]


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a small model, for tests that damage a checkpoint."""
    return {**MODELS[name], "num_hidden_layers": 2, "vocab_size": 37, **changes}


def make_checkpoint(folder: Path) -> Path:
    """Write a model of two layers as HF and, of that, a checkpoint of Megatron. Return the latter,
    which is next to `hf`."""
    config = config_of("qwen2", num_key_value_heads=3)
    return to_torch_dist(open_store(write_random(folder / "hf", config)), folder / "saved")


def training_checkpoint(source: Store, folder: Path, num_ranks: int = 2) -> Path:
    """Write a training checkpoint like policy/checkpoint.py. Each rank has a part of the rows of
    every parameter and of its moments. Three rows pad the vocabulary."""
    folder.mkdir(parents=True)
    copy_companions(source.model_folder, folder)
    boxes: list[list[Box]] = [[] for _ in range(num_ranks)]
    for local, parameter in parameters_of(source.arch).items():
        values = read_parameter(source, parameter)
        if "decoder." not in local:
            values = torch.nn.functional.pad(values, (0, 0, 0, 3))
        stacks = source.arch.num_experts  # experts of a layer, in one tensor
        entry = key_entry(local, source.arch) if stacks else KeyEntry(Name(local), (), ())
        shape, first = (*entry.sizes, *values.shape), 0
        for of_rank, part in zip(boxes, values.tensor_split(num_ranks), strict=True):
            box = part.reshape(*(1 for _ in entry.index), *part.shape)
            offset = (*entry.index, first, *(0 for _ in part.shape[1:]))
            for key in (entry.name.key, f"optimizer.state.exp_avg.{entry.name.key}"):
                of_rank += [Box(key, offset, shape, box)] if len(part) else []
            first += len(part)
    stored = []
    for rank, of_rank in enumerate(boxes):
        of_rank.append(Box("rng.cpu", (rank, 0), (num_ranks, 4), torch.zeros(1, 4)))
        stored += write_boxes(folder, rank, of_rank, {})[0]
    write_metadata(folder, stored)
    torch.save({"iteration": 40, MARK: {}}, folder / COMMON)
    write_about(folder)
    (folder / "state.json").write_text("{}")
    return folder


def invoke(*arguments: object) -> tuple[int, str]:
    """Run a command of tools/convert_checkpoint.py in this process. Return exit code and output."""
    result = CliRunner().invoke(convert_checkpoint.app, [str(each) for each in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def flip_bit(path: Path, values: torch.Tensor) -> None:
    """Flip the lowest bit of the last element where the file holds these values, in place."""
    content, searched = path.read_bytes(), bytes(values.contiguous().view(torch.uint8).flatten())
    assert content.count(searched) == 1
    at = content.index(searched) + len(searched) - values.itemsize
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
