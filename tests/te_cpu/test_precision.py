"""In bfloat16 and with every FP8 recipe, the errors of log-probs and gradients of Transformer
Engine's layers are those of the number format, and ranks share what they must.

The reference is Megatron's own layers in float64. Kernels are replaced (see test_policy.py): FP8 is
rounded, scaled and transposed as on an H100, products are then summed in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.te_cpu.cases import EP, TP, Case, make_model, needs_wheel, run_fused, run_local
from tests.te_cpu.ranks import LARGER
from tests.te_cpu.test_policy import compare

pytestmark = needs_wheel


def rounding(mantissa_bits: int) -> float:
    """Return the relative error (root mean square) of rounding to this many explicit bits. It is
    uniform up to half a unit, of values that are uniform between two powers of 2."""
    return float(2.0 ** -(mantissa_bits + 1) * 6**-0.5)


E4M3, E5M2, BFLOAT16 = rounding(3), rounding(2), rounding(7)  # 2.6 %, 5.1 %, 0.16 %
OF_GRADIENTS = {"delayed": E5M2, "current": E5M2, "blockwise": E4M3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "DP": {},
    "TP": TP,
    "CP": {"policy__context_parallel": 2},
    "PP, recompute": {"policy__pipeline_parallel": 2, "policy__recompute": "selective"},
    "recompute all": {"policy__recompute": "full"},
    "EP": EP,
    "TP, EP": {**TP, **EP},
}
Name = tuple[str, str, str]
"""Family, layout, recipe. A recipe with a plus keeps weights only in FP8."""
ONE_RANK: list[Name] = [
    *((family, "one rank", "bfloat16") for family in ("qwen3", "qwen2", "qwen3_moe")),
    *((family, "one rank", each) for family in ("qwen3", "qwen2") for each in OF_GRADIENTS),
    *(("qwen3_moe", "one rank", each) for each in OF_GRADIENTS),
    ("qwen3", "one rank", "current+"),
    *(("qwen3", "recompute all", each) for each in ("delayed", "blockwise")),
]
TWO_RANKS: list[Name] = [
    ("qwen3", "TP", "bfloat16"),
    ("qwen3_moe", "TP, EP", "bfloat16"),
    *(("qwen3", "TP", each) for each in OF_GRADIENTS),
    *(("qwen3_moe", "TP, EP", each) for each in OF_GRADIENTS),
    *(("qwen3", "DP", each) for each in ("delayed", "current+", "blockwise+")),
    ("qwen3", "CP", "delayed"),
    *(("qwen3", "PP, recompute", each) for each in ("delayed", "blockwise+")),
    ("qwen3_moe", "EP", "blockwise+"),
]


def settings(family: str, layout: str, recipe: str) -> dict[str, Any]:
    """Return overrides. In the first of the two layers everything stays in bfloat16 if the recipe
    is that of the shipped config (blockwise), on tensor-parallel ranks."""
    fp8: dict[str, Any] = {"recipe": recipe.rstrip("+"), "parameters": recipe.endswith("+")}
    if recipe == "blockwise" and layout == "TP":
        fp8["bf16_first_layers"] = 1
    replay = {"policy__router_replay": "engine"} if family.endswith("moe") else {}
    kept = {} if recipe == "bfloat16" else {"policy__fp8": fp8}
    if restores(family, recipe):
        kept["policy__offload"] = ["weights", "gradients", "optimizer"]
    eps = 1e-2 / LARGER  # as gradients
    common = {"policy__precision": "bfloat16", "optimizer__eps": eps}
    return {**LAYOUTS[layout], **replay, **kept, **common}


def restores(family: str, recipe: str) -> bool:
    """Return whether weights are offloaded, kept as a reference, and saved. References choose their
    own experts, and delayed scales change, so log-probs would not be equal."""
    return recipe in ("blockwise", "blockwise+", "current+") and not family.endswith("moe")


def errors(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Return errors relative to the standard deviation of log-probs and the norm of gradients."""
    logprobs = (result["before"].double() - reference["before"]).pow(2).mean().sqrt()
    expected, actual = reference["gradients"], result["gradients"]
    parts = {key: (actual[key].double() - value).norm() for key, value in expected.items()}
    matrices = [parts[key] / value.norm() for key, value in expected.items() if value.dim() == 2]
    whole = torch.stack([value.norm() for value in expected.values()]).norm()
    return {
        "log-probs": float(logprobs / reference["before"].std()),
        "gradient": float(torch.stack(list(parts.values())).norm() / whole),
        "worst matrix": float(torch.stack(matrices).max()),
        "norm": abs(result["grad_norm"] / reference["grad_norm"] - 1),
        "weights": max(
            float((result["weights"][key].double() - value).norm() / value.norm())
            for key, value in reference["weights"].items()
        ),
    }


def bounds(recipe: str) -> dict[str, float]:
    """Return bounds of `errors`.

    The gradient of a weight is a product of inputs and gradients that were both rounded, so its
    error is the root of the sum of their squares. Products before and after add to that, less
    because the residual stream is large: together at most three times as much. Errors that are
    rounding cancel in the norm; a wrong scale would not. A single matrix may have less luck, but
    with a wrong scale or a transposed copy that is out of date its error would be 1 or more.
    """
    if recipe == "bfloat16":
        inputs, gradients = (
            BFLOAT16 * 2,
            BFLOAT16 * 2,
        )  # norms, activations and sums are rounded, too
    else:
        inputs, gradients = E4M3, OF_GRADIENTS[recipe.rstrip("+")]
    of_product = (inputs**2 + gradients**2) ** 0.5
    return {
        "log-probs": 2 * 2**0.5 * inputs,
        "gradient": 3 * of_product,
        "worst matrix": 0.5,
        "norm": of_product,
        "weights": 2 * inputs,
    }


def make_cases(folder: Path, names: list[Name]) -> tuple[dict[str, Case], dict[str, Case]]:
    """Return the cases of these names, and those of their references."""
    cases: dict[str, Case] = {}
    references: dict[str, Case] = {}
    for family, layout, recipe in names:
        model = make_model(folder, family, for_fp8=True)
        overrides = settings(family, layout, recipe)
        cases[f"{family}, {layout}, {recipe}"] = model, overrides
        only = ("policy__fp8", "policy__offload")
        exact = {key: value for key, value in overrides.items() if key not in only}
        references[f"{family}, {layout}"] = model, {**exact, "policy__precision": "float64"}
    return cases, references


def check(names: list[Name], reference: dict[str, Any], by_rank: list[dict[str, Any]]) -> None:
    for family, layout, recipe in names:
        name = f"{family}, {layout}, {recipe}"
        result, allowed = by_rank[0][name], bounds(recipe)
        measured = errors(result, reference[f"{family}, {layout}"])
        print(f"{name:32}", {key: round(value, 4) for key, value in measured.items()})
        assert all(measured[key] < bound for key, bound in allowed.items()), (
            name,
            measured,
            allowed,
        )
        assert recipe == "bfloat16" or result["calls"]["quantize"], name
        assert len(result["restored"]) == 3 * restores(family, recipe), name
        for place, logprobs in result["restored"].items():
            assert torch.equal(logprobs, result["after"]), (name, place)
        if len(by_rank) > 1:
            check_shared(name, layout, recipe, [each[name]["scales"] for each in by_rank])


def check_shared(name: str, layout: str, recipe: str, ranks: list[dict[str, torch.Tensor]]) -> None:
    """Check that ranks have equal delayed scales, and data-parallel ranks equal FP8 weights."""
    shared = (recipe == "delayed" and "PP" not in layout) or (
        recipe.endswith("+") and layout == "DP"
    )
    assert bool(ranks[0]) or not shared, name
    for key, value in ranks[0].items() if shared else ():
        assert torch.equal(value, ranks[1][key]), (name, key)
    if shared and recipe == "delayed":
        assert all((value != 1).any() for value in ranks[0].values()), name


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_errors_are_those_of_the_number_format(num_ranks: int, tmp_path: Path) -> None:
    names = ONE_RANK if num_ranks == 1 else TWO_RANKS
    cases, references = make_cases(tmp_path, names)
    check(names, run_local(num_ranks, references), run_fused(num_ranks, cases))


def test_one_layout_in_float32_and_in_fp8(tmp_path: Path) -> None:
    """Short form of both files, with one start of the ranks."""
    names = [("qwen3_moe", "TP, EP", "blockwise")]
    cases, references = make_cases(tmp_path, names)
    wide = {"float32": (make_model(tmp_path, "qwen3_moe"), LAYOUTS["TP, EP"])}
    local, by_rank = run_local(2, references | wide), run_fused(2, cases | wide)
    compare("float32", local["float32"], by_rank[0]["float32"])
    check(names, local, by_rank)
