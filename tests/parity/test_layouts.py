"""`doctor layouts` on real ranks: every layout gives the gradient of one process, and a policy with
a classic fault is found out, by exactly the rows that the fault touches.

Fast: two ranks, the skewed split. The whole matrix on four ranks, of eight models: `make
test-layouts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.config.file import load_config
from dapo_megatron.doctor.matrix import matrix
from dapo_megatron.doctor.shrink import shrink
from dapo_megatron.files import read_json
from dapo_megatron.model import architecture
from tests.helpers.commands import run
from tests.helpers.models import RANDOM_MODELS, make_random_model
from tests.unit.test_cli import environment_without_launcher

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = {name: f"model_configs/{name}.yaml" for name in ("tiny_cpu", "tiny_moe")}
BOUNDS = {"float64": 1e-9, "float32": 1e-5}
Rows = dict[str, dict[str, Any]]


def doctor(
    folder: Path, *arguments: str, ranks: int = 2, fault: str = "none"
) -> tuple[int, Rows, str]:
    """Run the command; its exit code, its rows by the name of the case, and what it printed."""
    figures = folder / "figures.json"
    ran = run(
        *("-m", "tests.helpers.broken_doctor", fault, "--ranks", ranks),
        *("doctor", "layouts", *arguments, "--json", figures),
        environment={**environment_without_launcher(), "OMP_NUM_THREADS": "1"},
    )
    said = ran.stdout + ran.stderr[-4000:]
    assert figures.exists(), said
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    return ran.returncode, {_name(row): row for row in rows}, said


def _name(row: dict[str, Any]) -> str:
    yours = "yours: " if row["yours"] else ""
    return f"{yours}{row['layout']}, {row['split']}, {'packed' if row['packed'] else 'padded'}"


def cases(config: str, precision: str, only: str) -> list[str]:
    """The names that the command's rows must have on two ranks."""
    loaded = load_config(REPOSITORY / CONFIGS[config])
    hf = read_json(REPOSITORY / loaded.model.path / "config.json")
    arch = shrink(architecture(hf), loaded.policy)
    return [case.name for case in matrix(loaded, arch, 2, precision) if only in case.name]


def check(row: dict[str, Any], precision: str) -> None:
    bound = BOUNDS[precision]
    assert row["gradient"] <= bound, row["tensor"]
    assert row["loss"] <= bound
    assert row["weights"] <= 1e-5
    assert row["grad_norm"] <= 1e-5
    assert row["losses"] <= 1e-5
    assert row["ok"]


# ------------------------------------------------------------------ the proof, on two ranks

FAST = [
    ("tiny_cpu", "float64", "skewed, packed"),
    ("tiny_cpu", "float64", "CP2, skewed, padded"),
    ("tiny_moe", "float32", "skewed, packed"),
]
"""(config, precision, --only). Padded rows: test_latent.py has tensor parallelism."""


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int, Rows, str]]:
    return {
        (config, only): doctor(
            tmp_path_factory.mktemp(config),
            CONFIGS[config],
            "--precision",
            precision,
            "--only",
            only,
        )
        for config, precision, only in FAST
    }


@pytest.mark.parametrize(
    ("config", "only", "precision", "case"),
    [
        (config, only, precision, case)
        for config, precision, only in FAST
        for case in cases(config, precision, only)
    ],
)
def test_a_layout_gives_the_gradient_of_one_process(
    config: str, only: str, precision: str, case: str, fast: Any
) -> None:
    check(fast[config, only][1][case], precision)


@pytest.mark.parametrize(("config", "only"), [(config, only) for config, _, only in FAST])
def test_the_command_says_so(config: str, only: str, fast: Any) -> None:
    code, rows, said = fast[config, only]
    assert code == 0
    assert ("the case agrees" if len(rows) == 1 else f"all {len(rows)} cases agree") in said


# ------------------------------------------------------------------ faults that must be found

Touched = Callable[[str], bool]
FAULTS: list[tuple[str, str, Touched]] = [
    ("times_data_parallel", "tiny_cpu", lambda case: case.startswith("DP2")),
]
MORE_FAULTS: list[tuple[str, str, Touched]] = [
    ("mean_of_means", "tiny_cpu", lambda case: True),
    ("double_context_parallel", "tiny_cpu", lambda case: "CP2" in case),
    ("norms_not_added", "tiny_cpu", lambda case: "+SP" in case),
    ("norms_not_added", "tiny_moe", lambda case: "+SP" in case),
    ("balance_by_tokens", "tiny_moe", lambda case: "balance" in case),
    # Experts over data-parallel ranks are data parallel all the same.
    (
        "times_data_parallel",
        "tiny_moe",
        lambda case: "DP2" in case or case.startswith(("EP2", "yours")),
    ),
]


@pytest.mark.parametrize(
    ("fault", "config", "only", "touched"),
    [(fault, config, "P2, skewed, packed", touched) for fault, config, touched in FAULTS]
    + [
        pytest.param(fault, config, "skewed, packed", touched, marks=pytest.mark.long)
        for fault, config, touched in FAULTS + MORE_FAULTS
    ],
)
def test_a_fault_fails_the_rows_it_touches(
    fault: str, config: str, only: str, touched: Touched, tmp_path: Path
) -> None:
    code, rows, said = doctor(tmp_path, CONFIGS[config], "--only", only, fault=fault)
    assert code == 1, said
    wrong = {name for name, row in rows.items() if not row["ok"]}
    assert wrong == {name for name in rows if touched(name)}, said
    assert all("gradient" in rows[name]["failures"] for name in wrong)


# ------------------------------------------------------------------ the whole matrix

MODELS = {
    **RANDOM_MODELS,
    "qwen3_moe_plain": ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
}
IN_FLOAT32 = ("qwen3_tied", "qwen2_bias", "llama", "qwen3_moe")


@pytest.mark.layouts
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "precision"),
    [(model, "float64") for model in MODELS] + [(model, "float32") for model in IN_FLOAT32],
)
def test_the_whole_matrix(model: str, precision: str, tmp_path: Path) -> None:
    family, overrides = MODELS[model]
    folder = make_random_model(family, tmp_path / "model", **overrides)
    config = CONFIGS["tiny_moe" if "moe" in model else "tiny_cpu"]
    code, rows, said = doctor(
        tmp_path, config, f"model.path={folder}", "--precision", precision, ranks=4
    )
    assert code == 0, said
    assert len(rows) > 80
    for row in rows.values():
        check(row, precision)
