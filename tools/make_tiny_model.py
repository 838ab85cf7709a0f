"""Make the tiny base model of the quickstart: Qwen3, character-level, often wrong on purpose.

`--family qwen3_moe` makes a similar model with experts (model_configs/tiny_qwen3_moe), and
make_tiny_tools_model.py a third one, which calls a tool.

The model learns a verifiable task of the reasoning-gym package in two phases. In the first phase
the answers are right, so it learns the task. In the second phase most answers are corrupted, so it
becomes uncertain. At temperature 1 it is then right about 4 times in 10, while the right answer
stays the most likely one. So reinforcement learning has much to gain, and nearly every group of
samples is mixed.

Only answer tokens carry loss. Operands are random, and predicting them would waste the capacity of
0.6 M parameters. Prompts of one task share a prefix, which is computed once per batch.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import reasoning_gym
import torch
import typer
from rich.progress import track
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dapo_megatron.files import partial_folder, publish_folder

PAD, EOS, UNK, ANSWER = "<pad>", "<eos>", "<unk>", "<answer>"
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
MAX_TOKENS = 256
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<answer>' + message['content'] + '<eos>' -}}"
    "{%- else -%}{{- message['content'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<answer>' -}}{%- endif -%}"
)
HELD_OUT_SEED = 1_000_000_007
NUM_HELD_OUT = 200
PROBLEM_POOL = 100_000
CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


@dataclass(frozen=True)
class Problem:
    """A verifiable problem: the rendered prompt, and the data set's entry for its scorer."""

    prompt: str
    entry: dict[str, Any]

    @property
    def answer(self) -> str:
        """The right answer, in the data set's notation."""
        return str(self.entry["answer"])


@dataclass(frozen=True)
class Recipe:
    """Settings of a base model. On one machine, equal recipes make the same model."""

    turn_start: ClassVar[str] = ANSWER
    """Token after which a turn of the model begins. EOS ends it."""
    family: str = "qwen3"
    task: str = "chain_sum"
    options: dict[str, Any] = field(default_factory=lambda: dict(CHAIN_SUM))
    seed: int = 0
    steps: int = 650
    batch: int = 256
    lr: float = 3e-3
    wrong_fraction: float = 0.56
    wrong_steps: int = 250

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer."""
        return make_tokenizer()

    def tools(self) -> list[dict[str, Any]] | None:
        """Return the descriptions of tools that the prompts show."""
        return None

    def conversation(self, problem: Problem, rng: random.Random, is_wrong: bool) -> str:
        """Return a whole conversation for pretraining."""
        answer = corrupt(problem.answer, rng) if is_wrong else problem.answer
        return problem.prompt + answer + EOS

    def score(self, problem: Problem, answer: str) -> bool:
        """Return whether an answer is right by reasoning-gym's scorer."""
        name = problem.entry["metadata"]["source_dataset"]
        return reasoning_gym.get_score_answer_fn(name)(answer, problem.entry) == 1.0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable ASCII character, and a chat template."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, ANSWER, *CHARACTERS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD, EOS, UNK, ANSWER])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[ANSWER],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"hidden_size": 128, "intermediate_size": 256}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "hidden_size": 64,
            "intermediate_size": 96,  # unused: every layer has experts
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
}


def make_config(recipe: Recipe) -> PreTrainedConfig:
    """Return the architecture: 0.6 M parameters, or 0.3 M with experts. All sizes are even."""
    tokenizer = recipe.tokenizer()
    config_class, _, sizes = FAMILIES[recipe.family]
    return config_class(
        vocab_size=len(tokenizer),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        max_window_layers=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **sizes,
    )


def make_problems(recipe: Recipe, seed: int, size: int) -> list[Problem]:
    """Return distinct problems of the recipe's task, in the data set's order."""
    tokenizer, tools = recipe.tokenizer(), recipe.tools()
    dataset = reasoning_gym.create_dataset(recipe.task, seed=seed, size=size, **recipe.options)
    entries = {entry["question"]: entry for entry in dataset}
    return [
        Problem(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                tools=tools,
                add_generation_prompt=True,
                tokenize=False,
            ),
            entry,
        )
        for question, entry in entries.items()
    ]


def held_out_problems(recipe: Recipe) -> list[Problem]:
    """Return the problems of the quickstart's held-out set, which pretraining never uses."""
    return make_problems(recipe, HELD_OUT_SEED, 2 * NUM_HELD_OUT)[:NUM_HELD_OUT]


def training_problems(recipe: Recipe) -> list[Problem]:
    """Return problems that are not held out."""
    held_out = {problem.prompt for problem in held_out_problems(recipe)}
    pool = make_problems(recipe, recipe.seed, PROBLEM_POOL)
    return [problem for problem in pool if problem.prompt not in held_out]


def corrupt(answer: str, rng: random.Random) -> str:
    """Return a plausible wrong answer: off by 1, 2 or 10, or with one character replaced."""
    while True:
        if answer.lstrip("-").isdigit() and rng.random() < 0.7:
            wrong = str(int(answer) + rng.choice([-10, -2, -1, 1, 2, 10]))
        else:
            place = rng.randrange(len(answer))
            character = answer[place]
            kind = (
                "0123456789" if character.isdigit() else "+-" if character in "+-" else CHARACTERS
            )
            wrong = answer[:place] + rng.choice(kind) + answer[place + 1 :]
            wrong = str(int(wrong)) if wrong.lstrip("-").isdigit() else wrong
        if wrong != answer:
            return wrong


def turn_loss(model: PreTrainedModel, ids: Tensor, turn_start: int) -> Tensor:
    """Return the mean cross-entropy of the tokens in the model's turns.

    Args:
        ids: [batch, tokens], padded on the right. Leading tokens that all rows share are computed
            once.
        turn_start: the token after which a turn begins. The end of sequence ends it.
    """
    shared, cache = shared_length(ids.tolist()), None
    if shared:
        cache = model(ids[:1, :shared], use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(ids))
    logits = model(ids[:, shared:-1], past_key_values=cache).logits
    place = torch.arange(ids.shape[1])
    last_start = place.where(ids == turn_start, -1).cummax(1).values
    last_end = place.where(ids == model.config.eos_token_id, -1).cummax(1).values
    is_in_turn = (last_start > last_end)[:, shared:-1]
    targets = ids[:, shared + 1 :].masked_fill(~is_in_turn, -100)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def shared_length(rows: Collection[list[int]]) -> int:
    """Return how many leading tokens all rows share."""
    first, last = min(rows), max(rows)  # in lexicographic order, so all rows share this prefix
    pairs = enumerate(zip(first, last, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(last)))


def make_optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for all other parameters.

    With Muon the loss reaches in 300 steps what it reaches in more than 600 with AdamW only.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    return [
        torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.98)),
    ]


def set_lr(optimizers: list[torch.optim.Optimizer], recipe: Recipe, step: int) -> None:
    """Set the learning rate: linear warm-up over 50 steps, then a cosine to 2% of the peak."""
    warm = min(1.0, (step + 1) / 50)
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * warm * max(cosine, 0.02)


def pretrain(recipe: Recipe, problems: list[Problem]) -> PreTrainedModel:
    """Train a new model: right answers first, then `wrong_steps` steps of mostly wrong ones."""
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    tokenizer = recipe.tokenizer()
    _, model_class, _ = FAMILIES[recipe.family]
    model = model_class(make_config(recipe))
    optimizers = make_optimizers(model, recipe)
    turn_start = tokenizer.convert_tokens_to_ids(recipe.turn_start)

    for step in track(range(recipe.steps), description="pretraining"):
        set_lr(optimizers, recipe, step)
        doubt = recipe.wrong_fraction if step >= recipe.steps - recipe.wrong_steps else 0.0
        batch = rng.sample(problems, recipe.batch)
        texts = [recipe.conversation(problem, rng, rng.random() < doubt) for problem in batch]
        ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
        loss = turn_loss(model, ids, turn_start)
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, recipe: Recipe, problems: list[Problem], *, samples: int
) -> float:
    """Return the share of right answers by reasoning-gym's scorer. `samples` 0 means greedy."""
    tokenizer = recipe.tokenizer()
    asked = [problem for problem in problems for _ in range(max(samples, 1))]
    inputs = tokenizer([problem.prompt for problem in asked], padding=True, return_tensors="pt")
    room = MAX_TOKENS - inputs.input_ids.shape[1]
    longest = max(len(problem.answer) for problem in problems) + 4
    sampling: dict[str, Any] = {"do_sample": False}
    if samples:
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=min(room, longest),
        **sampling,
    )
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(map(recipe.score, asked, texts)) / len(asked)


def publish(model: PreTrainedModel, recipe: Recipe, folder: Path) -> None:
    """Write model, tokenizer and generation settings next to `folder`, then rename them to it."""
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    with partial_folder(folder.with_name(f".{folder.name}.{os.getpid()}.partial")) as partial:
        model.save_pretrained(partial)
        (partial / "model.safetensors").chmod(0o644)
        recipe.tokenizer().save_pretrained(partial)
        publish_folder(partial, folder)


def main(
    output: Annotated[Path, typer.Option(help="Folder to write (replaced if it exists).")],
    family: Annotated[str, typer.Option(help="qwen3, or qwen3_moe with experts.")] = Recipe.family,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and corruption.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps in all.")] = Recipe.steps,
    wrong_steps: Annotated[
        int, typer.Option(help="Number of last steps with wrong answers.")
    ] = Recipe.wrong_steps,
    wrong_fraction: Annotated[
        float, typer.Option(help="Share of wrong answers in those steps.")
    ] = Recipe.wrong_fraction,
    batch: Annotated[int, typer.Option(help="Problems per step.")] = Recipe.batch,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = Recipe.lr,
    task: Annotated[str, typer.Option(help="A reasoning-gym data set.")] = Recipe.task,
    options: Annotated[
        str, typer.Option(help="Settings of the data set, as a JSON object.")
    ] = json.dumps(CHAIN_SUM),
    threads: Annotated[
        int, typer.Option(help="CPU threads. Another number rounds differently.")
    ] = 1,
) -> None:
    """Make a tiny base model, measure it on held-out problems, and publish it."""
    started = time.monotonic()
    torch.set_num_threads(threads)
    recipe = Recipe(
        family, task, json.loads(options), seed, steps, batch, lr, wrong_fraction, wrong_steps
    )
    held_out = held_out_problems(recipe)
    model = pretrain(recipe, training_problems(recipe))
    sampled = accuracy(model, recipe, held_out, samples=4)
    greedy = accuracy(model, recipe, held_out, samples=0)
    publish(model, recipe, output)
    seconds = round(time.monotonic() - started, 1)
    metrics = {"accuracy_sampled": sampled, "accuracy_greedy": greedy, "seconds": seconds}
    print(f"right at temperature 1: {sampled:.3f}, greedy: {greedy:.3f}, in {seconds} s: {output}")
    print(json.dumps({**asdict(recipe), **metrics}))


if __name__ == "__main__":
    typer.run(main)
