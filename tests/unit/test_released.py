"""Qwen3.5 as it is published, for images and text: the text model is read bit by bit from its
folder, all else is left out by name, and exports are folders of the text model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.run.other_weights import dropped_layers
from dapo_megatron.types import CheckpointError
from tests.helpers.checkpoints import differences, to_hf
from tests.helpers.configs import tiny_config
from tests.helpers.models import as_released, make_random_model

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text")
LEFT_OUT = ["mtp.fc.weight", "model.visual.patch_embed.proj.weight"]


@pytest.fixture(params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A folder of the text model, and the same as released."""
    text = make_random_model(
        request.param, tmp_path / "text", tie_word_embeddings=request.param == FAMILIES[0]
    )
    return text, as_released(text, tmp_path / "released")


def test_the_text_model_is_read_and_exported(folders: tuple[Path, Path], tmp_path: Path) -> None:
    text, released = folders
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight.*Set model.drop_mtp=true"):
        open_store(released)
    store = open_store(released, drop_mtp=True)
    changes = differences(store, open_store(text))
    assert [each for each in changes if not each.startswith("config.mtp_num_hidden_layers")] == []
    assert store.dropped == LEFT_OUT
    notes = dropped_layers(tiny_config(model__path=released, model__drop_mtp=True))
    assert len(notes) == 2 and "encoder of images are left out (model.visual" in notes[1]
    exported = to_hf(store, tmp_path / "exported").folder
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] in FAMILIES and "vision_config" not in config
    tokens = torch.arange(4, 84)[None]
    logits = []
    for folder in (text, exported):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        logits.append(model(tokens).logits)
    # transformers leaves out the same tensors, and reads stacked experts.
    logits.append(AutoModelForCausalLM.from_pretrained(released)(tokens).logits)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_stacked_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    text = make_random_model("qwen3_5_moe_text", tmp_path / "text")
    released = as_released(text, tmp_path / "released")
    tensors = load_file(released / "model.safetensors")
    norm = "model.language_model.norm.weight"
    again = tensors | {"model.norm.weight": tensors[norm].clone()}
    save_file(again, released / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"has both model\.language_model\.norm\.weight and model\.norm"
    ):
        open_store(released, drop_mtp=True)
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, released / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(8, 48, 64\).*\(8, 64, 48\)"):
        open_store(released, drop_mtp=True)
