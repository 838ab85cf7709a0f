"""An engine with something wrong with its syncs, behind the same seam as the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Stream = Iterable[tuple[str, list[tuple[Any, Tensor]]]]


class Saboteur:
    """`protocols.RolloutEngine`: hands everything on to `engine`, but for what a fault changes.

    A fault sets `stream` (what the engine is given), `told` (the version it hears), or `afterwards`
    (done to the engine once it has the weights).
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.heal()

    def heal(self) -> None:
        self.stream: Callable[[Stream], Stream] = lambda weights: weights
        self.told: Callable[[int], int] = lambda version: version
        self.afterwards: Callable[[Any], None] = lambda engine: None

    def receive(self, weights: Stream, version: int) -> Any:
        # What a failed sync left behind is not what the next fault is about.
        self.engine._unusable = ""
        report = self.engine.receive(self.stream(weights), self.told(version))
        self.afterwards(self.engine)
        return report

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def dropped(name: str) -> Callable[[Stream], Stream]:
    return lambda weights: (one for one in weights if one[0] != name)


def repeated(name: str) -> Callable[[Stream], Stream]:
    def twice(weights: Stream) -> Iterator[Any]:
        for one in weights:
            yield one
            if one[0] == name:
                yield one

    return twice


def swapped(first: str, second: str) -> Callable[[Stream], Stream]:
    """Each of two tensors of one shape under the other's name."""
    names = {first: second, second: first}
    return lambda weights: ((names.get(name, name), regions) for name, regions in weights)


def replaced(old: dict[str, list[tuple[Any, Tensor]]]) -> Callable[[Stream], Stream]:
    """Everything as it was when `old` was kept."""
    return lambda weights: ((name, old[name]) for name, _ in weights)


def kept(weights: Stream) -> dict[str, list[tuple[Any, Tensor]]]:
    return {name: [(r, value.clone()) for r, value in regions] for name, regions in weights}


def flip_bit(name: str) -> Callable[[Any], None]:
    """The lowest bit of the first element of a tensor that the engine keeps as it is (a norm)."""

    def flip(engine: Any) -> None:
        for tensor_slice, value in engine.read_back():
            if tensor_slice.name == name:
                bits = {2: torch.int16, 4: torch.int32}[value.itemsize]
                value.view(-1)[:1].view(bits).bitwise_xor_(1)

    return flip


def other_epsilon(engine: Any) -> None:
    """The right weights, computed with in another way."""

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
