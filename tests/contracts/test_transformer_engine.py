"""What this project and Megatron-core lean on in Transformer Engine, where it is installed.

No GPU is needed: modules are not run. `make test-gpu-stack` runs this in the H100 stack; without
the package it is skipped.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.contracts.names import check_arguments, check_name, find, imports_of

if importlib.util.find_spec("transformer_engine") is None:
    pytest.skip("Transformer Engine is not installed: CPU stack", allow_module_level=True)

ADAM = "transformer_engine.pytorch.optimizers:FusedAdam"
SCALES = "transformer_engine.pytorch.quantization:FP8GlobalStateManager."
EXTENSIONS = "megatron.core.extensions.transformer_engine:"

NAMES = {
    ADAM: "policy/optimizer.py",
    EXTENSIONS + "TENorm": "policy/specs.py",
    EXTENSIONS + "TEDotProductAttention": "policy/specs.py",
    EXTENSIONS + "TELayerNormColumnParallelLinear": "policy/specs.py",
    EXTENSIONS + "TERowParallelLinear": "policy/specs.py",
    EXTENSIONS + "TEGroupedLinear": "policy/specs.py",
    "transformer_engine.common.recipe:DelayedScaling": "policy/fp8.py",
    "transformer_engine.common.recipe:Float8CurrentScaling": "policy/fp8.py",
    "transformer_engine.common.recipe:Float8BlockScaling": "policy/fp8.py",
    SCALES + "reduce_and_update_fp8_tensors": "policy/fp8.py",
}

GONE = {
    # Megatron-core 0.16.1 was made for versions 2.9 to 2.11, and asks for these if they are there:
    "transformer_engine.pytorch.attention:_SplitAlongDim",  # else it splits with torch
    "transformer_engine.pytorch.module.base:get_workspace",  # else routers of its own use torch
    # And these it asks of old versions alone.
    "transformer_engine.pytorch.attention:apply_rotary_pos_emb",
    "transformer_engine.pytorch.cpp_extensions:cast_to_fp8",
}
"""What Megatron-core imports from Transformer Engine, and does without."""


@pytest.mark.parametrize("path", NAMES | imports_of("transformer_engine"))
def test_name(path: str) -> None:
    check_name(path, NAMES.get(path, "dapo_megatron"))


def test_three_parts_are_of_one_version() -> None:
    parts = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    assert len({version(part) for part in parts}) == 1


def test_megatron_has_found_it() -> None:
    """Where that import fails, Megatron goes on without a word."""
    for module in ("extensions.transformer_engine", "transformer.moe.experts", "fp8_utils"):
        assert find(f"megatron.core.{module}:HAVE_TE") is True, module


def test_megatron_finds_all_it_asks_for() -> None:
    """Its imports are tried one by one, and what is missing switches features off."""
    missing = set()
    for path in imports_by_megatron():
        try:
            check_name(path, "Megatron-core")
        except AssertionError:
            missing.add(path)
    assert missing == GONE


def imports_by_megatron() -> set[str]:
    folder = Path(str(import_module("megatron.core").__file__)).parent
    return {
        f"{node.module}:{name.name}"
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] == "transformer_engine"
        for name in node.names
    }


def test_fused_adam_takes_what_megatron_and_we_give() -> None:
    check_arguments(
        ADAM,
        "params lr betas eps weight_decay adam_w_mode master_weights use_decoupled_grad "
        "exp_avg_dtype exp_avg_sq_dtype store_param_remainders",
        "policy/optimizer.py",
    )


def test_fused_adam_counts_steps_in_its_groups() -> None:
    """policy/optimizer.py keeps them so."""
    assert 'group["step"]' in inspect.getsource(find(ADAM).step)
