"""Layouts of Megatron folders from the options of tools/convert_checkpoint.py."""

from __future__ import annotations

import re
from math import log2

from dapo_megatron.checkpoints.formats.megatron import MegatronLayout
from dapo_megatron.config import PolicyConfig, refuse
from dapo_megatron.model import Architecture
from dapo_megatron.plan.layout import policy_problems, stage_layers

MAX_SIZE = 64
"""Largest parallel size that is proposed."""


def make_layout(
    arch: Architecture, sizes: tuple[int, int, int], ends: tuple[int | None, int | None]
) -> MegatronLayout:
    """Return the layout of the options: tensor x pipeline x expert parallel.

    Accepts exactly the layouts that training accepts. Raises ConfigError, which names every option
    that does not fit and the nearest values that do.
    """
    tensor, pipeline, expert = sizes
    problems = []
    for option, size, ends_of_option in (
        ("--tensor-parallel", tensor, (None, None)),
        ("--pipeline-parallel", pipeline, ends),
        ("--expert-parallel", expert, (None, None)),
    ):
        if misfits := option_problems(arch, option, size, ends_of_option):
            fitting = [
                n
                for n in range(1, MAX_SIZE + 1)
                if not option_problems(arch, option, n, ends_of_option)
            ]
            nearest = sorted(fitting, key=lambda n: (abs(log2(n / size)), n))[:3]
            options = [f"{option} {n}" for n in sorted(nearest)]
            if option == "--pipeline-parallel":
                options = [*uneven_stages(arch, pipeline), *options]
            problems += [*misfits, f"  that fit: {', '.join(options) or 'none'}"]
    refuse(problems)
    policy = policy_of("--pipeline-parallel", pipeline, ends)
    stages = stage_layers(policy, arch.num_layers)
    return MegatronLayout(tensor, tuple(len(layers) for [layers] in stages), expert)


def option_problems(
    arch: Architecture, option: str, size: int, ends: tuple[int | None, int | None]
) -> list[str]:
    """Return the problems of one option of a layout, with all other sizes 1."""
    policy = policy_of(option, size, ends)
    keys = r"(?:policy\.)?(tensor|pipeline|expert)_parallel|(?:policy\.)?(first|last)_stage_layers"
    return [
        re.sub(keys, as_option, text).replace("use null", "leave it out")
        for text in policy_problems(policy, size, arch)
    ]


def as_option(match: re.Match[str]) -> str:
    """Convert a key of the config to an option of this program."""
    return "--" + match.group().removeprefix("policy.").replace("_", "-")


def policy_of(option: str, size: int, ends: tuple[int | None, int | None]) -> PolicyConfig:
    """Return a policy that is parallel along one axis only."""
    key = option.removeprefix("--").replace("-", "_")
    return PolicyConfig(precision="float32").model_copy(
        update={
            key: size,
            "sequence_parallel": key == "tensor_parallel" and size > 1,
            "first_stage_layers": ends[0],
            "last_stage_layers": ends[1],
        }
    )


def uneven_stages(arch: Architecture, pipeline: int) -> list[str]:
    """Propose a first stage of another size, as near to the other stages as possible.

    The list holds one proposal, or none if no first stage fits.
    """
    layers = arch.num_layers
    for first in sorted(range(1, layers), key=lambda n: (abs(n - layers / pipeline), -n)):
        if not option_problems(arch, "--pipeline-parallel", pipeline, (first, None)):
            rest = (layers - first) // (pipeline - 1)
            return [
                f"--pipeline-parallel {pipeline} --first-stage-layers {first} "
                f"({first} layers, then {rest} each)"
            ]
    return []
