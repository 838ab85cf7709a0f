"""Wrap an engine and inject faults into its syncs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Stream = Iterable[tuple[str, list[tuple[Any, Tensor]]]]


class Saboteur:
    """A `protocols.RolloutEngine` that forwards everything to `engine`, except an injected fault.

    A fault sets `stream` (changes the weights on their way to the engine), `sent_version` (changes
    the version number), or `afterwards` (changes the engine after it has received the weights).
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.heal()

    def heal(self) -> None:
        self.stream: Callable[[Stream], Stream] = lambda weights: weights
        self.sent_version: Callable[[int], int] = lambda version: version
        self.afterwards: Callable[[Any], None] = lambda engine: None

    def receive(self, weights: Stream, version: int) -> Any:
        # A failed sync makes the engine unusable. Clear that, so that faults stay independent.
        self.engine._unusable = ""
        report = self.engine.receive(self.stream(weights), self.sent_version(version))
        self.afterwards(self.engine)
        return report

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def dropped(name: str) -> Callable[[Stream], Stream]:
    return lambda weights: (arrival for arrival in weights if arrival[0] != name)


def repeated(name: str) -> Callable[[Stream], Stream]:
    def twice(weights: Stream) -> Iterator[Any]:
        for arrival in weights:
            yield arrival
            if arrival[0] == name:
                yield arrival

    return twice


def swapped(first: str, second: str) -> Callable[[Stream], Stream]:
    """Swap the names of two tensors of the same shape."""
    names = {first: second, second: first}
    return lambda weights: ((names.get(name, name), regions) for name, regions in weights)


def replaced(old: dict[str, list[tuple[Any, Tensor]]]) -> Callable[[Stream], Stream]:
    """Send the weights that were saved in `old`."""
    return lambda weights: ((name, old[name]) for name, _ in weights)


def kept(weights: Stream) -> dict[str, list[tuple[Any, Tensor]]]:
    return {name: [(r, value.clone()) for r, value in regions] for name, regions in weights}


def flip_bit(name: str) -> Callable[[Any], None]:
    """Flip the lowest bit of the first element of a tensor that the engine stores unchanged, for
    example a norm."""

    def flip(engine: Any) -> None:
        for tensor_slice, value in engine.read_back():
            if tensor_slice.name == name:
                bits = {2: torch.int16, 4: torch.int32}[value.itemsize]
                value.view(-1)[:1].view(bits).bitwise_xor_(1)

    return flip


def other_epsilon(engine: Any) -> None:
    """Change the epsilon of the norms, so that the right weights give other outputs."""

    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-2

    engine._llm.apply_model(change)


def stale_decoding(engine: Any) -> Any:
    """Make steps of one token per canary sequence compute something else, as a CUDA graph does that
    reads stale memory. Return the handle that removes the fault."""
    from dapo_megatron.bridge.verify import NUM_SEQUENCES

    def hook(_: Any, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, residual = output
        return (1.5 * hidden if len(hidden) == NUM_SEQUENCES else hidden), residual

    (handle,) = engine._llm.apply_model(lambda model: model.model.norm.register_forward_hook(hook))
    return handle
