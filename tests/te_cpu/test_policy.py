"""Transformer Engine's layers compute what Megatron's own do, in every layout and family:
log-probs, gradients, their norm, and the weights after an update, in float32.

Transformer Engine's Python is the published one. Its compiled kernels are replaced by torch
(extension.py), so this shows that layers are put together, sharded and accumulated as they must be.
It shows nothing of the kernels themselves, of streams, and of speed.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.model import FAMILIES as RULES
from tests.helpers.models import FAMILIES
from tests.te_cpu.cases import EP, TP, make_model, needs_wheel, run_fused, run_local

pytestmark = needs_wheel
LORA = {"policy__lora": "{rank: 3, alpha: 6}"}
ONE_RANK: dict[str, dict[str, Any]] = {"one rank": {}, "LoRA": LORA}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "TP": TP,
    "CP": {"policy__context_parallel": 2},
    "PP, recompute": {"policy__pipeline_parallel": 2, "policy__recompute": "selective"},
    "EP, recompute all": {**EP, "policy__recompute": "full"},
    "TP, EP": {**TP, **EP},
    "TP, LoRA": {**TP, **LORA},
}
LAYOUTS = {1: ONE_RANK, 2: TWO_RANKS}
BOUND = 5e-6
"""Largest difference of log-probs, and of gradients and weights relative to their norm."""


def names(num_ranks: int) -> list[tuple[str, str, bool]]:
    """Return family, layout and packing of every case."""
    families = [
        name for name in sorted(FAMILIES) if not (RULES[name].has_latent or RULES[name].has_delta)
    ]
    return [
        (family, layout, packing)
        for family, layout, packing in product(families, LAYOUTS[num_ranks], (True, False))
        if family.endswith("moe") or "EP" not in layout
    ]


def check(folder: Path, num_ranks: int, chosen: list[tuple[str, str, bool]]) -> None:
    cases = {
        f"{family}, {layout}, {'packed' if packing else 'padded'}": (
            make_model(folder, family),
            {**LAYOUTS[num_ranks][layout], "train__packing": packing},
        )
        for family, layout, packing in chosen
    }
    local, fused = run_local(num_ranks, cases), run_fused(num_ranks, cases)[0]
    for name in cases:
        compare(name, local[name], fused[name])


def compare(name: str, local: dict[str, Any], fused: dict[str, Any]) -> None:
    assert fused["calls"]["fused_attn_bwd"] and fused["calls"]["rmsnorm_bwd"], name
    for field in ("before", "entropy", "after"):
        difference = float((local[field] - fused[field]).abs().max())
        # After the update the weights, too, are no longer equal.
        assert difference < (2 if field == "after" else 1) * BOUND, (name, field, difference)
    assert (local["before"] - local["after"]).abs().max() > 0.02  # the update is not small
    assert abs(local["grad_norm"] / fused["grad_norm"] - 1) < BOUND, (name, "norm")
    for field in ("gradients", "weights"):
        assert local[field].keys() == fused[field].keys()
        for key, value in local[field].items():
            difference = float((value - fused[field][key]).norm())
            assert difference <= BOUND * float(value.norm()), (name, field, key, difference)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_family_in_every_layout(num_ranks: int, tmp_path: Path) -> None:
    check(tmp_path, num_ranks, names(num_ranks))
