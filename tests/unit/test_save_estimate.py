"""plan.json: estimated GPU memory of the phases whose memory a run measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapo_megatron.plan import GIB, estimate
from dapo_megatron.plan.estimate import ENGINE_RANKS, NodeSpec, estimate_memory, save_estimate
from tests.helpers.configs import tiny_config


def test_plan_json_has_the_phases_whose_memory_is_measured(tmp_path: Path) -> None:
    config, notes = tiny_config(), list[str]()
    save_estimate(config, tmp_path / "plan.json", notes.append, 2, int(79.25 * GIB))
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert not notes
    assert kept["device"] == "gpu"
    plan = estimate_memory(config, 2, NodeSpec(gpu_memory_gib=79.25, gpus_per_node=2))
    assert kept["phases"] == {
        phase: plan.num_bytes(phase) / GIB for phase in ("generate", "logprobs", "update", "sync")
    }


def test_plan_json_has_the_memory_of_the_ranks_that_measure_a_phase(tmp_path: Path) -> None:
    """GPUs with only an engine measure none."""
    config = tiny_config(engine__colocated=False, policy__tensor_parallel=1)
    save_estimate(config, tmp_path / "plan.json", list[str]().append, 1, int(79.25 * GIB))
    phases = json.loads((tmp_path / "plan.json").read_text())["phases"]
    plan = estimate_memory(config, 1, NodeSpec(gpu_memory_gib=79.25, gpus_per_node=1))
    assert phases["generate"] < plan.num_bytes("generate") / GIB
    del plan.kinds[ENGINE_RANKS]
    assert phases == {phase: plan.num_bytes(phase) / GIB for phase in phases}


def test_a_plan_that_cannot_be_made_or_written_is_only_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    save_estimate(
        tiny_config(), tmp_path / "missing" / "plan.json", notes.append, 2, int(79.25 * GIB)
    )
    assert "no plan.json" in notes.pop()
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    unknown = tiny_config(model__path=str(tmp_path))
    save_estimate(unknown, tmp_path / "plan.json", notes.append, 2, int(79.25 * GIB))
    assert "unheard_of" in notes.pop()
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("error", [KeyError("head_dim"), ZeroDivisionError("by zero"), TypeError()])
def test_an_error_of_the_estimate_is_only_a_note(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    notes: list[str] = []
    monkeypatch.setattr(estimate, "estimate_memory", fail)
    save_estimate(tiny_config(), tmp_path / "plan.json", notes.append, 2, int(79.25 * GIB))
    assert notes == [f"  no plan.json: {type(error).__name__}: {error}"]
