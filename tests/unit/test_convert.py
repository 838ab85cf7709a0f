"""tools/convert_checkpoint.py: converted files, messages, and recovery after faults."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.model import ChunkPlace
from tests.helpers.checkpoints import (
    CONFIGS,
    config_of,
    differences,
    flip_bit,
    invoke,
    training_checkpoint,
    write_random,
)
from tests.helpers.models import RANDOM_MODELS, make_random_model
from tools import convert_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(REPOSITORY / "tools" / "convert_checkpoint.py")]
MIB = 2**20
Q = "model.layers.0.self_attn.q_proj.weight"


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a separate process."""
    return subprocess.Popen(
        [*COMMAND, *(str(each) for each in arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_random(tmp_path / "hf", config_of("llama"))


# ------------------------------------------------------------------------------- converting

LAYOUTS = (
    "",
    "--tensor-parallel 2",
    "--tensor-parallel 4 --pipeline-parallel 2 --first-stage-layers 4",
    "--pipeline-parallel 4 --first-stage-layers 1",
    "--pipeline-parallel 2 --last-stage-layers 3",
    "--tensor-parallel 2 --expert-parallel 2",
)


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_every_family_survives_a_round_trip_through_every_layout(tmp_path: Path, name: str) -> None:
    """Convert through every layout in turn. transformers then loads and tokenizes the same."""
    family, overrides = RANDOM_MODELS[name]
    wide = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 7}
    source = make_random_model(family, tmp_path / "source", **{**wide, **overrides})
    before, command = source, "hf-to-megatron"
    for number, options in enumerate(LAYOUTS):
        if "--expert-parallel" in options and family != "qwen3_moe":
            continue
        code, output = invoke(command, before, tmp_path / str(number), *options.split())
        assert code == 0, output
        before, command = tmp_path / str(number), "reshard"
    code, output = invoke("megatron-to-hf", before, tmp_path / "again", "--max-file-gib", 0.0001)
    assert code == 0 and "read back and compared" in output
    code, output = invoke("verify", source, tmp_path / "again")
    assert code == 0 and output.startswith("the same:"), output
    assert json.loads((source / "config.json").read_text()) == json.loads(
        (tmp_path / "again" / "config.json").read_text()
    )
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (source, tmp_path / "again")]
    left, right = (model.state_dict() for model in models)
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[key]) for key, value in left.items())
    prompt = "12 + 34 ="
    ids = [AutoTokenizer.from_pretrained(path)(prompt) for path in (source, tmp_path / "again")]
    assert ids[0].input_ids == ids[1].input_ids


def test_conversion_to_another_dtype(hf: Path, tmp_path: Path) -> None:
    assert invoke("hf-to-megatron", hf, tmp_path / "m", "--dtype", "float32")[0] == 0
    code, output = invoke("verify", hf, tmp_path / "m")
    assert code == 1
    assert "config.torch_dtype: config: 'bfloat16' and 'float32'" in output
    assert "model.embed_tokens.weight: dtype: bfloat16 and float32" in output
    assert invoke("megatron-to-hf", tmp_path / "m", tmp_path / "b", "--dtype", "bfloat16")[0] == 0
    assert not differences(open_store(hf), open_store(tmp_path / "b"))
    configs = [json.loads((path / "config.json").read_text()) for path in (hf, tmp_path / "m")]
    assert configs[1] == {**configs[0], "torch_dtype": "float32"}


def link_out(folder: Path, name: str, target: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(target)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("vocab.txt", "id_rsa"),
        ("additional_chat_templates", "secrets"),
        ("additional_chat_templates/all", "secrets"),
        ("additional_chat_templates/key.jinja", "id_rsa"),
        ("config.json", "id_rsa"),
        ("vocab.txt", "no_such_file"),
        ("additional_chat_templates/loop", "hf/additional_chat_templates"),
    ],
)
@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf"])
def test_a_link_out_of_the_model_folder_is_rejected(
    hf: Path, tmp_path: Path, command: str, name: str, target: str
) -> None:
    (tmp_path / "id_rsa").write_text("private key")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("private key")
    (hf / name).unlink(missing_ok=True)
    link_out(hf, name, tmp_path / target)
    code, output = invoke(command, hf, tmp_path / "out")
    assert code == 2
    assert f"{hf / name}: a link to {tmp_path / target}, which is " in output.replace("\n", "")
    assert not (tmp_path / "out").exists()


INDEX = "model.safetensors.index.json"
FORMS = {  # files of the folder -> its tensors are read from the single file, the shards, or not
    "single": ("single",),
    "shards": ("shards", "index"),
    "single, and an index of it": ("single", "index of single"),
    "a stale single file beside shards": ("single", "shards", "index"),
    "a stale index beside a single file": ("single", "index"),
    "stale shards without their index": ("single", "shards"),
    "shards of two exports": ("shards", "index", "old shards"),
    "pickled weights beside shards": ("shards", "index", "pickled"),
    "consolidated weights beside shards": ("shards", "index", "consolidated"),
    "an adapter beside a single file": ("single", "adapter"),
}
REFUSED = {"a stale single file beside shards", "a stale index beside a single file"}


@pytest.mark.parametrize("name", FORMS)
def test_two_forms_of_weights_are_refused(name: str, hf: Path, tmp_path: Path) -> None:
    """transformers would read a single file, and vLLM the shards that an index names."""
    tensors = load_file(hf / "model.safetensors")
    folder, forms = tmp_path / "model", FORMS[name]
    shutil.copytree(hf, folder, ignore=shutil.ignore_patterns("model*"))
    stale = {key: value + 1 for key, value in tensors.items()}
    is_sharded = "shards" in forms and "index" in forms
    if "single" in forms:
        save_file(stale if is_sharded else tensors, folder / "model.safetensors")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    half = dict(list(tensors.items())[::2])
    if "shards" in forms:
        save_file(half, folder / first)
        save_file({key: tensors[key] for key in tensors.keys() - half.keys()}, folder / second)
    weight_map = {key: first if key in half else second for key in tensors}
    if "index of single" in forms:
        weight_map = dict.fromkeys(tensors, "model.safetensors")
    if any(form.startswith("index") for form in forms):
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    others = {
        "old shards": "model-00001-of-00003.safetensors",
        "consolidated": "consolidated.safetensors",
        "adapter": "adapter_model.safetensors",
    }
    for form in forms:
        if form in others:
            save_file(stale, folder / others[form])
    if "pickled" in forms:
        (folder / "pytorch_model.bin").write_bytes(b"x")
    code, output = invoke("hf-to-megatron", folder, tmp_path / "m")
    if name in REFUSED:
        assert code and "two forms of weights, model.safetensors and the files of" in output
        return
    assert code == 0, output
    assert invoke("verify", hf, tmp_path / "m")[0] == 0


def test_a_snapshot_of_the_hugging_face_cache_is_copied(hf: Path, tmp_path: Path) -> None:
    """Its files are links to blobs. Only blobs of the same repository are accepted."""
    cache = tmp_path / "models--owner--name"
    snapshot, blobs = cache / "snapshots" / "0123abcd", cache / "blobs"
    templates = snapshot / "additional_chat_templates"
    templates.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(hf.iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (blobs / "t").write_text("template")
    (templates / "tool.jinja").symlink_to("../../../blobs/t")
    (tmp_path / "model").symlink_to(snapshot)  # the source folder itself may be a link
    code, output = invoke("hf-to-megatron", tmp_path / "model", tmp_path / "out")
    assert code == 0, output
    copied = tmp_path / "out" / "additional_chat_templates" / "tool.jinja"
    assert copied.read_text() == "template" and not copied.is_symlink()
    other = tmp_path / "models--owner--other" / "blobs" / "t"
    other.parent.mkdir(parents=True)
    other.write_text("of another repository")
    (snapshot / "vocab.txt").symlink_to(other)
    assert invoke("hf-to-megatron", tmp_path / "model", tmp_path / "out2")[0] == 2


def test_a_training_checkpoint_is_converted_to_hf(tmp_path: Path) -> None:
    source = open_store(write_random(tmp_path / "hf", config_of("qwen2"), torch.float32))
    places = {
        rank: [ChunkPlace(rank % 3, 3, rank // 3, 1, rank < 3, rank >= 3)] for rank in range(6)
    }
    step = training_checkpoint(source, tmp_path / "run" / "step_000040", places)
    assert invoke("megatron-to-hf", step, tmp_path / "out")[0] == 0
    assert invoke("verify", tmp_path / "hf", tmp_path / "out")[0] == 0
    assert invoke("verify", step, tmp_path / "out")[0] == 0
    assert not (tmp_path / "out" / "state.json").exists()
    code, output = invoke("megatron-to-hf", step, step, "--overwrite")
    assert code == 2 and "never replaces one" in output
    flip_bit(step / "rank_00001.safetensors", "model/decoder.layers.0.input_layernorm.weight")
    code, output = invoke("verify", step, tmp_path / "hf")
    assert code == 1 and "input_layernorm.weight: replica: rank_00000" in output
    code, output = invoke("verify", step, tmp_path / "hf", "--no-replicas")
    assert code == 0


def test_a_checkpoint_whose_replicas_differ_is_rejected(tmp_path: Path) -> None:
    """If replicas drifted apart in training, it is unknown which one is right."""
    source = open_store(write_random(tmp_path / "hf", config_of("qwen2"), torch.float32))
    places = {rank: [ChunkPlace(rank % 3, 3, 0, 2, True, True)] for rank in range(6)}
    step = training_checkpoint(source, tmp_path / "step_000040", places)
    flip_bit(step / "rank_00004.safetensors", "model/decoder.layers.0.mlp.linear_fc1.weight")
    code, output = invoke("megatron-to-hf", step, tmp_path / "out")
    assert code == 2 and "holds copies of a tensor that differ" in output
    assert "layers.0.mlp.up_proj.weight: replica: rank_00001" in output
    assert not (tmp_path / "out").exists()
    assert invoke("megatron-to-hf", step, tmp_path / "out", "--no-check")[0] == 0
    assert not differences(source, open_store(tmp_path / "out"))


def test_verify_reports_the_tensor_and_the_element(hf: Path, tmp_path: Path) -> None:
    invoke("hf-to-megatron", hf, tmp_path / "m", "--tensor-parallel", 3)
    key = "model/decoder.layers.1.self_attention.linear_proj.weight"
    flip_bit(tmp_path / "m" / "stage_00_tensor_01.safetensors", key)
    report = tmp_path / "figures.json"
    code, output = invoke("verify", hf, tmp_path / "m", "--json", report)
    # The last column of the second of three ranks, in the last row.
    name = "model.layers.1.self_attn.o_proj.weight"
    assert code == 1 and f"{name}: value: 1 elements, first at [35, 23]: " in output
    [difference] = json.loads(report.read_text())["differences"]
    assert difference["kind"] == "value" and difference["name"] == name


def test_inspect_prints_format_layout_and_tensors(hf: Path, tmp_path: Path) -> None:
    invoke("hf-to-megatron", hf, tmp_path / "m", "--tensor-parallel", 3)
    code, output = invoke("inspect", tmp_path / "m", "--json", tmp_path / "j")
    assert code == 0
    assert "megatron (version 1, tensor_parallel 3" in output and ", llama" in output
    assert "model.layers.*.self_attn.q_proj.weight" in output and "[36, 36]" in output
    report = json.loads((tmp_path / "j").read_text())
    assert report["format"] == "megatron" and report["layout"]["layers_per_stage"] == [2]
    assert report["tensors"][Q]["shape"] == [36, 36] and len(report["tensors"][Q]["files"]) == 3
    assert report["bytes"] == 2 * report["parameters"]


# ------------------------------------------------------------------------------- rejections


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--tensor-parallel", 2],
            "--tensor-parallel: 2 does not divide the model's 9 attention heads\n"
            "  that fit: --tensor-parallel 1, --tensor-parallel 3",
        ),
        (
            ["--pipeline-parallel", 2],
            "--pipeline-parallel: 2 does not divide the model's 7 layers (use --first-stage-layers "
            "or --last-stage-layers for stages of different size)\n  that fit: "
            "--pipeline-parallel 2 --first-stage-layers 4 (4 layers, then 3 each), "
            "--pipeline-parallel 1, --pipeline-parallel 7",
        ),
        (
            ["--pipeline-parallel", 4, "--first-stage-layers", 3],
            "--first-stage-layers = 3 of the model's 7 layers leaves 4 to 3 equal stages",
        ),
        (
            ["--first-stage-layers", 3],
            "--first-stage-layers: 3 needs --pipeline-parallel above 1; leave it out",
        ),
        (
            ["--expert-parallel", 2],
            "--expert-parallel: 2, but the model has no experts; use 1",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_rejected_with_those_that_do(
    tmp_path: Path, options: list[object], expected: str
) -> None:
    hf = write_random(tmp_path / "hf", config_of("llama", num_hidden_layers=7))
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m", *options)
    assert code == 2 and expected in output
    assert not (tmp_path / "m").exists()


def test_an_existing_target_is_replaced_only_with_overwrite(hf: Path, tmp_path: Path) -> None:
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and "m: exists; choose another name, or use --overwrite" in output
    options = ["--tensor-parallel", 3, "--overwrite"]
    assert invoke("reshard", tmp_path / "m", tmp_path / "m", *options)[0] == 0
    assert open_store(tmp_path / "m").layout["tensor_parallel"] == 3
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    code, output = invoke("hf-to-megatron", hf, tmp_path / "home", "--overwrite")
    assert code == 2 and "holds no model" in output
    (tmp_path / "home" / "config.json").touch()
    (tmp_path / "m").rename(tmp_path / "home" / "m")
    code, output = invoke("reshard", tmp_path / "home" / "m", tmp_path / "home", "--overwrite")
    assert code == 2 and "SOURCE is inside it" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "home"]


def test_unknown_config_fields_and_models_are_rejected(hf: Path, tmp_path: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "logit_scale": 2.0}))
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and "logit_scale" in output and "--ignore" in output
    assert invoke("hf-to-megatron", hf, tmp_path / "m", "--ignore", "logit_scale")[0] == 0
    (hf / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    code, output = invoke("hf-to-megatron", hf, tmp_path / "n")
    assert code == 2 and "'gpt2' is not supported" in output


# ------------------------------------------------------------------------------- faults


def test_an_interrupt_leaves_no_files(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted(what: str, total: int) -> Iterator[Any]:
        left = iter(range(5))

        def advance(_: int) -> None:
            assert (tmp_path / "m.partial").is_dir() and not (tmp_path / "m").exists()
            if next(left, None) is None:
                raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(convert_checkpoint, "bar", interrupted)
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 130 and "interrupted" in output
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_files_left_by_a_killed_command_are_removed(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / "old").touch()
    (tmp_path / ".m.lock").touch()
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]
    assert not (tmp_path / "m" / "old").exists()


def test_a_foreign_folder_with_the_partial_name_is_not_touched(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / "thesis").touch()
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and "m.partial: in the way" in output
    assert (tmp_path / "m.partial" / "thesis").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.partial"]


def test_an_interrupt_during_replacement_restores_the_old_model(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two renames there is no TARGET. An interrupt there restores it."""
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    rename = Path.rename

    def interrupted(path: Path, to: Path) -> Path:
        rename(path, to)
        if to.name == ".m.replaced":
            raise KeyboardInterrupt
        return to

    options = ["--tensor-parallel", 3, "--overwrite"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        assert invoke("hf-to-megatron", hf, tmp_path / "m", *options)[0] == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]
    assert open_store(tmp_path / "m").layout["tensor_parallel"] == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_next_command_recovers_from_a_kill_during_replacement(
    hf: Path, tmp_path: Path, overwrite: bool
) -> None:
    """The next command first restores the old model, then checks whether the target exists."""
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    (tmp_path / "m").rename(tmp_path / ".m.replaced")
    (tmp_path / "m.partial").mkdir()
    (tmp_path / ".m.lock").touch()
    code, output = invoke("reshard", tmp_path / "m", tmp_path / "n")
    assert code == 2 and f"killed while replacing it: rename {tmp_path}/.m.replaced" in output
    options = ["--tensor-parallel", 3, *(["--overwrite"] if overwrite else [])]
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m", *options)
    assert code == (0 if overwrite else 2) and overwrite != ("m: exists; choose" in output)
    assert open_store(tmp_path / "m").layout["tensor_parallel"] == (3 if overwrite else 1)
    assert not (tmp_path / ".m.replaced").exists()


def test_a_failing_command_restores_the_old_model(hf: Path, tmp_path: Path) -> None:
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    (tmp_path / "m").rename(tmp_path / ".m.replaced")
    with (
        pytest.raises(KeyboardInterrupt),
        convert_checkpoint.publish(tmp_path / "m", overwrite=True),
    ):
        raise KeyboardInterrupt
    assert open_store(tmp_path / "m").layout["tensor_parallel"] == 1


def test_two_commands_cannot_write_the_same_folder(hf: Path, tmp_path: Path) -> None:
    with convert_checkpoint.publish(tmp_path / "m"):
        code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and "another process is writing there" in output


def test_a_full_disk_is_reported_and_leaves_nothing(hf: Path, tmp_path: Path) -> None:
    """A limit of the file size stands in for a full disk."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    process = start("hf-to-megatron", hf, tmp_path / "m", preexec_fn=limit)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "stage_00_tensor_00.safetensors: no room (File too large): the file needs" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("file", "key", "expected"),
    [
        ("stage_00_tensor_00", "embedding.word_embeddings", "embed_tokens.weight: value: 1 elem"),
        ("stage_00_tensor_01", "decoder.layers.0.input_layernorm", "layernorm.weight: replica: "),
        ("stage_01_tensor_01", "output_layer", "embed_tokens.weight: replica: "),
    ],
)
def test_a_difference_after_reading_back_fails_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, key: str, expected: str
) -> None:
    """Every replica is compared: norms of each rank, and the tied embedding of the last stage."""

    def damaged(folder: Path, *arguments: Any, **options: Any) -> Any:
        if folder.name.endswith(".partial"):
            flip_bit(folder / f"{file}.safetensors", f"model/{key}.weight")
        return open_store(folder, *arguments, **options)

    monkeypatch.setattr(convert_checkpoint, "open_store", damaged)
    hf = write_random(tmp_path / "hf", config_of("llama_tied", vocab_size=36))
    options = ["--tensor-parallel", 3, "--pipeline-parallel", 2]
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m", *options)
    assert code == 2 and "not what was read" in output and expected in output
    assert not (tmp_path / "m").exists()


def test_the_tool_imports_neither_megatron_nor_vllm_nor_transformers() -> None:
    code = (
        "import sys; sys.path.append('tools'); import convert_checkpoint; "
        "assert not {'megatron', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


# ------------------------------------------------------------------------------- large models


@pytest.mark.long
def test_memory_use_and_signals_with_a_large_model(tmp_path: Path) -> None:
    """Memory does not grow with a model of 1.5 GB. Interrupt and kill publish no partial folder."""
    source = write_random(tmp_path / "hf", CONFIGS["llama_750m"], max_file_bytes=2**29)
    megatron, report = tmp_path / "megatron", tmp_path / "figures.json"
    saved, to_json = tmp_path / "torch_dist", ("--json", report)
    options = ["--tensor-parallel", 4, "--pipeline-parallel", 2, "--json", report]
    for number, (code, is_left) in {
        signal.SIGINT: (130, False),
        signal.SIGTERM: (130, False),
        signal.SIGKILL: (-signal.SIGKILL, True),
    }.items():
        interrupted = start("hf-to-megatron", source, megatron, *options)
        while not list(tmp_path.glob("megatron.partial/*")):
            time.sleep(0.05)
        interrupted.send_signal(number)
        interrupted.communicate()
        assert interrupted.returncode == code
        assert not megatron.exists() and megatron.with_suffix(".partial").exists() == is_left
    for arguments in (
        ("hf-to-megatron", source, megatron, *options),
        ("hf-to-megatron", megatron, saved, "--format", "torch_dist", *to_json),
        ("megatron-to-hf", saved, tmp_path / "again", *to_json),
    ):
        process = start(*arguments)
        assert process.wait() == 0
        check_memory(json.loads(report.read_text()))
        shutil.rmtree(megatron.with_suffix(".partial"), ignore_errors=True)
    assert start("verify", source, tmp_path / "again").wait() == 0


def check_memory(report: Mapping[str, int]) -> None:
    bound = report["largest_tensor_bytes"] + 512 * MIB
    assert report["peak_bytes"] - report["baseline_bytes"] <= bound
    assert report["bytes"] > 2 * bound
