"""Tokenizers are loaded without running a program from their folder, and never another one than the
folder means."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from dapo_megatron.data.tokenizer import load_tokenizer, read_file
from dapo_megatron.model.published import find_published
from dapo_megatron.run.build import load_prompts
from dapo_megatron.types import DataError
from tests.helpers.configs import REPOSITORY, tiny_config

TINY = REPOSITORY / "model_configs" / "tiny_qwen3"
PROBES = (
    "What is 1+2? Think first.\n\nAnswer: 3",
    "  two  spaces, a\ttab, trailing \n\n\n new lines\r\n",
    "12 + 123 - 1234567890 = 3.14e-5; 1,000.50",
    "def f(x):\n    return {'a': [x, 1]}  # don't, can't\n\tif x != 0: pass",
    "Ça coûte 5 €; naïve café, Straße, Ελληνικά, русский",
    "中文字符和标点。日本語のテキスト、한국어",
    "😀👩‍👩‍👧 e\u0301 \u200b \u00a0 \u3000 \ufb01 ½ ² \uff41\uff11",
    r"$\frac{1}{2} \times \sqrt{x^2}$ <think>\boxed{42}</think>",
)
"""Texts with what tokenizers treat differently."""
PROGRAM = {"AutoTokenizer": ["tokenization_x.TikTokenTokenizer", None]}


def difference(from_file: Tokenizer, other: Any) -> dict[str, Any] | None:
    """Return the first text whose ids, or ids whose text, differ between two tokenizers; None if
    there is none among PROBES and the special tokens."""
    added = [token.content for _, token in sorted(from_file.get_added_tokens_decoder().items())]
    for text in (*PROBES, *(f"a {token} b{token}c\n{token}" for token in added[:64])):
        ids = from_file.encode(text, add_special_tokens=False).ids
        other_ids = other(text, add_special_tokens=False)["input_ids"]
        if ids != other_ids:
            return {"text": text, "ids of the file": ids, "other ids": other_ids}
        for skip in (False, True):
            decoded = from_file.decode(ids, skip_special_tokens=skip)
            other_text = other.decode(ids, skip_special_tokens=skip)
            if decoded != other_text:
                return {"ids": ids, "text of the file": decoded, "other text": other_text}
    return None


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
        load_prompts(tiny_config(model__path=folder), {}, {})
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


FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
]
CLASSES = (
    *("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizerFast", "GPT2Tokenizer"),
    *("Qwen2Tokenizer", "PreTrainedTokenizerFast", "NotInTransformers", None),
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>"]
CORPUS = [*PROBES, "the quick brown fox; 10 20 300 4000 ..."] * 3


def byte_level(splitter: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    parts = [splitter] if splitter else []
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitter))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def truncating() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    return tokenizer


def in_threes() -> Tokenizer:
    pattern = Regex(r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+|\s+|[^\s\p{L}\p{N}]+")
    return byte_level(pre_tokenizers.Split(pattern, "isolated"))


KINDS = {
    "byte level": byte_level,
    "digits apart": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "digits in threes": in_threes,
    "metaspace": metaspace,
    "word piece": word_piece,
    "truncating": truncating,
}
SETTINGS = {  # what published folders have, and what changes ids and texts in transformers
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_bos_token": True,
    "add_prefix_space": True,
    "clean_up_tokenization_spaces": True,
    "split_special_tokens": True,
    "legacy": True,
    "model_max_length": 16,
    "extra_special_tokens": ["quick", "<not in the file>"],
}


def write_model(folder: Path, tokenizer: Tokenizer, family: str, name: str | None) -> None:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    settings = SETTINGS | ({"tokenizer_class": name} if name else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    """Every kind of file with every family and every class, in other pairs for each kind."""
    tokenizer, shift = KINDS[kind](), list(KINDS).index(kind)
    for family, name in zip(FAMILIES, CLASSES[shift:] + CLASSES[:shift], strict=True):
        write_model(tmp_path, tokenizer, family, name)
        loaded = load_tokenizer(tmp_path, "model.path")
        assert difference(read_file(tmp_path), loaded) is None, (family, name)
        assert loaded.eos_token_id == tokenizer.token_to_id("</s>")


@given(text=st.text(max_size=60) | st.text("aA1 \n\t.,'é中😀", max_size=60))
def test_any_text_is_read_as_by_the_file(text: str, one_of_each: Any) -> None:
    for kind, from_file, loaded in one_of_each:
        ids = from_file.encode(text, add_special_tokens=False).ids
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids, kind
        assert loaded.decode(ids) == from_file.decode(ids, skip_special_tokens=False), kind


@pytest.fixture(scope="module")
def one_of_each(tmp_path_factory: Any) -> list[Any]:
    loaded = []
    for kind, make in KINDS.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        write_model(folder, make(), "llama", "LlamaTokenizerFast")
        loaded.append((kind, read_file(folder), load_tokenizer(folder, "model.path")))
    return loaded


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "[]", "null", "3", '"x"', "\x00", '{"model": {}}', '{"added_tokens": 1}'),
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": [1',
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {
                    "type": "Split", "pattern": {"Regex": "((("}, "behavior": "Isolated",
                    "invert": False,
                },
                "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
            }
        ),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=re.escape(f"model.path {tmp_path}: no tokenizer")):
        load_tokenizer(tmp_path, "model.path")
