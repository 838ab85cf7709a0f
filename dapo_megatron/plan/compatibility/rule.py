"""A rule about a combination of features, and the facts about a run that rules examine."""

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


class Action(StrEnum):
    """Action for a combination of features."""

    REFUSED = "refused"
    """The run does not start."""
    WARNED = "warned"
    """The run starts, with a warning in its header."""
    NOT_RUN = "not run on a GPU yet"
    """The run starts, with a note: the feature was only tested without a GPU, as far as
    possible."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and software of a rank. `capability` is its GPU's compute capability; None means no
    GPU."""

    capability: tuple[int, int] | None = None
    cuda: tuple[int, ...] = ()
    """CUDA version that torch was built with."""
    packages: frozenset[str] = frozenset()
    """Installed packages among PACKAGES."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Return the machine of this process."""
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        cuda = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part.isdigit())
        installed = frozenset(name for name in PACKAGES if find_spec(name) is not None)
        return cls(capability, cuda, installed, dict(os.environ))


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts about a run that rules examine. `machine` is None if it is unknown (`plan`,
    submitting a job); rules about it then do not apply. `has_engine` is false for `doctor layouts`
    and replays."""

    config: Config
    arch: Architecture
    machine: Machine | None = None
    has_engine: bool = True

    @property
    def fused(self) -> bool:
        """Whether Transformer Engine computes the layers. Without a `machine`, a GPU and an
        installed Transformer Engine are assumed."""
        chosen = kernels_for(
            self.config.policy,
            has_gpu=self.machine is None or self.on_gpu,
            is_installed=not self.lacks("transformer_engine"),
            is_latent=self.arch.latent is not None,
        )
        return chosen == "transformer_engine"

    @property
    def on_gpu(self) -> bool:
        """Whether the run is known to use a GPU."""
        return self.machine is not None and self.machine.capability is not None

    def lacks(self, package: str) -> bool:
        """Whether the machine is known to have no GPU or not this package."""
        if self.machine is None:
            return False
        return self.machine.capability is None or package not in self.machine.packages


@dataclass(frozen=True, slots=True)
class CompatibilityRule:
    """A combination of features and its action. The rule applies to a run of a model in `families`
    if `when` returns True or a non-empty text, which is added to the message as detail."""

    name: str
    keys: tuple[str, ...]
    """The features, as config keys. `machine` and `model` stand for the machine and the model."""
    action: Action
    when: Callable[[RunFacts], bool | str]
    why: str
    way_out: str
    example: tuple[str, ...]
    """Overrides of a small config to which the rule applies. Tests use them."""
    families: tuple[str, ...] = ALL
    example_machine: Machine | None = None


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A rule that applies."""

    rule: CompatibilityRule
    detail: str

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        action = "" if self.rule.action is Action.REFUSED else f"{self.rule.action}: "
        way_out = f"; {self.rule.way_out}" if self.rule.way_out else ""
        keys = ", ".join(key for key in self.rule.keys if "." in key)
        return f"{keys}: {action}{self.rule.why}{detail}{way_out}"
