"""The configs that gpu_check's checks build on a Hopper GPU, in their real shapes, are valid."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.model import architecture
from dapo_megatron.plan.compatibility import Machine, check
from dapo_megatron.plan.layout import check_layout
from tests.helpers.configs import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

from gpu_checks import rig, shapes, states, steps, training
from gpu_checks.catalog import BY_NAME, CHECKS
from gpu_checks.rig import Setting

HOPPER = Machine(
    capability=(9, 0), cuda=(13, 0), packages=frozenset({"transformer_engine", "triton"})
)
SUBJECTS = {"training": training, "states": states}
FAKE_RESULTS = {
    "logprobs": torch.zeros(4),
    "after": torch.zeros(4),
    "losses": [4.0, 3.0, 2.0, 1.0],
    "norms": [1.0] * 4,
    "ratios": [0.0, 0.0],
    "ratios_prompts": [0.0],
}


class Stopped(Exception):
    """Raised instead of building a policy."""


@pytest.fixture
def built_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Return the configs that checks build. Steps return FAKE_RESULTS; no model is built."""
    configs: list[Any] = []

    def folder(self: Setting, name: str) -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(shapes.SHAPES[name]))
        return path

    def policy(config: Any, *_: Any) -> Any:
        configs.append(config)
        raise Stopped

    def run(setting: Setting, _: Any, *overrides: str, model: str = steps.DENSE) -> dict[str, Any]:
        config = rig.make_config(setting, model, *overrides, row_tokens=steps.ROW_TOKENS)
        configs.append(config)
        return dict(FAKE_RESULTS)

    monkeypatch.setattr(Setting, "model", folder)
    monkeypatch.setattr(rig, "has_gpu", lambda: True)  # chooses the precision
    for module in (states, training):
        monkeypatch.setattr(module, "make_policy", policy)
    for module in SUBJECTS.values():
        monkeypatch.setattr(module, "join_alone", lambda: None)
        monkeypatch.setattr(module, "run", run, raising=False)
        monkeypatch.setattr(module, "reference_of", lambda *_: dict(FAKE_RESULTS), raising=False)
    monkeypatch.setattr(training, "has_te", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    yield configs


@pytest.mark.parametrize(
    "name", [check.name for check in CHECKS if check.where.split(":")[0] in SUBJECTS]
)
def test_the_configs_of_a_check_are_allowed_on_hopper(
    name: str, built_configs: list[Any], tmp_path: Path
) -> None:
    try:
        figures = list(BY_NAME[name].run()(Setting(tmp_path)))
    except Stopped:
        figures = []
    assert built_configs and all(figure.verdict == "ok" for figure in figures)
    for config in built_configs:
        arch = architecture(shapes.SHAPES[Path(config.model.path).name])
        check_layout(config, arch, 1)
        check(config, arch, HOPPER)
