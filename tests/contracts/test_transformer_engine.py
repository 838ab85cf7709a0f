"""Test the names in Transformer Engine that this project and Megatron-core use.

No GPU is needed, because modules are not run. `make test-gpu-stack` runs these tests in the H100
stack. Without the package they are skipped.
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
    SCALES + "split_key_in_buffer": "policy/fp8.py",
}

GONE = {
    # Megatron-core 0.16.1 was made for versions 2.9 to 2.11, and imports these if they exist:
    "transformer_engine.pytorch.attention:_SplitAlongDim",  # otherwise it splits with torch
    "transformer_engine.pytorch.module.base:get_workspace",  # otherwise its routers use torch
    # It imports these only from old versions.
    "transformer_engine.pytorch.attention:apply_rotary_pos_emb",
    "transformer_engine.pytorch.cpp_extensions:cast_to_fp8",
}
"""Names that Megatron-core tries to import from Transformer Engine, and can do without."""


@pytest.mark.parametrize("path", NAMES | imports_of("transformer_engine"))
def test_name_exists(path: str) -> None:
    check_name(path, NAMES.get(path, "dapo_megatron"))


def test_the_three_packages_have_the_same_version() -> None:
    parts = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    assert len({version(part) for part in parts}) == 1


def test_megatron_detects_transformer_engine() -> None:
    """If the import fails, Megatron silently goes on without it."""
    for module in ("extensions.transformer_engine", "transformer.moe.experts", "fp8_utils"):
        assert find(f"megatron.core.{module}:HAVE_TE") is True, module


def test_only_known_names_are_missing_for_megatron() -> None:
    """Megatron tries its imports one by one. A missing name disables a feature."""
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


def test_fused_adam_accepts_the_arguments_of_megatron_and_policy() -> None:
    check_arguments(
        ADAM,
        "params lr betas eps weight_decay adam_w_mode master_weights use_decoupled_grad "
        "exp_avg_dtype exp_avg_sq_dtype store_param_remainders",
        "policy/optimizer.py",
    )


def test_fused_adam_counts_steps_per_parameter_group() -> None:
    """policy/optimizer.py saves the counts of groups."""
    assert 'group["step"]' in inspect.getsource(find(ADAM).step)
