"""The configs that gpu_check's checks build on a Hopper GPU, built here in their real shapes: each
is one that a run would start with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.model import architecture
from dapo_megatron.plan.compatibility import check
from dapo_megatron.plan.compatibility.rule import PACKAGES, Machine
from dapo_megatron.plan.layout import check_layout
from tests.helpers.configs import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

from gpu_checks import fp8, rig, shapes, states, steps, training
from gpu_checks.catalog import SHOWN
from gpu_checks.rig import Setting

HOPPER = Machine(capability=(9, 0), cuda=(13, 0), packages=frozenset(PACKAGES))
SUBJECTS = {"training": training, "fp8": fp8, "states": states}
FOUND = {
    "logprobs": torch.zeros(4),
    "after": torch.zeros(4),
    "losses": [4.0, 3.0, 2.0, 1.0],
    "norms": [1.0] * 4,
    "ratios": [0.0, 0.0],
    "ratios_prompts": [0.0],
}


class Stopped(Exception):
    """Where a policy would have been built."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Configs that were asked for; steps give FOUND, and no model is made."""
    configs: list[Any] = []

    def folder(self: Setting, name: str) -> Path:
        made = tmp_path / name
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text(json.dumps(shapes.SHAPES[name]))
        return made

    def policy(config: Any, *_: Any) -> Any:
        configs.append(config)
        raise Stopped

    def run(setting: Setting, _: Any, *overrides: str, model: str = steps.DENSE) -> dict[str, Any]:
        config = rig.make_config(setting, model, *overrides, row_tokens=steps.ROW_TOKENS)
        configs.append(config)
        return dict(FOUND)

    monkeypatch.setattr(Setting, "model", folder)
    monkeypatch.setattr(rig, "has_gpu", lambda: True)  # of precision
    monkeypatch.setattr(states, "make_policy", policy)
    for module in SUBJECTS.values():
        monkeypatch.setattr(module, "one_rank", lambda: None)
        monkeypatch.setattr(module, "run", run, raising=False)
        monkeypatch.setattr(module, "reference_of", lambda *_: dict(FOUND), raising=False)
    monkeypatch.setattr(training, "has_te", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    yield configs


@pytest.mark.parametrize("name", [one.name for one in SHOWN if one.where.split(":")[0] in SUBJECTS])
def test_a_config_of_a_check_is_allowed_on_hopper(
    name: str, built: list[Any], tmp_path: Path
) -> None:
    one = next(check for check in SHOWN if check.name == name)
    try:
        figures = list(one.run()(Setting(tmp_path)))
    except Stopped:
        figures = []
    assert built and all(figure.verdict == "ok" for figure in figures)
    for config in built:
        arch = architecture(shapes.SHAPES[Path(config.model.path).name])
        check_layout(config, arch, 1)
        check(config, arch, HOPPER)


def test_the_shipped_fp8_settings_are_the_config_files() -> None:
    settings = fp8.shipped_settings()
    assert settings["recipe"] == "blockwise" and settings["bf16_first_layers"]
