"""Run the program and inject faults into the syncs of an engine server:
`python -m tests.helpers.saboteur engine ...`.

If there is a file at the path in FAULT, it is removed when weights arrive, and the fault that it
names happens in that sync. The next sync is without it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.cluster.servers import Server

Stream = Iterable[tuple[str, list[tuple[Any, Tensor]]]]

FAULT = "DAPO_MEGATRON_TEST_FAULT"
NORM = "model.layers.1.input_layernorm.weight"
MAX_REQUESTS = 4
"""Requests that an engine has at most. No prompt is as short."""
GATE = "model.layers.0.mlp.experts.{}.gate_proj.weight"


class SabotagedServer(Server):
    """A server whose process runs this file."""

    def _start(self) -> None:
        self._command[1:3] = ["-m", __name__]
        super()._start()


# ------------------------------------------------------------------ weights on their way


def dropped(weights: Stream) -> Stream:
    return (arrival for arrival in weights if arrival[0] != NORM)


def repeated(weights: Stream) -> Iterator[Any]:
    for arrival in weights:
        yield arrival
        if arrival[0] == NORM:
            yield arrival


def swapped(weights: Stream) -> Stream:
    """Swap the names of two tensors of the same shape."""
    first, second = GATE.format(2), GATE.format(5)
    names = {first: second, second: first}
    return ((names.get(name, name), regions) for name, regions in weights)


STREAMS: dict[str, Callable[[Stream], Stream]] = {
    "a tensor dropped from the stream": dropped,
    "a tensor given twice": repeated,
    "two experts swapped": swapped,
}

# ------------------------------------------------------------------ the engine afterwards


def flip_bit(engine: Any, undo: ExitStack) -> None:
    """Flip the lowest bit of the first element of a norm, which the engine stores unchanged."""
    (slices,) = engine._llm.collective_rpc(lambda worker: list(worker.read_slices()))
    (value,) = (value for part, value in slices if part.name == NORM)
    value.view(-1)[:1].view({2: torch.int16, 4: torch.int32}[value.itemsize]).bitwise_xor_(1)


def stale_decoding(engine: Any, undo: ExitStack) -> None:
    """Make steps of one token per request compute something else, as a CUDA graph does that reads
    stale memory."""

    def hook(_: Any, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, residual = output
        return (1.5 * hidden if len(hidden) <= MAX_REQUESTS else hidden), residual

    (handle,) = engine._llm.apply_model(lambda model: model.model.norm.register_forward_hook(hook))
    undo.callback(handle.remove)


def no_numbers(engine: Any, undo: ExitStack) -> None:
    step = engine.step

    def without_numbers() -> list[tuple[Any, Any]]:
        return [
            (request, replace(completion, logprobs=[math.nan] * completion.num_tokens))
            for request, completion in step()
        ]

    engine.step = without_numbers
    undo.callback(delattr, engine, "step")


def other_epsilon(engine: Any, undo: ExitStack) -> None:
    """Change the epsilon of the norms, so that the right weights give other outputs."""

    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                undo.callback(setattr, module, "variance_epsilon", module.variance_epsilon)
                module.variance_epsilon = 1e-2

    engine._llm.apply_model(change)


AFTERWARDS: dict[str, Callable[[Any, ExitStack], None]] = {
    "one bit flipped in the engine": flip_bit,
    "decoding unlike scoring": stale_decoding,
    "log-probs that are no numbers": no_numbers,
    "right weights, another computation": other_epsilon,
}
OLDER = "an engine given older weights"
UNPACKED = "expert packing skipped"
FAULTS = (*STREAMS, *AFTERWARDS, OLDER, UNPACKED)
DOUBLED = "a change since the first sync counted twice"
"""A delta of adapters that is added once per tensor-parallel rank."""

# ------------------------------------------------------------------ the server's process


def sabotage(path: Path) -> None:
    """Replace the loading of weights in this process."""
    from dapo_megatron.engine import device
    from dapo_megatron.engine.engine import VllmEngine
    from dapo_megatron.engine.extension import WorkerExtension

    load, load_slices = VllmEngine.load, WorkerExtension.load_slices
    undo, fault = ExitStack(), ""
    first: dict[str, list[tuple[Any, Tensor]]] = {}

    def older(weights: Stream) -> Iterator[Any]:
        for name, regions in weights:
            if name not in first:
                first[name] = [(region, value.clone()) for region, value in regions]
            if fault == DOUBLED:
                regions = [
                    (region, 2 * value - before)
                    for (region, value), (_, before) in zip(regions, first[name], strict=True)
                ]
            yield name, first[name] if fault == OLDER else regions

    def sabotaged_load(engine: VllmEngine, version: int, addresses: Any) -> None:
        nonlocal fault
        undo.close()
        fault = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        forget = device.forget_expert_kernels
        if fault == UNPACKED:
            device.forget_expert_kernels = lambda model: None
        try:
            load(engine, version, addresses)
        finally:
            device.forget_expert_kernels = forget
        if fault in AFTERWARDS:
            AFTERWARDS[fault](engine, undo)

    def sabotaged_slices(worker: Any, weights: Stream) -> None:
        load_slices(worker, STREAMS.get(fault, older)(weights))

    VllmEngine.load = sabotaged_load  # type: ignore[method-assign]
    WorkerExtension.load_slices = sabotaged_slices  # type: ignore[method-assign]


if __name__ == "__main__":
    from dapo_megatron import __main__ as program
    from dapo_megatron.engine import device as engine_device

    engine_device.prepare_environment()
    sabotage(Path(os.environ[FAULT]))
    program.main()
