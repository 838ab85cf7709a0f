"""The options of Megatron-LM with which it computes the model of a checkpoint."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from dapo_megatron.checkpoints.formats.torch_dist.model_config import (
    RENAMED,
    as_arguments,
    megatron_fields,
)
from dapo_megatron.model import Architecture

_NO_OPTION = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
"""Arguments without an option -> what Megatron-LM computes with."""
_IGNORED = {"rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None}
"""Arguments whose option Megatron-LM 0.16.1 ignores -> what it computes with."""
_INTEGERS = ("rotary_base", "rotary_seq_len_interpolation_factor")
"""Options that take an integer only."""


def print_options(arch: Architecture) -> dict[str, Any]:
    """Print the options of Megatron-LM for a model. Return them for --json."""
    options, missing = megatron_lm_options(arch), fields_without_option(arch)
    print("options of Megatron-LM for this model:")
    text = " ".join(option.replace(" ", "\0") for option in options)
    lines = textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
    print(" \\\n".join("    " + line.replace("\0", " ") for line in lines))
    if missing:
        values = ", ".join(f"{name} = {value}" for name, value in missing.items())
        print(
            f"Megatron-LM has no option for {values}, or ignores it, and computes another model "
            "until you set this in its code. Megatron-Bridge reads it from run_config.yaml"
        )
    return {"megatron_lm_options": options, "megatron_lm_without_option": missing}


def megatron_lm_options(arch: Architecture) -> list[str]:
    """Return the options of a model, with their values: `--num-layers 28`.

    They do not include those of training, such as the layout, the precision and `--seq-length`.
    Raises ConfigError as `megatron_fields` does.
    """
    return list(_options(_arguments(arch)))


def fields_without_option(arch: Architecture) -> dict[str, Any]:
    """Return the arguments that Megatron-LM has no option for, or whose option it ignores.

    If there are any, `pretrain_gpt.py` computes another model, unless its model builder is changed.
    """
    arguments = _arguments(arch)
    missing = {
        name: arguments[name]
        for name, default in (_NO_OPTION | _IGNORED).items()
        if name in arguments and arguments[name] != default
    }
    if arguments["position_embedding_type"] == "yarn":
        missing |= {name: value for name, value in arguments.items() if _has_none(name, value)}
    if not float(arguments["rotary_base"]).is_integer():
        missing["rotary_base"] = arguments["rotary_base"]
    return missing


def _arguments(arch: Architecture) -> dict[str, Any]:
    fields = megatron_fields(arch) | {
        "ffn_hidden_size": arch.intermediate_size,
        "max_position_embeddings": arch.max_positions,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    arguments = as_arguments(fields)
    return {name: value for name, value in arguments.items() if name not in RENAMED}


def _options(arguments: Mapping[str, Any]) -> Iterator[str]:
    is_latent = arguments["multi_latent_attention"]
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if name == "add_bias_linear":
            if not value:
                yield "--disable-bias-linear"
        elif name == "num_query_groups":
            if value != arguments["num_attention_heads"]:
                yield f"--group-query-attention {option} {value}"
        elif name == "moe_layer_freq":
            yield f'{option} "{_as_sum(value)}"'
        elif value is None or value is False or _has_none(name, value):
            continue
        elif name in _INTEGERS:
            if float(value).is_integer():
                yield f"{option} {value:.0f}"
        elif value is True:
            yield option
        else:
            yield f"{option} {value}"
    if is_latent and arguments["rope_type"] == "rope":
        yield "--no-rope-fusion"  # Megatron fuses only yarn


def _has_none(name: str, value: Any) -> bool:
    """Return whether Megatron-LM has no option for an argument, or not with this value."""
    is_yarn = name.startswith("yarn_") or (name == "position_embedding_type" and value == "yarn")
    return is_yarn or name in _NO_OPTION


def _as_sum(layers: list[int]) -> str:
    """Return which layers have experts, as Megatron-LM reads it: `([0]*1+[1]*26)`."""
    num_dense = layers.count(0)
    return f"([0]*{num_dense}+[1]*{len(layers) - num_dense})"
