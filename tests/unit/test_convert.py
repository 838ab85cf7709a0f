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
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.torch_dist.boxes import read_metadata
from tests.helpers.checkpoints import (
    LARGE_TENSORS,
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


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_moe"])
def test_transformers_loads_and_tokenizes_the_same_after_a_round_trip(
    tmp_path: Path, name: str
) -> None:
    family, overrides = RANDOM_MODELS[name]
    source, written = make_random_model(family, tmp_path / "source", **overrides), tmp_path / "m"
    code, output = invoke("hf-to-megatron", source, written)
    assert code == 0, output
    code, output = invoke("megatron-to-hf", written, tmp_path / "again", "--max-file-gib", 0.0001)
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
        ("additional_chat_templates", "secrets"),
        ("additional_chat_templates/key.jinja", "id_rsa"),
        ("config.json", "id_rsa"),
        ("vocab.txt", "no_such_file"),
        ("additional_chat_templates/loop", "hf/additional_chat_templates"),
    ],
)
def test_a_link_out_of_the_model_folder_is_rejected(
    hf: Path, tmp_path: Path, name: str, target: str
) -> None:
    (tmp_path / "id_rsa").write_text("private key")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("private key")
    (hf / name).unlink(missing_ok=True)
    link_out(hf, name, tmp_path / target)
    code, output = invoke("hf-to-megatron", hf, tmp_path / "out")
    assert code == 2
    assert f"{hf / name}: a link to {tmp_path / target}, which is " in output.replace("\n", "")
    assert not (tmp_path / "out").exists()


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def test_two_forms_of_weights_are_refused(hf: Path, tmp_path: Path) -> None:
    """transformers would read a single file, and vLLM the shards that an index names."""
    tensors = load_file(hf / "model.safetensors")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    half = dict(list(tensors.items())[::2])
    rest = {key: tensors[key] for key in tensors.keys() - half.keys()}
    weight_map = {key: first if key in half else second for key in tensors}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    stale = shutil.copytree(hf, tmp_path / "a stale index")
    (stale / INDEX).write_text(index)
    both = shutil.copytree(stale, tmp_path / "both")
    save_file(half, both / first)
    save_file(rest, both / second)
    for folder in (stale, both):
        code, output = invoke("hf-to-megatron", folder, tmp_path / "m")
        assert code and "two forms of weights, model.safetensors and the files of" in output
    (both / "model.safetensors").unlink()
    (both / "pytorch_model.bin").touch()
    save_file(rest, both / "model-00001-of-00003.safetensors")  # of another export
    (stale / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE)}))
    for folder in (stale, both):
        assert not differences(open_store(hf), open_store(folder))


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


def test_a_training_checkpoint_is_converted(tmp_path: Path) -> None:
    source = open_store(write_random(tmp_path / "hf", config_of("qwen2"), torch.float32))
    step = training_checkpoint(source, tmp_path / "run" / "step_000040", 3)
    assert invoke("megatron-to-hf", step, tmp_path / "out")[0] == 0
    assert invoke("verify", tmp_path / "hf", tmp_path / "out")[0] == 0
    assert invoke("verify", step, tmp_path / "out")[0] == 0
    assert not (tmp_path / "out" / "state.json").exists()
    code, output = invoke("megatron-to-hf", step, step, "--overwrite")
    assert code == 2 and "never replaces one" in output
    # Without its optimizer, and for any layout.
    assert invoke("hf-to-megatron", step, tmp_path / "m")[0] == 0
    assert not differences(source, open_store(tmp_path / "m"))
    assert not any(
        "optimizer" in key for key in read_metadata(tmp_path / "m" / "release").state_dict_metadata
    )


def test_copies_that_differ_are_rejected(hf: Path, tmp_path: Path) -> None:
    """Norms are stored under two names. If these differ, it is unknown which one is right."""
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    path, raw = tmp_path / "m" / "release" / "__0_0.distcp", last_norm(hf)
    change_byte(path, path.read_bytes().rindex(raw))
    for command, target in (("megatron-to-hf", tmp_path / "out"), ("verify", hf)):
        code, output = invoke(command, tmp_path / "m", target)
        assert code == 2
        assert "are copies of model.layers.1.post_attention_layernorm.weight" in output
    assert not (tmp_path / "out").exists()


def last_norm(hf: Path) -> bytes:
    norm = open_store(hf).read("model.layers.1.post_attention_layernorm.weight")
    return bytes(norm.view(torch.uint8))


def change_byte(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_verify_reports_the_tensor_and_the_element(hf: Path, tmp_path: Path) -> None:
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    source = open_store(hf)
    name = "model.layers.1.self_attn.o_proj.weight"
    flip_bit(tmp_path / "m" / "release" / "__0_0.distcp", source.read(name))
    report = tmp_path / "figures.json"
    code, output = invoke("verify", hf, tmp_path / "m", "--json", report)
    assert code == 1 and f"{name}: value: 1 elements, first at [35, 35]: " in output
    [difference] = json.loads(report.read_text())["differences"]
    assert difference["kind"] == "value" and difference["name"] == name


def test_inspect_prints_format_and_tensors(hf: Path, tmp_path: Path) -> None:
    invoke("hf-to-megatron", hf, tmp_path / "m")
    code, output = invoke("inspect", tmp_path / "m", "--json", tmp_path / "j")
    assert code == 0
    assert "torch_dist (files 1, checkpoint release), llama" in output
    assert "model.layers.*.self_attn.q_proj.weight" in output and "[36, 36]" in output
    report = json.loads((tmp_path / "j").read_text())
    assert report["format"] == "torch_dist" and report["layout"]["checkpoint"] == "release"
    assert report["tensors"][Q]["shape"] == [36, 36]
    assert report["bytes"] == 2 * report["parameters"]


# ------------------------------------------------------------------------------- rejections


def test_an_existing_target_is_replaced_only_with_overwrite(hf: Path, tmp_path: Path) -> None:
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and "m: exists; choose another name, or use --overwrite" in output
    options = ["--dtype", "float32", "--overwrite"]
    assert invoke("hf-to-megatron", hf, tmp_path / "m", *options)[0] == 0
    assert dtype_of(tmp_path / "m") == torch.float32
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    code, output = invoke("hf-to-megatron", hf, tmp_path / "home", "--overwrite")
    assert code == 2 and "holds no model" in output
    (tmp_path / "home" / "config.json").touch()
    (tmp_path / "m").rename(tmp_path / "home" / "m")
    code, output = invoke(
        "hf-to-megatron", tmp_path / "home" / "m", tmp_path / "home", "--overwrite"
    )
    assert code == 2 and "SOURCE is inside it" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "home"]


def dtype_of(folder: Path) -> torch.dtype:
    return open_store(folder).tensors[Q].dtype


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

    options = ["--dtype", "float32", "--overwrite"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        assert invoke("hf-to-megatron", hf, tmp_path / "m", *options)[0] == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]
    assert dtype_of(tmp_path / "m") == torch.bfloat16


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_next_command_recovers_from_a_kill_during_replacement(
    hf: Path, tmp_path: Path, overwrite: bool
) -> None:
    """The next command first restores the old model, then checks whether the target exists."""
    assert invoke("hf-to-megatron", hf, tmp_path / "m")[0] == 0
    (tmp_path / "m").rename(tmp_path / ".m.replaced")
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / "old").touch()
    (tmp_path / ".m.lock").touch()
    code, output = invoke("megatron-to-hf", tmp_path / "m", tmp_path / "n")
    assert code == 2 and f"killed while replacing it: rename {tmp_path}/.m.replaced" in output
    options = ["--dtype", "float32", *(["--overwrite"] if overwrite else [])]
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m", *options)
    assert code == (0 if overwrite else 2) and overwrite != ("m: exists; choose" in output)
    assert dtype_of(tmp_path / "m") == (torch.float32 if overwrite else torch.bfloat16)
    assert not (tmp_path / ".m.replaced").exists() and not (tmp_path / "m" / "old").exists()
    if overwrite:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]


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
    assert "m.partial/release: no room (File too large)" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_difference_after_reading_back_fails_the_conversion(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def damaged(folder: Path, *arguments: Any, **options: Any) -> Any:
        if folder.name.endswith(".partial"):
            path = folder / "release" / "__0_0.distcp"
            flip_bit(path, open_store(hf).read(Q)[0])
        return open_store(folder, *arguments, **options)

    monkeypatch.setattr(convert_checkpoint, "open_store", damaged)
    code, output = invoke("hf-to-megatron", hf, tmp_path / "m")
    assert code == 2 and "not what was read" in output and ".weight: value: " in output
    assert not (tmp_path / "m").exists()


def test_the_tool_imports_neither_megatron_nor_vllm_nor_transformers() -> None:
    code = (
        "import sys; sys.path.append('tools'); import convert_checkpoint; "
        "assert not {'megatron', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


# ------------------------------------------------------------------------------- large models


def test_memory_use_and_signals_with_large_tensors(tmp_path: Path) -> None:
    """Memory follows the largest tensor. SIGTERM leaves no file."""
    source = write_random(tmp_path / "hf", LARGE_TENSORS)
    target, report = tmp_path / "m", tmp_path / "figures.json"
    code = 0
    while code == 0:  # it was done before the signal
        shutil.rmtree(target, ignore_errors=True)
        interrupted = start("hf-to-megatron", source, target)
        while not target.exists() and not list(tmp_path.glob("m.partial/*")):
            time.sleep(0.001)
        interrupted.send_signal(signal.SIGTERM)
        code = interrupted.wait()
    assert code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    for command, first, second in (
        ("hf-to-megatron", source, target),
        ("megatron-to-hf", target, tmp_path / "again"),
    ):
        process = start(command, first, second, "--json", report)
        assert process.wait() == 0
        figures = json.loads(report.read_text())
        assert figures["largest_tensor_bytes"] == 64 * MIB < figures["bytes"] / 3
        bound = 2.5 * figures["largest_tensor_bytes"] + 64 * MIB
        assert figures["peak_bytes"] - figures["baseline_bytes"] <= bound
    assert not differences(open_store(source), open_store(tmp_path / "again"))
