"""Published dimensions of a model are used only if its folder does not exist."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dapo_megatron.config import Config, ModelConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.model import architecture, planned_architecture, published_notes
from dapo_megatron.model.published import find_published, published_models
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY

CONFIGS = REPOSITORY / "model_configs"


def config(path: str | Path) -> Config:
    tiny = load_config(CONFIGS / "tiny_cpu.yaml")
    return tiny.model_copy(update={"model": ModelConfig(path=str(path))})


@pytest.mark.parametrize(
    "path",
    ["Qwen/Qwen3-30B-A3B", "/models/Qwen3-30B-A3B", "models/qwen3-30b-a3b/", "Qwen3-30B-A3B"],
)
def test_the_last_component_of_a_path_names_the_model(path: str) -> None:
    model = find_published(path)
    assert model is not None and model.name == "Qwen/Qwen3-30B-A3B"
    assert planned_architecture(config(path)) == architecture(model.hf)


def test_the_models_of_all_model_configs_are_known() -> None:
    for path in CONFIGS.glob("qwen*.yaml"):
        assert find_published(load_config(path).model.path) is not None, path.name


def test_a_model_folder_takes_precedence_over_published_dimensions(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"Qwen3-8B/config.json: cannot be read"):
        planned_architecture(config(folder))  # an interrupted download
    own = dict(published_models()["Qwen3-8B"].hf) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(own), encoding="utf-8")
    assert planned_architecture(config(folder)).num_layers == 2
    assert list(published_notes(config(folder))) == []


def test_a_run_with_longer_sequences_than_published_is_planned_with_a_note() -> None:
    math = load_config(CONFIGS / "qwen2.5_math_7b.yaml", ["model.path=nowhere/Qwen2.5-Math-7B"])
    model = published_models()["Qwen2.5-Math-7B"]
    planned = planned_architecture(math)
    assert planned.max_positions == math.max_sequence_tokens > 4096
    assert replace(planned, max_positions=4096) == architecture(model.hf)
    source, positions = published_notes(math)
    assert "published dimensions of Qwen/Qwen2.5-Math-7B" in source
    assert "published as 4,096, but the run needs 10,240" in positions
