"""Overlays of objectives and corrections: each gives its setting on any config and overlay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.algo.loss import regularized_loss
from dapo_megatron.config import Config, LossConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.files import read_json
from dapo_megatron.model import architecture
from dapo_megatron.plan.compatibility import Machine, check
from dapo_megatron.run.loss import loss_function
from tests.helpers.configs import REPOSITORY, TINY

OBJECTIVES = sorted((TINY.parent / "objectives").glob("*.yaml"))
CORRECTIONS = sorted((TINY.parent / "corrections").glob("*.yaml"))
REGULARIZATION = sorted((TINY.parent / "regularization").glob("*.yaml"))
DISTILLATION = sorted((TINY.parent / "distillation").glob("*.yaml"))
SEPARATE = sorted((TINY.parent / "separate").glob("*.yaml"))
CONFIGS = sorted(path for path in TINY.parent.glob("*.yaml"))


def load(*overlays: Path, config: Path = TINY) -> Config:
    return load_config(config, overlays=list(overlays))


def test_every_objective_has_an_overlay() -> None:
    names = LossConfig.model_fields["objective"].annotation.__args__  # type: ignore[union-attr]
    assert {path.stem for path in OBJECTIVES} == set(names) - {"none"}
    for path in OBJECTIVES:
        assert load(path).loss.objective == path.stem


@pytest.mark.parametrize(
    "overlay",
    [*OBJECTIVES, *CORRECTIONS, *REGULARIZATION, *DISTILLATION, *SEPARATE],
    ids=lambda path: path.stem,
)
def test_an_overlay_runs_on_the_tiny_config(overlay: Path) -> None:
    config = load(overlay)
    model = architecture(read_json(REPOSITORY / config.model.path / "config.json"))
    assert check(config, model, Machine()) == []
    loss_function(config.loss)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("overlay", OBJECTIVES, ids=lambda path: path.stem)
def test_an_objective_is_the_same_on_any_config_and_overlay(config: Path, overlay: Path) -> None:
    def objective(loss: LossConfig) -> dict[str, Any]:
        clip = ("clip_low", "clip_high", "dual_clip")
        names = ("objective", *clip, "aggregation", "advantage_std", "tau_pos", "tau_neg")
        return {name: getattr(loss, name) for name in names}

    expected = objective(load(overlay).loss)
    for below in (path for path in OBJECTIVES if path.stem in ("cispo", "dr_grpo")):
        assert objective(load(below, overlay, config=config).loss) == expected


def test_regularization_can_be_combined_with_every_objective() -> None:
    for objective in OBJECTIVES:
        loss = load(objective, *REGULARIZATION).loss
        assert loss.kl.is_on and loss.entropy_coefficient > 0.0
        assert loss_function(loss).func is regularized_loss  # type: ignore[attr-defined]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda path: path.stem)
def test_gspo_can_follow_every_correction(correction: Path) -> None:
    [gspo] = [path for path in OBJECTIVES if path.stem == "gspo"]
    loss = load(correction, gspo).loss
    assert loss.tis_cap is None and loss.correction.token_band is None
