"""Start a vLLM engine in a test's process, sample with it, sync it, and compare it with HF."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dapo_megatron.bridge.buckets import BucketSender
from dapo_megatron.types import Completion, DapoError, Prompt, SampleRequest, TensorSlice
from tests.helpers.configs import tiny_config
from tests.helpers.models import load_hf, per_expert
from tests.helpers.warm import take_environment, warm_context

GAP = 1e-5  # largest allowed difference of two log-probs (natural logarithm) in float32
PROMPT_TOKENS, RESPONSE_TOKENS = 160, 24
SILENCE_SECONDS = 60.0
Results = dict[tuple[int, int], Completion]


def run_alone(fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)`, run in a new process without torch.distributed, like that of an engine
    server. `fn` must be importable."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ProcessPoolExecutor(1, warm_context(), take_environment, (environment,)) as executor:
        return executor.submit(fn, *args).result()


def start(
    folder: Path, num_workers: int = 1, *, seed: int = 0, is_empty: bool = False, **overrides: Any
) -> Any:
    """Start an engine with the model in `folder` in this process, its workers in others if there
    are several. `overrides` are those of `tiny_config`."""
    from dapo_megatron.engine.engine import VllmEngine

    settings = {
        "policy__tensor_parallel": 1,
        "engine__tensor_parallel": num_workers,
        "engine__kv_cache_gib": 0.03,
        "rollout__max_prompt_tokens": PROMPT_TOKENS,
        "rollout__max_response_tokens": RESPONSE_TOKENS,
        "overlong__max_tokens": RESPONSE_TOKENS,
        "overlong__buffer_tokens": 8,
    }
    torch.set_num_threads(1)
    config = tiny_config(model__path=folder, **{**settings, **overrides})
    return VllmEngine(config, seed=seed, is_empty=is_empty)


def prompt(tokens: tuple[int, ...]) -> Prompt:
    """Return a prompt with these tokens. Its other fields do not matter."""
    return Prompt("sums", 0, tokens, "", "")


def requests(
    tickets: Sequence[int], num_tokens: int = 9, temperature: float | None = None
) -> list[SampleRequest]:
    """Return four requests per ticket. Tickets alternate between temperature 1, 0.7 and 0, unless
    `temperature` is given."""
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


def unseeded() -> list[SampleRequest]:
    """Return requests at temperatures 1, 0.7 and 0 whose samples are not repeatable."""
    return [replace(request, seed=None) for request in requests(range(6))]


def run(engine: Any, to_sample: Sequence[SampleRequest], num_steps: int | None = None) -> Results:
    """Sample until all are finished, or for `num_steps`. Return completions in the order in which
    they finished."""
    engine.submit(to_sample)
    results: Results = {}
    for _ in count() if num_steps is None else range(num_steps):
        if not engine.requests:
            break
        for request, completion in engine.step():
            results[request.ticket, request.sample] = completion
    return results


def interrupted(engine: Any) -> Results:
    """Interrupt the engine and return the unfinished completions, in the order that it returns."""
    return {
        (request.ticket, request.sample): completion for request, completion in engine.interrupt()
    }


def rest(
    requested: Sequence[SampleRequest], done: Results, partial: Results
) -> list[SampleRequest]:
    """Return requests for what is not done. A partial completion is continued, with a new seed."""
    remaining = []
    for request in requested:
        place = request.ticket, request.sample
        so_far = partial.get(place)
        if place not in done:
            seed = request.seed + 100_000 * (len(so_far.tokens) if so_far else 0)
            remaining.append(replace(request, seed=seed, so_far=so_far))
    return remaining


def gap(model: PreTrainedModel, requested: Sequence[SampleRequest], results: Results) -> float:
    """Return the largest |engine log-prob - HF log-prob| of a sampled token, nan if any is nan."""
    return segment_gap({}, requested, results, other=model)


@torch.no_grad()
def segment_gap(
    models: Mapping[int, PreTrainedModel],
    requested: Sequence[SampleRequest],
    results: Results,
    other: PreTrainedModel | None = None,
) -> float:
    """Return the same as `gap`, but compare each sampled token with the model of the version in its
    segment, or with `other` for versions without a model. Observed tokens must have log-prob 0."""
    gaps = []
    for request in requested:
        completion = results[request.ticket, request.sample]
        ids = torch.tensor([*request.prompt.tokens, *completion.tokens])
        assert len(completion.logprobs) == len(completion.tokens)
        first = 0
        for segment in completion.segments:
            place = slice(first, first + segment.num_tokens)
            first += segment.num_tokens
            if segment.is_observed:
                assert not any(completion.logprobs[place])
                continue
            model = models.get(segment.version, other)
            assert model is not None
            logits = model(ids[None]).logits[0, len(request.prompt.tokens) - 1 : -1]
            # The log-prob of a greedy token is that at temperature 1.
            logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
            sampled = logprobs.gather(1, ids[len(request.prompt.tokens) :, None])[:, 0]
            gaps.append((sampled[place] - torch.tensor(completion.logprobs)[place]).abs().max())
        assert first == len(completion.tokens)
    return float(torch.stack(gaps).max())


def hf_model(folder: Path) -> PreTrainedModel:
    return load_hf(folder).eval()


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the full tensors by HF name, as in a checkpoint."""
    biases = {name: value for name, value in model.named_buffers() if name.endswith("_bias")}
    return per_expert({name: weight.detach() for name, weight in model.named_parameters()} | biases)


def offer(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def arrivals(
    tensor_slices: Sequence[Any], whole: Mapping[str, Tensor], seed: int = 0
) -> Iterator[tuple[str, list[tuple[Any, Tensor]]]]:
    """Yield only the given slices of the tensors in `whole`, tensor by tensor in a random order.

    The memory of a tensor is overwritten with NaN when the next one is requested, because a sync
    may use it again.
    """
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
    """Send the weights of `model` to `engine`."""
    whole = weights(model)
    wanted = engine.trace(offer(whole))
    send(engine, wanted, [arrivals(slices, whole, seed=version) for slices in wanted], version)


def send(
    engine: Any,
    wanted: Sequence[Sequence[TensorSlice]],
    arriving: Sequence[Iterable[Any]],
    version: int,
) -> None:
    """Load what is `arriving` at each worker, which is `wanted` there, as trainer ranks send it.
    Raises the error of the engine, or of sending."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(len(wanted)) as threads,
    ):
        senders = []
        for number, slices in enumerate(wanted):
            (place := Path(folder) / str(number)).mkdir()
            senders.append(BucketSender(place, torch.device("cpu"), SILENCE_SECONDS))
            senders[-1].expect(slices)
        addresses = [sender.open() for sender in senders]
        sent = [threads.submit(s.send, weights) for s, weights in zip(senders, arriving)]
        engine.load(version, addresses)
        for future in sent:
            assert not future.result()


def message(call: Callable[[], object]) -> str:
    """Return the message of the DapoError that a call raises, or an empty string."""
    try:
        call()
    except DapoError as error:
        return str(error)
    return ""


def close(engine: Any) -> None:
    """End an engine and its workers. (A server ends them with its process.)"""
    engine._llm.llm_engine.engine_core.shutdown()


def differing(engine: Any, sent: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not bitwise as sent when read back from the workers."""
    by_worker = engine._llm.collective_rpc(_differing, args=(sent,))
    return sorted(set().union(*by_worker))


def _differing(worker: Any, sent: Mapping[str, Tensor]) -> list[str]:
    slices = list(worker.read_slices())
    assert {part for part, _ in slices} == set(worker.wanted_slices)
    return [
        part.name
        for part, value in slices
        if value is None
        or value.dtype != sent[part.name].dtype
        or not torch.equal(value, sent[part.name][part.region.slices])
    ]


def forget(engine: Any) -> list[str]:
    """Do to a CPU engine what sleeping (vLLM level 2) does to an engine on a GPU.

    Overwrite every tensor of its model with 0xFF bytes (NaN), except buffers, which vLLM keeps, and
    tensors that are always on the host. Return the names of the overwritten tensors that are no
    parameters.
    """
    names: list[str] = engine._llm.apply_model(_fill_with_nan)[0]
    return names


def _fill_with_nan(model: torch.nn.Module) -> list[str]:
    kept = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    num_parameters = len(tensors)
    for path, module in model.named_modules():
        holders = {"": module, "quant_method.": getattr(module, "quant_method", None)}
        for prefix, holder in (holders | {"impl.": getattr(module, "impl", None)}).items():
            for name, value in vars(holder).items() if holder is not None else ():
                if isinstance(value, Tensor) and not name.endswith("_cpu"):
                    tensors[f"{path}.{prefix}{name}"] = value
    for value in tensors.values():
        storage = value.untyped_storage()
        if storage.data_ptr() not in kept:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN in every float dtype
    return list(tensors)[num_parameters:]
