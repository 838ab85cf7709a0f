"""Where a run would fit: layouts near the asked one that do in memory too, and how many nodes are
enough. Each is tried by planning it."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.config.rules import check_values
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.estimate import GPU_MARGIN, GPU_MEMORY_GIB, HOST_MEMORY_GIB, Plan, make_plan
from dapo_megatron.plan.layout import check_layout, policy_problems
from dapo_megatron.plan.layout_search import nearest
from dapo_megatron.types import ConfigError

MAX_NODES = 128
NUM_TRIED = 12
"""Layouts planned for a number of GPUs, the nearest ones that suit it. More take long where there
are many experts."""


@dataclass(frozen=True)
class Machines:
    """Nodes as they are bought."""

    gpus_per_node: int = 8
    gpu_memory_gib: float = GPU_MEMORY_GIB
    host_memory_gib: float = HOST_MEMORY_GIB

    def plan(self, config: Config, num_processes: int) -> Plan:
        """What `num_processes` ranks take of them."""
        return make_plan(
            config,
            num_processes,
            gpu_memory_gib=self.gpu_memory_gib,
            gpus_per_node=self.gpus_per_node,
            host_memory_gib=self.host_memory_gib,
        )


def check_layout_and_memory(config: Config, nodes: int, machines: Machines) -> None:
    """layout.check_layout of a rank per GPU, whose suggestions know nothing of memory; what does
    know is added where the policy's layout is at fault. Raises ConfigError."""
    arch = read_architecture(config)
    world = nodes * machines.gpus_per_node
    try:
        check_layout(config, arch, world)
    except ConfigError as error:
        if not any(policy_problems(config.policy, world, arch)):
            raise
        raise ConfigError("\n".join([str(error), *way_out(config, nodes, machines)])) from None


def way_out(config: Config, nodes: int, machines: Machines) -> list[str]:
    """In words: which layouts fit these nodes, memory included, or else how many nodes do. Empty
    where no layout is one that could be planned."""
    world = nodes * machines.gpus_per_node
    gpus = f"{world} GPUs of {machines.gpu_memory_gib:g} GiB"
    near, num_planned = fitting_layouts(config, world, machines)
    if near:
        return ["\n  ".join([f"memory included, these fit {gpus}:", *near])]
    enough = least_nodes(config, machines)
    if enough is None and not num_planned:
        return []
    told = (
        f"memory: the run does not fit {gpus} with {GPU_MARGIN:.0%} to spare, in this layout or in "
        "one near it (others above are chosen by their numbers alone)"
    )
    if enough is None:
        return [f"{told}; nor does it fit {MAX_NODES} nodes or fewer"]
    number, layout = enough
    nodes_of = f"{number} node{'s' if number > 1 else ''} of {machines.gpus_per_node}"
    how = f"with {layout}" if layout else "as it is configured"
    return [f"{told}; {nodes_of} would do, {how}"]


def least_nodes(config: Config, machines: Machines) -> tuple[int, str] | None:
    """The least power of two of nodes that a run fits, and the layout's overrides ("" for its own).
    None: not up to MAX_NODES."""
    number = 1
    while number <= MAX_NODES:
        near, _ = fitting_layouts(config, number * machines.gpus_per_node, machines, count=1)
        if near:
            return number, near[0]
        number *= 2
    return None


def fitting_layouts(
    config: Config, world: int, machines: Machines, *, count: int = 3
) -> tuple[list[str], int]:
    """Up to `count` layouts near the asked one that suit model, number of ranks and memory, nearest
    first, as overrides with only what changes; with room to spare on each GPU. And how many were
    planned to find them."""
    arch = read_architecture(config)
    num_tried = 0

    def fits(policy: PolicyConfig) -> bool:
        nonlocal num_tried
        if num_tried == NUM_TRIED or any(policy_problems(policy, world, arch)):
            return False
        changed = config.model_copy(update={"policy": policy})
        try:
            check_values(changed)
            check_layout(changed, arch, world)
            check_compatibility(changed, arch)
        except ConfigError:
            return False
        num_tried += 1
        plan = machines.plan(changed, world)
        return plan.fits() and not any(plan.gpu_warnings())

    near = nearest(config.policy, world, arch.num_layers, arch.num_experts, fits, count=count)
    return near, num_tried
