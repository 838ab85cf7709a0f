"""The committed tiny models equal the output of their scripts, and know as much as they should."""

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

from dapo_megatron.config.file import load_config
from dapo_megatron.data.conversation import findings
from dapo_megatron.data.prompts import load_source
from dapo_megatron.engine.tool_calls import Call, CallReader
from tests.helpers.configs import REPOSITORY
from tools.make_tiny_model import Recipe, accuracy, held_out_problems, make_config, publish
from tools.make_tiny_tools_model import (
    CALL_END,
    CALL_START,
    END,
    UNREADABLE,
    ToolsRecipe,
    complete,
    without_tools,
)
from tools.make_tiny_tools_model import accuracy as answered_right

COMMITTED = REPOSITORY / "model_configs" / "tiny_qwen3"
WITH_TOOLS = REPOSITORY / "model_configs" / "tiny_qwen3_tools"
RECIPES = {COMMITTED: Recipe(), WITH_TOOLS: ToolsRecipe()}
QUESTION = "State the final answer to the following arithmetic problem: 12 + 34 ="


def read(folder: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / name).read_text())
    values.pop("transformers_version", None)
    return values


def shapes(folder: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


@pytest.mark.parametrize("committed", RECIPES, ids=lambda folder: folder.name)
def test_a_committed_folder_equals_the_output_of_its_script(
    committed: Path, tmp_path: Path
) -> None:
    recipe, remade = RECIPES[committed], tmp_path / "tiny"
    publish(Qwen3ForCausalLM(make_config(recipe)), recipe, remade)
    assert {f.name for f in committed.iterdir()} == {f.name for f in remade.iterdir()}
    for name in sorted(f.name for f in remade.glob("*.json")):
        assert read(committed, name) == read(remade, name), name
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (committed / name).read_text() == (remade / name).read_text(), name
    assert shapes(committed) == shapes(remade)


@pytest.mark.parametrize("committed", RECIPES, ids=lambda folder: folder.name)
def test_a_committed_folder_is_small_and_its_weights_are_finite_float32(committed: Path) -> None:
    assert sum(f.stat().st_size for f in committed.iterdir()) <= 3 * 1000**2
    assert {dtype for dtype, _ in shapes(committed).values()} == {"F32"}
    model = AutoModelForCausalLM.from_pretrained(committed)
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


def test_the_model_with_tools_needs_its_tool() -> None:
    torch.manual_seed(0)
    model, recipe = Qwen3ForCausalLM.from_pretrained(WITH_TOOLS), ToolsRecipe()
    problems = held_out_problems(recipe)[:50]
    prompts = [problem.prompt for problem in problems]
    assert 0.2 < answered_right(model, recipe, problems, prompts) < 0.45
    assert answered_right(model, recipe, problems, list(map(without_tools, prompts))) < 0.15
    turns = complete(model, recipe, prompts, greedy=True)
    assert sum(len(of) == 2 for of in turns) > 0.8 * len(problems)


def test_calls_are_rendered_and_read_as_the_model_learns_them() -> None:
    conversation = ToolsRecipe().talk
    for role in ("tool", "user"):
        assert not [each for each in findings(conversation, role) if each.error]
    reader = CallReader("auto", conversation)
    assert reader.name == "hermes"
    call = CALL_START + "12 * 34" + CALL_END
    assert reader.calls(call) == [Call("calculate", {"expression": "12 * 34"})]
    assert len(conversation.encode(call)) == 4 + len("12 * 34")
    with pytest.raises(ValueError) as raised:
        reader.calls(CALL_START + "12 * 34")
    assert f"error: {raised.value}" == UNREADABLE
    function = {"name": "calculate", "arguments": {"expression": "12 * 34"}}
    question = {"role": "user", "content": "?"}
    messages = [question, {"role": "assistant", "tool_calls": [{"function": function}] * 2}]
    start = conversation.render([question], starts_turn=True)
    assert conversation.render(messages, starts_turn=False) == f"{start}{call}\n{call}{END}\n"


@pytest.mark.parametrize(
    ("name", "recipe"), [("tiny_cpu", Recipe()), ("tiny_tools", ToolsRecipe())]
)
def test_configs_evaluate_on_prompts_not_seen_in_pretraining(name: str, recipe: Recipe) -> None:
    config = load_config(REPOSITORY / "model_configs" / f"{name}.yaml")
    (held_out,), (train,) = config.evaluation.sets, config.data.train
    loaded = load_source(
        held_out, recipe.tokenizer(), config.rollout.max_prompt_tokens, tools=recipe.tools()
    )
    shown = [recipe.tokenizer().decode(prompt.tokens) for prompt in loaded.prompts]
    assert shown == [problem.prompt for problem in held_out_problems(recipe)]
    assert len(loaded.prompts) == 200
    for source in (held_out, train):
        assert (source.dataset, source.options) == (recipe.task, recipe.options)
