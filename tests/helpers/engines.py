"""A vLLM engine in a rank of a test: started on a folder, fed, compared with HF."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dapo_megatron.types import Completion, Prompt, SampleRequest
from tests.helpers.configs import tiny_config
from tests.helpers.models import per_expert

GAP = 1e-5  # largest difference of two log-probs in float32, natural logarithm
PROMPT_TOKENS, RESPONSE_TOKENS = 160, 24
Results = dict[tuple[int, int], Completion]


def start(
    folder: Path,
    rank: int,
    world_size: int,
    engine_ranks: int,
    *,
    is_empty: bool = False,
    **overrides: Any,
) -> Any:
    """An engine on the model in `folder`; `overrides` as of `tiny_config`."""
    from dapo_megatron.engine.engine import VllmEngine

    config = tiny_config(
        model__path=folder,
        policy__tensor_parallel=1,
        engine__tensor_parallel=engine_ranks,
        engine__kv_cache_gib=0.03,
        rollout__max_prompt_tokens=PROMPT_TOKENS,
        rollout__max_response_tokens=RESPONSE_TOKENS,
        overlong__max_tokens=RESPONSE_TOKENS,
        overlong__buffer_tokens=8,
        **overrides,
    )
    return VllmEngine(config, rank=rank, world_size=world_size, local_rank=rank, is_empty=is_empty)


def prompt(tokens: tuple[int, ...]) -> Prompt:
    """A prompt of which only the tokens count."""
    return Prompt("sums", 0, tokens, "", "")


def requests(
    tickets: Sequence[int], num_tokens: int = 9, temperature: float | None = None
) -> list[SampleRequest]:
    """Four samples for each ticket; every third ticket at temperature 1, 0.7 and 0."""
    return [
        SampleRequest(
            ticket=ticket,
            sample=sample,
            prompt=prompt(tuple(4 + (ticket * 5 + place * 7) % 60 for place in range(num_tokens))),
            seed=1000 * ticket + sample,
            max_tokens=RESPONSE_TOKENS,
            temperature=(1.0, 0.7, 0.0)[ticket % 3] if temperature is None else temperature,
            top_p=1.0,
        )
        for ticket in tickets
        for sample in range(4)
    ]


def run(engine: Any, asked: Sequence[SampleRequest], num_steps: int | None = None) -> Results:
    """Completions in the order in which they finished: all of them, or those of so many steps."""
    engine.submit(asked)
    results: Results = {}
    for _ in count() if num_steps is None else range(num_steps):
        if not engine.requests:
            break
        for request, completion in engine.step():
            results[request.ticket, request.sample] = completion
    return results


def interrupted(engine: Any) -> Results:
    """What it has so far, in the order in which it gives it."""
    return {(one.ticket, one.sample): completion for one, completion in engine.interrupt()}


def rest(asked: Sequence[SampleRequest], done: Results, partial: Results) -> list[SampleRequest]:
    """What is still to be sampled: continued where there is a part, with a seed of its own."""
    requests = []
    for request in asked:
        place = request.ticket, request.sample
        so_far = partial.get(place)
        if place not in done:
            seed = request.seed + 100_000 * (len(so_far.tokens) if so_far else 0)
            requests.append(replace(request, seed=seed, so_far=so_far))
    return requests


def gap(model: PreTrainedModel, asked: Sequence[SampleRequest], results: Results) -> float:
    """Largest |log-prob by engine - by HF| of any sampled token; nan if any is nan."""
    return segment_gap({}, asked, results, other=model)


@torch.no_grad()
def segment_gap(
    models: Mapping[int, PreTrainedModel],
    asked: Sequence[SampleRequest],
    results: Results,
    other: PreTrainedModel | None = None,
) -> float:
    """As `gap`, each token compared with the model of the version that is said to have sampled it
    (`other` for versions that have none)."""
    gaps = []
    for request in asked:
        completion = results[request.ticket, request.sample]
        ids = torch.tensor([*request.prompt.tokens, *completion.tokens])
        assert len(completion.logprobs) == len(completion.tokens)
        first = 0
        for part in completion.segments:
            model = models.get(part.version, other)
            assert model is not None
            logits = model(ids[None]).logits[0, len(request.prompt.tokens) - 1 : -1]
            # A greedy token's log-prob is the plain one.
            logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
            sampled = logprobs.gather(1, ids[len(request.prompt.tokens) :, None])[:, 0]
            place = slice(first, first + part.num_tokens)
            gaps.append((sampled[place] - torch.tensor(completion.logprobs)[place]).abs().max())
            first += part.num_tokens
        assert first == len(completion.tokens)
    return float(torch.stack(gaps).max())


def hf_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """HF name, as in a checkpoint -> whole tensor."""
    return per_expert({name: weight.detach() for name, weight in model.named_parameters()})


def offer(whole: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}


def arrivals(
    tensor_slices: Sequence[Any], whole: Mapping[str, Tensor], seed: int = 0
) -> Iterator[tuple[str, list[tuple[Any, Tensor]]]]:
    """The slices of `tensor_slices`, and nothing else of `whole`, tensor by tensor in a random
    order; in memory that is spoilt once the next one is asked for, as protocols.RolloutEngine
    allows."""
    regions: dict[str, list[Any]] = {}
    for tensor_slice in tensor_slices:
        regions.setdefault(tensor_slice.name, []).append(tensor_slice.region)
    names = sorted(regions)
    random.Random(seed).shuffle(names)
    for name in names:
        parts = [(region, whole[name][region.slices].clone()) for region in regions[name]]
        yield name, parts
        for _, part in parts:
            part.fill_(float("nan"))


def sync(engine: Any, model: PreTrainedModel, version: int) -> None:
    """Give `engine` the weights of `model`."""
    whole = weights(model)
    engine.receive(arrivals(engine.needed_slices(offer(whole)), whole, seed=version), version)


def forget(engine: Any) -> list[str]:
    """What sleeping takes from an engine on a GPU (level 2 of vLLM), done to one on CPU: every
    tensor of its model is spoilt, but for the buffers, which vLLM keeps, and what is on the host in
    any case. The names of those that are no parameters."""
    (names,) = engine._llm.apply_model(_spoil)
    return names


def _spoil(model: torch.nn.Module) -> list[str]:
    kept = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    found: dict[str, Tensor] = dict(model.named_parameters())
    num_parameters = len(found)
    for path, module in model.named_modules():
        holders = {"": module, "quant_method.": getattr(module, "quant_method", None)}
        for prefix, holder in (holders | {"impl.": getattr(module, "impl", None)}).items():
            for name, value in vars(holder).items() if holder is not None else ():
                if isinstance(value, Tensor) and not name.endswith("_cpu"):
                    found[f"{path}.{prefix}{name}"] = value
    for value in found.values():
        storage = value.untyped_storage()
        if storage.data_ptr() not in kept:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # not a number
    return list(found)[num_parameters:]
