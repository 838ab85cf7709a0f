"""Models of published shapes with random weights, in HF folders, made once per workspace."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dapo_megatron.model import architecture, hf_tensors

_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
}
_QWEN3 = _QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_TOP_8 = {"num_experts": 32, "num_experts_per_tok": 8}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}

SHAPES: dict[str, dict[str, Any]] = {
    # From config.json of Qwen/Qwen2.5-0.5B, Qwen/Qwen3-0.6B-Base and Qwen/Qwen3-4B-Base.
    "0.5b": _QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    # Like Qwen/Qwen3-30B-A3B: the same width of experts and an untied head. The rest is smaller.
    "moe": _QWEN3
    | _EXPERTS
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32_768,
    },
    "tiny": _QWEN3 | _TINY,
    "tiny_moe": _QWEN3 | _TINY | _EXPERTS | {"moe_intermediate_size": 48},
}
SHAPES |= {f"{name}_top8": SHAPES[name] | _TOP_8 for name in ("moe", "tiny_moe")}
SHAPES["4b_18_layers"] = SHAPES["4b"] | {"num_hidden_layers": 18}
INIT_STD = 0.02
LOGIT_STD = 5.0
"""Standard deviation of logits of the models NAME_sharp. Their largest logits are about 25, as in a
trained model. Logits of plain random weights are about 0.6, too small for roundings to show."""
SHAPES |= {f"{name}_sharp": SHAPES[name] for name in ("0.6b", "4b", "tiny")}


def model_folder(name: str, workspace: Path) -> Path:
    """Return the folder of a bfloat16 model of this shape. Make it if it does not exist."""
    folder = workspace / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    with made_once(folder / "config.json") as is_missing:
        if is_missing:
            _make_model(name, folder)
    return folder


@contextmanager
def made_once(path: Path) -> Iterator[bool]:
    """Lock a file while it is made, so that one of several ranks makes it and the others wait.
    Yield whether it is missing."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not path.exists()


def _make_model(name: str, folder: Path) -> None:
    from make_tiny_model import make_tokenizer  # heavy, and needed once

    tokenizer = make_tokenizer()
    hf = SHAPES[name] | {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "torch_dtype": "bfloat16",
    }
    tokenizer.save_pretrained(folder)
    save_file(
        _random_weights(hf, is_sharp=name.endswith("_sharp")),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    # Last, because its existence marks a complete folder.
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")


def _random_weights(hf: dict[str, Any], *, is_sharp: bool) -> dict[str, Tensor]:
    """Make norms of about 1 and other weights of about 0. The last norm sets the size of the logits
    if `is_sharp`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in hf_tensors(architecture(hf)).items():
        values = torch.empty(shape, device=device).normal_(std=INIT_STD, generator=generator)
        if name.endswith("norm.weight"):
            values += 1.0
        if is_sharp and name == "model.norm.weight":
            values *= LOGIT_STD / (INIT_STD * math.sqrt(hf["hidden_size"]))
        weights[name] = values.bfloat16().cpu()
    return weights
