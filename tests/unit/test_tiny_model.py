"""The committed tiny model equals the output of its script; random models are reproducible."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from dapo_megatron.data.prompts import load_source
from tests.helpers.configs import tiny_config
from tools.make_tiny_model import (
    Recipe,
    accuracy,
    held_out_problems,
    make_config,
    publish,
)

COMMITTED = Path(__file__).parents[2] / "model_configs" / "tiny_qwen3"
QUESTION = "State the final answer to the following arithmetic problem: 12 + 34 ="


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish an untrained model as the script does."""
    folder = tmp_path_factory.mktemp("remade") / "tiny"
    publish(Qwen3ForCausalLM(make_config()), folder)
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / name).read_text())
    values.pop("transformers_version", None)
    return values


def shapes(folder: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


def test_the_committed_folder_equals_the_output_of_the_script(remade: Path) -> None:
    assert {f.name for f in COMMITTED.iterdir()} == {f.name for f in remade.iterdir()}
    for name in sorted(f.name for f in remade.glob("*.json")):
        assert read(COMMITTED, name) == read(remade, name), name
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (COMMITTED / name).read_text() == (remade / name).read_text(), name
    assert shapes(COMMITTED) == shapes(remade)


def test_the_committed_folder_is_small_and_its_weights_are_finite_float32() -> None:
    assert sum(f.stat().st_size for f in COMMITTED.iterdir()) <= 3 * 1000**2
    assert {dtype for dtype, _ in shapes(COMMITTED).values()} == {"F32"}
    model = AutoModelForCausalLM.from_pretrained(COMMITTED)
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


def test_tokenizer_round_trip() -> None:
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED)
    rng = random.Random(0)
    texts = ["", " ", "  a  .", "don 't , !", string.digits + string.punctuation, "a\n\n b"]
    texts += ["".join(rng.choices([*map(chr, range(32, 127)), "\n"], k=60)) for _ in range(200)]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=True).input_ids
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*tokenizer("7").input_ids, tokenizer.eos_token_id]) == "7<eos>"
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


def test_the_chat_template_adds_only_the_answer_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED)
    user = {"role": "user", "content": QUESTION}
    ids = tokenizer.apply_chat_template([user], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == QUESTION + "<answer>"
    assert len(ids) == len(QUESTION) + 1
    whole = tokenizer.apply_chat_template(
        [user, {"role": "assistant", "content": "46"}], tokenize=False
    )
    assert whole == QUESTION + "<answer>46<eos>"


def test_the_committed_model_samples_moderately_and_is_mostly_correct_greedily() -> None:
    """Bounds are coarse, because the script measures on more samples."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM.from_pretrained(COMMITTED)
    problems = held_out_problems(Recipe())[:100]
    assert 0.27 < accuracy(model, Recipe(), problems, samples=4) < 0.48
    assert accuracy(model, Recipe(), problems, samples=0) > 0.85


def test_the_quickstart_evaluates_on_prompts_not_seen_in_pretraining() -> None:
    config = tiny_config()
    (held_out,) = config.evaluation.sets
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED)
    prompts = load_source(held_out, tokenizer, config.rollout.max_prompt_tokens).prompts
    assert len(prompts) == 200
    assert [p.text for p in prompts] == [p.prompt for p in held_out_problems(Recipe())]
    (train,) = config.data.train
    assert (train.dataset, train.options) == (Recipe().task, Recipe().options)
