"""Tokenizers are loaded without running a program from their folder, and never another one than the
folder means."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.model.published import find_published
from dapo_megatron.run.build import load_prompts
from dapo_megatron.types import DataError
from tests.helpers.configs import REPOSITORY, tiny_config

TINY = REPOSITORY / "model_configs" / "tiny_qwen3"
PROGRAM = {"AutoTokenizer": ["tokenization_x.TikTokenTokenizer", None]}


def folder_of(model: str, folder: Path, *, program: bool, file: bool) -> Path:
    """Write a folder like a published one: a tokenizer that is a program, or one in a file."""
    folder.mkdir()
    published = find_published(model)
    assert published is not None
    (folder / "config.json").write_text(json.dumps(dict(published.hf)))
    settings: dict[str, Any] = json.loads((TINY / "tokenizer_config.json").read_text())
    if program:
        settings |= {"tokenizer_class": "TikTokenTokenizer", "auto_map": PROGRAM}
        ran = folder.parent / "ran"
        (folder / "tokenization_x.py").write_text(f"open({str(ran)!r}, 'w')")
        # transformers would make a tokenizer of this, which cuts text elsewhere than the program.
        (folder / "tiktoken.model").write_text("IQ== 0\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if file:
        shutil.copy(TINY / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize("model", ["Moonlight-16B-A3B", "Kimi-K2-Instruct", "Qwen3-8B"])
def test_a_program_is_refused_and_a_file_is_read(model: str, tmp_path: Path) -> None:
    folder = folder_of(model, tmp_path / "code", program=True, file=False)
    with pytest.raises(DataError, match=r"model.path: .* is a program \(tokenization_x\.TikTok"):
        load_prompts(tiny_config(model__path=folder))
    expected = AutoTokenizer.from_pretrained(TINY)("1+2=", add_special_tokens=False)["input_ids"]
    for number, program in enumerate((True, False)):
        folder = folder_of(model, tmp_path / str(number), program=program, file=True)
        tokenizer = load_tokenizer(folder, "model.path")
        assert tokenizer("1+2=", add_special_tokens=False)["input_ids"] == expected
        assert tokenizer.eos_token == "<eos>"
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"--tokenizer {tmp_path}: no tokenizer can be read"):
        load_tokenizer(tmp_path, "--tokenizer")
