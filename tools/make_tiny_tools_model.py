"""Make the tiny model that calls a tool, for products that are too large for it without one.

It is as small as the quickstart's. In the first phase of pretraining all conversations are right: a
call of the calculator, its result, the answer. In the second phase most have a fault. The model
answers at once, calls with a wrong digit, answers with another number than the result, or first
writes a call that cannot be read or evaluated. So it knows all it needs, but seldom does all of it.

Fixed texts are single tokens, which makes a conversation about 60 tokens long, the system message
with the description of the tool included.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dapo_megatron.data.conversation import Conversation
from dapo_megatron.environments.interface import load_environment
from tools.make_tiny_model import (
    CHARACTERS,
    MAX_TOKENS,
    PAD,
    UNK,
    Problem,
    Recipe,
    corrupt,
    held_out_problems,
    pretrain,
    publish,
    training_problems,
)

ENVIRONMENT = load_environment("dapo_megatron.environments.calculator:Calculator")
END, USER_START, TURN_START = "<|im_end|>", "<|im_start|>user\n", "<|im_start|>assistant\n"
CALL_START = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "'
CALL_END = '"}}\n</tool_call>'
UNREADABLE = "error: this call of a tool cannot be read"
"""Message that the engine writes."""
PIECES = (
    "Solve the following multiplication: ",
    ". Give only the result as your final answer.",
    "<tool_call>",
    CALL_START.removeprefix("<tool_call>"),
    CALL_END.removesuffix("</tool_call>"),
    "</tool_call>",
    "<tool_response>",
    "error: not an expression",
    UNREADABLE,
    "</tool_response>",
)
CHAT_TEMPLATE = r"""
{%- if tools -%}
{{- '<|im_start|>system\nCall these functions:\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\nWrite each call like this:\n<tool_call>\n' -}}
{{- '{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- set before = messages[loop.index0 - 1].role if not loop.first -%}
{%- if before != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- set after = messages[loop.index0 + 1].role if not loop.last -%}
{%- if after != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
FAULTS = {"at once": 7, "wrong digit": 2, "not the result": 4, "unreadable": 1, "no number": 1}
"""Weights of the faults. After the last two the model is told, and calls again."""
MAX_TURNS, MAX_TURN_TOKENS = 4, 32


def make_tokenizer(pieces: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable ASCII character and per piece."""
    special = [PAD, END, UNK, USER_START, TURN_START]
    tokens = [*special, *CHARACTERS, *pieces]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNK,
        additional_special_tokens=[USER_START, TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@cache
def system_message() -> str:
    """Return the text before the first message, which describes the tools."""
    conversation = Conversation(make_tokenizer(()), (), tools=ENVIRONMENT.described().descriptions)
    text = conversation.render([{"role": "user", "content": ""}], starts_turn=False)
    return text.partition(USER_START)[0]


@dataclass(frozen=True)
class ToolsRecipe(Recipe):
    """Settings of the model that calls a tool."""

    turn_start: ClassVar[str] = TURN_START

    task: str = "products"
    options: dict[str, Any] = field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 4}
    )
    steps: int = 280
    batch: int = 64
    wrong_fraction: float = 0.9
    wrong_steps: int = 120

    @cached_property
    def talk(self) -> Conversation:
        """The conversations with the model."""
        tokenizer = self.tokenizer()
        return Conversation(tokenizer, [tokenizer.eos_token_id], tools=self.tools())

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer."""
        return make_tokenizer((*PIECES, system_message()))

    def tools(self) -> list[dict[str, Any]]:
        """Return the descriptions of tools that the prompts show."""
        return ENVIRONMENT.described().descriptions

    def conversation(self, problem: Problem, rng: random.Random, is_wrong: bool) -> str:
        """Return a whole conversation for pretraining."""
        fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0] if is_wrong else ""
        text, answer = problem.prompt, problem.answer
        expression = problem.entry["metadata"]["expression"]
        if fault == "at once":  # half of these prompts offer no tool
            return rng.choice([text, without_tools(text)]) + answer + END
        if fault == "unreadable":
            text += self._turn(CALL_START + expression, UNREADABLE)
        elif fault == "no number":
            text += self._call(expression.partition("*")[0] + "* ")
        elif fault == "wrong digit":
            expression = corrupt_digit(expression, rng)
            answer = calculate(expression)
        text += self._call(expression)
        return text + (corrupt(answer, rng) if fault == "not the result" else answer) + END

    def _call(self, expression: str) -> str:
        """Return a turn that calls, and the result."""
        return self._turn(CALL_START + expression + CALL_END, calculate(expression))

    def _turn(self, turn: str, message: str) -> str:
        """Return a turn, and what follows it."""
        return turn + self.talk.after_turn([{"role": "tool", "content": message}])


def without_tools(prompt: str) -> str:
    """Return a prompt without the description of the tools."""
    return prompt.removeprefix(system_message())


def corrupt_digit(expression: str, rng: random.Random) -> str:
    """Return the expression with another digit in one place."""
    place = rng.choice([match.start() for match in re.finditer(r"\d", expression)])
    digit = rng.choice("123456789".replace(expression[place], ""))
    return expression[:place] + digit + expression[place + 1 :]


def calculate(expression: str) -> str:
    """Return the message of the tool: the result, or why there is none."""
    try:
        return ENVIRONMENT.call(ENVIRONMENT.kind(), "calculate", {"expression": expression})
    except ValueError as error:
        return f"error: {error}"


def message_after(turn: str) -> str | None:
    """Return the message after a turn, or None if it calls no tool."""
    if "<tool_call>" not in turn:
        return None
    try:
        (call,) = re.findall("<tool_call>(.*?)</tool_call>", turn, re.DOTALL)
        return calculate(json.loads(call)["arguments"]["expression"])
    except (ValueError, KeyError, TypeError):
        return UNREADABLE


@torch.no_grad()
def complete(
    model: PreTrainedModel, recipe: ToolsRecipe, prompts: list[str], *, greedy: bool = False
) -> list[list[str]]:
    """Return the turns of the model for each prompt, at temperature 1. The last one answers."""
    tokenizer = recipe.talk.tokenizer
    rows = [recipe.talk.encode(prompt) for prompt in prompts]
    turns: list[list[str]] = [[] for _ in prompts]
    sampling = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    going = list(range(len(prompts)))
    for _ in range(MAX_TURNS):
        inputs = tokenizer.pad({"input_ids": [rows[place] for place in going]}, return_tensors="pt")
        output = model.generate(
            **inputs, max_new_tokens=MAX_TURN_TOKENS, do_sample=not greedy, **sampling
        )
        sampled = output[:, inputs.input_ids.shape[1] :].tolist()
        asked, going = going, []
        for place, ids in zip(asked, sampled, strict=True):
            ids = [token for token in ids if token != tokenizer.pad_token_id]
            turn = tokenizer.decode(ids).removesuffix(END)
            turns[place].append(turn)
            if (message := message_after(turn)) is not None:
                answer = {"role": "tool", "content": message}
                rows[place] += [*ids, *recipe.talk.between(ids[-1], [answer])]
                going.append(place)
        if not going:
            break
    return turns


def accuracy(
    model: PreTrainedModel, recipe: ToolsRecipe, problems: list[Problem], prompts: list[str]
) -> float:
    """Return the share of right answers at temperature 1, of four samples for each prompt."""
    right = 0
    for _ in range(4):
        turns = complete(model, recipe, prompts)
        right += sum(recipe.score(p, of[-1]) for p, of in zip(problems, turns, strict=True))
    return right / (4 * len(problems))


def main(
    output: Annotated[Path, typer.Option(help="Folder to write (replaced if it exists).")],
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and faults.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps in all.")] = ToolsRecipe.steps,
    wrong_steps: Annotated[
        int, typer.Option(help="Number of last steps with faults.")
    ] = ToolsRecipe.wrong_steps,
    wrong_fraction: Annotated[
        float, typer.Option(help="Share of conversations with a fault in those steps.")
    ] = ToolsRecipe.wrong_fraction,
) -> None:
    """Make the model, measure it on held-out problems with and without its tool, and publish it."""
    started = time.monotonic()
    torch.set_num_threads(1)  # another number rounds differently
    recipe = ToolsRecipe(
        seed=seed, steps=steps, wrong_steps=wrong_steps, wrong_fraction=wrong_fraction
    )
    problems = held_out_problems(recipe)
    model = pretrain(recipe, training_problems(recipe))
    publish(model, recipe, output)
    prompts = [problem.prompt for problem in problems]
    metrics = {
        "accuracy": accuracy(model, recipe, problems, prompts),
        "accuracy_without_tool": accuracy(
            model, recipe, problems, [without_tools(prompt) for prompt in prompts]
        ),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps({**asdict(recipe), **metrics}))


if __name__ == "__main__":
    typer.run(main)
