"""Run `doctor layouts` on real ranks: every layout gives the gradient of one process, and a fault
in the policy fails exactly the rows that it affects.

By default on two ranks with the skewed split. `make test-layouts` runs the full matrix on four
ranks for all models.
"""

from __future__ import annotations

import json
import textwrap
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
from tests.helpers.models import RANDOM_MODELS, ROPE, make_random_model
from tests.unit.test_cli import environment_without_launcher

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = {name: f"model_configs/{name}.yaml" for name in ("tiny_cpu", "tiny_moe")}
BOUNDS = {"float64": 1e-9, "float32": 1e-5}
Rows = dict[str, dict[str, Any]]


def doctor(
    folder: Path, *arguments: str, ranks: int = 2, fault: str = "none"
) -> tuple[int, Rows, str]:
    """Run the command. Return its exit code, its rows by case name, and its output."""
    report = folder / "figures.json"
    ran = run(
        *("-m", "tests.helpers.broken_doctor", fault, "--ranks", ranks),
        *("doctor", "layouts", *arguments, "--json", report),
        environment={**environment_without_launcher(), "OMP_NUM_THREADS": "1"},
        timeout=400.0 if ranks == 2 else 3_000.0,
    )
    output = ran.stdout + ran.stderr[-4000:]
    assert report.exists(), output
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    return ran.returncode, {_name(row): row for row in rows}, output


def _name(row: dict[str, Any]) -> str:
    yours = "yours: " if row["yours"] else ""
    return f"{yours}{row['layout']}, {row['split']}, {'packed' if row['packed'] else 'padded'}"


def cases(config: str, precision: str, only: str) -> list[str]:
    """Return the case names that the command must report on two ranks."""
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


# ------------------------------------------------------------------ on two ranks

OVERLAYS = REPOSITORY / "model_configs"
GSPO = ("--overlay", OVERLAYS / "objectives" / "gspo.yaml")
LOSSES = {
    # Bounds that some completions and tokens of the mini-batch exceed.
    "sequence_tis": """
        tis_cap: null
        correction:
          sequence_tis_cap: 1.01""",
    "sequence_mean": """
        correction:
          sequence_mean: [0.98, 1.02]""",
    "sequence_product": """
        correction:
          sequence_product: [0.8, 1.25]""",
    "worst_token": """
        correction:
          worst_token: [0.9, 1.1]""",
    "token_band": """
        tis_cap: null
        correction:
          token_band: [0.97, 1.03]""",
    # The coefficients make their gradients as large as that of the objective.
    "regularized": """
        entropy_coefficient: 0.05
        kl:
          coefficient: 0.1""",
    "distilled": """
        objective: none
        tis_cap: null
        distill:
          teacher: teacher
          coefficient: 0.1""",
    "distilled_top": """
        objective: none
        tis_cap: null
        distill:
          teacher: teacher
          coefficient: 0.1
          top_k: 20""",
    "engine_logprobs": """
        tis_cap: null
        old_logprobs: engine""",
}
"""Loss sections besides those of model_configs/objectives."""
FAST = [
    ("tiny_cpu", "float64", "P2, skewed"),  # data, pipeline and context parallel
    # Rounding moves tokens across the bounds of some losses, so float32 has only the config's own.
    ("tiny_moe", "float32", "2, balance loss, skewed, packed"),
]
"""(config, precision, --only). test_policy.py tests tensor parallelism."""


def every_loss(folder: Path) -> tuple[Any, ...]:
    """Return the options of the command for all objectives, and for LOSSES as overlays."""
    for name, section in LOSSES.items():
        text = f"loss:\n{textwrap.indent(textwrap.dedent(section).strip(), '  ')}\n"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return "--losses", OVERLAYS / "objectives", "--losses", folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int, Rows, str]]:
    losses = every_loss(tmp_path_factory.mktemp("losses"))
    return {
        (config, only): doctor(
            tmp_path_factory.mktemp(config),
            CONFIGS[config],
            "--precision",
            precision,
            "--only",
            only,
            *(losses if precision == "float64" else ()),
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
    code, rows, output = fast[config, only]
    check(rows[case], precision)
    assert code == 0, output


@pytest.mark.parametrize("model", ["qwen3_5_tied", "qwen3_5_moe"])
def test_layouts_of_gated_delta_nets_give_the_gradient_of_one_process(
    model: str, tmp_path: Path
) -> None:
    family, overrides = RANDOM_MODELS[model]
    folder = make_random_model(family, tmp_path / "model", **overrides)
    config = CONFIGS["tiny_moe" if "moe" in model else "tiny_cpu"]
    only = "P2, skewed, packed"
    code, rows, output = doctor(tmp_path, config, f"model.path={folder}", "--only", only)
    assert code == 0, output
    print(model, {name: (row["gradient"], row["weights"]) for name, row in rows.items()})
    for row in rows.values():
        check(row, "float64")
        assert row["gradient"] <= 1e-10


# ------------------------------------------------------------------ faults that must be detected

Affects = Callable[[str], bool]
FAULTS: list[tuple[str, str, Affects]] = [
    ("times_data_parallel", "tiny_cpu", lambda case: case.startswith("DP2")),
]
MORE_FAULTS: list[tuple[str, str, Affects]] = [
    ("mean_of_means", "tiny_cpu", lambda case: True),
    ("double_context_parallel", "tiny_cpu", lambda case: "CP2" in case),
    ("norms_not_added", "tiny_cpu", lambda case: "+SP" in case),
    ("norms_not_added", "tiny_moe", lambda case: "+SP" in case),
    ("balance_by_tokens", "tiny_moe", lambda case: "balance" in case),
    # With expert parallelism, the other weights are still data parallel.
    (
        "times_data_parallel",
        "tiny_moe",
        lambda case: "DP2" in case or case.startswith(("EP2", "yours")),
    ),
]


@pytest.mark.parametrize(
    ("fault", "config", "only", "affects"),
    [(fault, config, "P2, skewed, packed", affects) for fault, config, affects in FAULTS]
    + [
        pytest.param(fault, config, "skewed, packed", affects, marks=pytest.mark.long)
        for fault, config, affects in FAULTS + MORE_FAULTS
    ],
)
def test_a_fault_fails_exactly_the_rows_it_affects(
    fault: str, config: str, only: str, affects: Affects, tmp_path: Path
) -> None:
    code, rows, output = doctor(tmp_path, CONFIGS[config], "--only", only, fault=fault)
    assert code == 1, output
    wrong = {name for name, row in rows.items() if not row["ok"]}
    assert wrong == {name for name in rows if affects(name)}, output
    assert all("gradient" in rows[name]["failures"] for name in wrong)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["sequence_sums_of_one_rank", "sequence_gradients_of_one_rank"])
def test_a_fault_in_sums_over_sequences_fails_context_parallel_rows(
    fault: str, tmp_path: Path
) -> None:
    _, rows, output = doctor(tmp_path, CONFIGS["tiny_cpu"], *GSPO, "--only", "CP2", fault=fault)
    assert rows, output
    assert not any(row["ok"] for row in rows.values()), output
    assert all("gradient" in row["failures"] for row in rows.values())


# ------------------------------------------------------------------ the full matrix

MODELS = {
    **RANDOM_MODELS,
    "qwen3_moe_plain": ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe_air": ("glm4_moe", {"use_qk_norm": False, "tie_word_embeddings": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "deepseek_moe": ("deepseek_v3", {"rope_parameters": ROPE["yarn"], "num_hidden_layers": 3}),
    "one_group": ("qwen2", {"num_key_value_heads": 1}),
}
IN_FLOAT32 = ("qwen3_tied", "qwen2_bias", "llama", "qwen3_moe")


@pytest.mark.layouts
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "precision"),
    [(model, "float64") for model in MODELS] + [(model, "float32") for model in IN_FLOAT32],
)
def test_every_row_of_the_full_matrix_agrees_with_one_process(
    model: str, precision: str, tmp_path: Path
) -> None:
    family, overrides = MODELS[model]
    folder = make_random_model(family, tmp_path / "model", **overrides)
    config = CONFIGS["tiny_moe" if "moe" in model else "tiny_cpu"]
    code, rows, output = doctor(
        tmp_path, config, f"model.path={folder}", "--precision", precision, ranks=4
    )
    assert code == 0, output
    assert len(rows) > 80
    for row in rows.values():
        check(row, precision)


@pytest.mark.layouts
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_objective_and_correction_agrees_in_every_row_of_the_full_matrix(
    config: str, tmp_path: Path
) -> None:
    options = every_loss(tmp_path)
    code, rows, output = doctor(tmp_path, CONFIGS[config], *options, ranks=4)
    assert code == 0, output
    assert len(rows) > 80
    for row in rows.values():
        check(row, "float64")
