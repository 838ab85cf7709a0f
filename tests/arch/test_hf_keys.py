"""Test that only the room `model` interprets config.json: no other room names one of its keys."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from dapo_megatron.model import architecture, hf_config
from dapo_megatron.model.hf_fields import Fields
from dapo_megatron.model.published import published_models

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "dapo_megatron"
LOOKUPS = {"get", "pop", "setdefault", "__getitem__", "getattr", "hasattr"}


def read_keys() -> set[str]:
    """Return the keys that the room `model` reads in the published models, or whose value it
    requires."""
    made: list[Fields] = []

    class Recorded(Fields):
        def __init__(self, *values: object) -> None:
            super().__init__(*values)
            made.append(self)

    with patch.object(hf_config, "Fields", Recorded):
        for model in published_models().values():
            architecture(model.hf)
    return set().union(*(fields.read for fields in made))


KEYS = read_keys() | {"model_type"}

EXCEPTIONS = {
    ("config/file.py", "model_type"): "pydantic's name of an error",
    **{
        ("policy/model.py", key): "a field of Megatron's MLATransformerConfig"
        for key in ("moe_layer_freq", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim")
    },
    **{
        ("checkpoints/formats/torch_dist/model_config.py", key): "a field of run_config.yaml"
        for key in [
            "hidden_size",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
            "rope_scaling",
            "attention_dropout",
            "num_experts",
            "moe_layer_freq",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "v_head_dim",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        ]
    },
}


def keys(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for every string that is used as a key or as a name of a field."""
    for node in ast.walk(tree):
        expressions: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript):
            expressions = [node.slice]
        elif isinstance(node, ast.Dict):
            expressions = list(node.keys)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            expressions = [node.left]
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(
            node.iter, ast.Tuple | ast.List | ast.Set
        ):
            expressions = list(node.iter.elts)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            expressions = list(node.value.elts)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            expressions = list(node.args) if name in LOOKUPS else []
        for expression in expressions:
            if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
                yield expression.lineno, expression.value


def keys_outside_model(folder: Path) -> set[tuple[str, int, str]]:
    """Return (file, line, key) for all keys of config.json named outside the room `model`."""
    return {
        (str(path.relative_to(folder)), line, key)
        for path in folder.rglob("*.py")
        if path.relative_to(folder).parts[0] != "model"
        for line, key in keys(ast.parse(path.read_text(encoding="utf-8")))
        if key in KEYS
    }


def test_only_the_room_model_names_keys_of_config_json() -> None:
    outside = keys_outside_model(PACKAGE)
    wrong = [
        f"dapo_megatron/{file}:{line} names {key}; ask the Architecture instead"
        for file, line, key in sorted(outside)
        if (file, key) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)
    assert EXCEPTIONS.keys() <= {(file, key) for file, _, key in outside}  # still needed
