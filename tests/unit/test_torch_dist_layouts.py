"""Every family makes the round trip through Megatron-core's own checkpoints, in every layout: what
Megatron saves in it is read bit by bit, and what is written here Megatron loads in it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.model import FAMILIES
from tests.helpers.checkpoints import MODELS, differences, to_hf, write_random
from tests.helpers.fake_ranks import STYLES, Case, Layout, save_and_load
from tests.helpers.ranks import run_ranks
from tests.helpers.torch_dist import to_torch_dist

ALL = {
    **MODELS,
    # Queries without a latent, and one group of experts.
    "moonlight": {**MODELS["deepseek_v3"], "q_lora_rank": None, "n_group": 1, "topk_group": 1},
}


def test_no_family_is_missing() -> None:
    assert {config["model_type"] for config in ALL.values()} == FAMILIES.keys()


def small(name: str) -> dict[str, Any]:
    """Return a config whose sizes are divisible by four ranks, with an odd vocabulary."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
    }
    model = ALL[name]
    if "num_experts" in model:
        sizes["num_experts"] = 4
    if "n_routed_experts" in model:
        sizes |= {"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 8}
    if "kv_lora_rank" in model:
        sizes["num_key_value_heads"] = 8
    if "linear_num_key_heads" in model:
        sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    if "mlp_layer_types" in model:
        sizes["mlp_layer_types"] = ["dense", *["sparse"] * 3]
    return {**model, "vocab_size": 37, **sizes}


def layouts_of(name: str) -> list[Layout]:
    """Return all layouts of a model."""
    ep_sizes = (1, 2) if ALL[name].get("moe_intermediate_size") else (1,)
    return [Layout(*sizes) for sizes in product((1, 2, 4), (1, 2), ep_sizes)]


def check(name: str, layouts: list[Layout], folder: Path) -> None:
    """Save and load with Megatron in each layout. Read what it saved, and write it as HF."""
    hf = write_random(folder / "hf", small(name), torch.float32)
    source = open_store(hf)
    written = to_torch_dist(source, folder / "written") / "release"
    cases = [
        Case(hf, layout, written, folder / f"saved_{number}")
        for number, layout in enumerate(layouts)
    ]
    [different] = run_ranks(save_and_load, 1, cases)
    assert different == [[]] * len(cases)
    for case, style in product(cases, STYLES):
        saved = open_store(case.saved / style, hf=hf)
        assert not differences(source, saved), (case, style)
        again = to_hf(saved, folder / "again")
        files = [store.folder / "model.safetensors" for store in (source, again)]
        assert len({path.read_bytes() for path in files}) == 1, (case, style)


@pytest.mark.parametrize("name", ALL)
def test_a_family_in_two_layouts(name: str, tmp_path: Path) -> None:
    ep = max(layout.ep for layout in layouts_of(name))
    check(name, [Layout(tp=4, ep=ep), Layout(tp=2, pp=2, ep=ep)], tmp_path)


@pytest.mark.layouts
@pytest.mark.parametrize("name", ALL)
def test_a_family_in_every_layout(name: str, tmp_path: Path) -> None:
    check(name, layouts_of(name), tmp_path)
