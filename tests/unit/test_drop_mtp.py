"""Layers for multi-token prediction are left out only with model.drop_mtp, and never half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_megatron.checkpoints.formats.export import HfExport
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import Store
from dapo_megatron.files import read_json
from dapo_megatron.model import hf_tensors
from dapo_megatron.run.other_weights import dropped_layers
from dapo_megatron.types import CheckpointError, ConfigError
from tests.helpers.checkpoints import config_of, edit_json, invoke, to_hf, write_random
from tests.helpers.configs import tiny_config
from tests.helpers.models import add_mtp

FIELD = "num_nextn_predict_layers"
FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


def config(family: str, **changes: Any) -> dict[str, Any]:
    return config_of(family, num_hidden_layers=3, **changes)


@pytest.fixture(params=FAMILIES)
def hf(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Checkpoint of three layers and one for multi-token prediction."""
    folder = write_random(tmp_path / "hf", config(request.param), torch.float32)
    add_mtp(folder)
    return folder


def check(store: Store) -> None:
    """Assert that the store is of the model without the layer."""
    assert store.tensors.keys() == hf_tensors(store.arch).keys()
    assert not store.config[FIELD]
    assert {name.split(".")[2] for name in store.dropped} == {"3"}


def test_the_tensors_are_refused_or_left_out_and_listed(hf: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.layers.3.*Set model.drop_mtp=true"):
        open_store(hf)
    store = open_store(hf, drop_mtp=True)
    check(store)
    assert len(store.dropped) == len(load_file(hf / "model.safetensors")) - len(store.tensors)


def test_they_are_left_out_of_several_files(hf: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    names = sorted(tensors)
    file_of = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, hf / file)
    (hf / "model.safetensors.index.json").write_text("{}")
    edit_json(hf / "model.safetensors.index.json", lambda index: index.update(weight_map=file_of))
    check(open_store(hf, drop_mtp=True))


@pytest.mark.parametrize("number", [0, None, "x", -1])
def test_only_as_many_layers_as_config_json_says_are_left_out(hf: Path, number: Any) -> None:
    edit_json(hf / "config.json", lambda fields: fields.update({FIELD: number}))
    expected = ConfigError if number in ("x", -1) else CheckpointError
    with pytest.raises(expected, match=FIELD if expected is ConfigError else "is no tensor of"):
        open_store(hf, drop_mtp=True)


def test_a_checkpoint_without_the_tensors_opens_with_and_without_the_key(tmp_path: Path) -> None:
    fields = {**config("glm4_moe"), FIELD: 1}  # transformers writes the field in any case
    folder = write_random(tmp_path / "hf", fields)
    for drop_mtp in (False, True):
        store = open_store(folder, drop_mtp=drop_mtp)
        assert store.dropped == [] and store.config[FIELD] == 1


def test_conversion_leaves_them_out_with_an_option(hf: Path, tmp_path: Path) -> None:
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and "Use --drop-mtp to leave them out" in output
    assert not (tmp_path / "m").exists()
    options = ("--drop-mtp",)
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m", *options)
    assert code == 0 and "left out: model.layers.3." in output, output
    code, output = invoke("megatron-to-hf", tmp_path / "m", tmp_path / "again")
    assert code == 0 and "left out" not in output, output
    assert read_json(tmp_path / "again" / "config.json")[FIELD] == 0
    code, output = invoke("verify", hf, tmp_path / "again", "--drop-mtp")
    assert code == 0 and output.startswith("the same:"), output
    check(open_store(hf, drop_mtp=True))


def test_a_run_reports_them_and_exports_without_them(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.drop_mtp=true"):
        dropped_layers(tiny_config(model__path=hf))
    keys = {"model__drop_mtp": True, "checkpoint__export_hf": True}
    run = tiny_config(model__path=hf, **keys)
    [note] = dropped_layers(run)
    assert "model.drop_mtp: " in note and "(model.layers.3." in note
    trained = to_hf(open_store(hf, drop_mtp=True), tmp_path / "trained")
    assert dropped_layers(tiny_config(model__path=trained.folder, model__drop_mtp=True)) == []
    export = HfExport(run)
    target = tmp_path / "export"
    export.create(target)
    export.write(trained.folder, target, 0, 1)
    export.finish(target)
    assert read_json(target / "config.json")[FIELD] == 0
    assert open_store(target).tensors.keys() == trained.tensors.keys()
