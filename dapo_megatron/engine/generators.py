"""The process's global random generators, which vLLM shares with the policy.

vLLM draws the random numbers of requests without a seed from torch's default generator (of the GPU,
if there is one) or, for the seeds that model runner v2 gives to them, from numpy's. On CPU each
step draws from torch's default generator even if every request has its own seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor


class _States(NamedTuple):
    """States of the global generators. Reading and writing them does not wait for the GPU, where a
    state is a seed and an offset that the host keeps."""

    python: Any
    numpy: Any
    """The generator itself, because copying the state takes 100 times longer."""
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def read(cls) -> _States:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return cls(random.getstate(), mtrand.get_bit_generator(), torch.get_rng_state(), cuda)

    def write(self) -> None:
        random.setstate(self.python)
        mtrand.set_bit_generator(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@contextmanager
def random_state(seed: int | Sequence[int] = 0) -> Iterator[None]:
    """Seed the global random generators inside the context, and restore their states after it."""
    states = _States.read()
    words = np.random.SeedSequence(seed).generate_state(4)
    number = int.from_bytes(words.tobytes()[:8], "little") >> 1
    try:
        random.seed(number)
        mtrand.set_bit_generator(np.random.MT19937(words))
        torch.default_generator.manual_seed(number)
        torch.cuda.manual_seed(number)  # does nothing without a GPU
        yield
    finally:
        states.write()


class EngineGenerators:
    """The engine's own states of the global random generators.

    The ranks of an engine sample independently and must draw the same numbers, while the policy
    seeds the generators differently on each data-parallel rank, and uses them between engine steps.
    """

    def __init__(self, *seed: int) -> None:
        """Take a `seed` of several numbers, equal on all ranks of an engine."""
        with random_state(seed):
            self._states = _States.read()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace the states by the engine's own inside the context."""
        states = _States.read()
        self._states.write()
        try:
            yield
        finally:
            self._states = _States.read()
            states.write()
