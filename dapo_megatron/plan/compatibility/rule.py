"""What a rule is, and what it looks at."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec

from dapo_megatron.config import Config
from dapo_megatron.config.computing import kernels_for
from dapo_megatron.model import FAMILIES, Architecture

ALL = tuple(FAMILIES)
LATENT = tuple(name for name, family in FAMILIES.items() if family.has_latent)
"""Families with multi-head latent attention."""
NOT_LATENT = tuple(name for name in ALL if name not in LATENT)
PACKAGES = ("transformer_engine", "apex", "triton")


class Verdict(StrEnum):
    """What is done about a combination."""

    REFUSED = "refused"
    """The run does not start."""
    WARNED = "warned"
    """It starts, and says so once."""
    NOT_RUN = "not run on a GPU yet"
    """Likewise: written and checked without a GPU, as far as that goes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank computes with. `capability` is its GPU's compute capability, None for no GPU."""

    capability: tuple[int, int] | None = None
    cuda: tuple[int, ...] = ()
    """Version of CUDA that torch was built with."""
    packages: frozenset[str] = frozenset()
    """Of PACKAGES, those that are installed."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Return what this process computes with."""
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        cuda = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part.isdigit())
        installed = frozenset(name for name in PACKAGES if find_spec(name) is not None)
        return cls(capability, cuda, installed, dict(os.environ))


@dataclass(frozen=True, slots=True)
class Run:
    """What rules look at. `machine` is None where none is at hand (plan, submitting a job): rules
    about it are then silent. `has_engine` is false for `doctor layouts` and replays."""

    config: Config
    arch: Architecture
    machine: Machine | None = None
    has_engine: bool = True

    @property
    def fused(self) -> bool:
        """Whether Transformer Engine computes the layers, as far as is known: without a machine,
        as on the one that the config is for."""
        chosen = kernels_for(
            self.config.policy,
            has_gpu=self.machine is None or self.on_gpu,
            is_installed=not self.lacks("transformer_engine"),
            is_latent=self.arch.latent is not None,
        )
        return chosen == "transformer_engine"

    @property
    def on_gpu(self) -> bool:
        """Whether it is known to run on a GPU."""
        return self.machine is not None and self.machine.capability is not None

    def lacks(self, package: str) -> bool:
        """Whether it is known that there is no GPU, or not this package."""
        if self.machine is None:
            return False
        return self.machine.capability is None or package not in self.machine.packages


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination, and what is done about it. It applies to `families`, when `when` says so:
    a text it gives is what exactly was found."""

    name: str
    keys: tuple[str, ...]
    """The features, as keys of the config; `machine` and `model` stand for those."""
    verdict: Verdict
    when: Callable[[Run], bool | str]
    why: str
    way_out: str
    example: tuple[str, ...]
    """Overrides of a small config that the rule fires on; the tests run them."""
    families: tuple[str, ...] = ALL
    example_machine: Machine | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that applies."""

    rule: Rule
    detail: str

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        verdict = "" if self.rule.verdict is Verdict.REFUSED else f"{self.rule.verdict}: "
        way_out = f"; {self.rule.way_out}" if self.rule.way_out else ""
        keys = ", ".join(key for key in self.rule.keys if "." in key)
        return f"{keys}: {verdict}{self.rule.why}{detail}{way_out}"
