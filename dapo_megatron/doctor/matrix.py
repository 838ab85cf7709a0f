"""Cases of `doctor layouts`: layouts, splits into micro-batches, packed and padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.model import Architecture
from dapo_megatron.plan.layout import data_parallel, policy_problems
from dapo_megatron.protocols import MicrobatchPlanner
from dapo_megatron.run.models import planner

MAX_TOKENS = 400
"""Largest planned micro-batch. The mini-batch has 837 tokens, its longest sequence 300."""
AUX_LOSS = 0.01
"""Coefficient of the load-balancing loss if the config has none."""

ONE_PROCESS: dict[str, Any] = {
    "tensor_parallel": 1,
    "sequence_parallel": False,
    "pipeline_parallel": 1,
    "virtual_pipeline_parallel": None,
    "first_stage_layers": None,
    "last_stage_layers": None,
    "context_parallel": 1,
    "expert_parallel": 1,
    "recompute": "none",
}
DATA: dict[str, Any] = {}
TENSOR = {"tensor_parallel": 2}
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_parallel": 2}
UNEVEN = {"pipeline_parallel": 2, "first_stage_layers": 1}
UNEVEN_LAST = {"pipeline_parallel": 2, "last_stage_layers": 1}
INTERLEAVED = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
CONTEXT = {"context_parallel": 2}
EXPERT = {"expert_parallel": 2}
SELECTIVE = {"recompute": "selective"}
FULL = {"recompute": "full"}

LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, DATA),
    (2, DATA),
    (2, TENSOR),
    (2, SEQUENCE),
    (2, PIPELINE),
    (2, UNEVEN),
    (2, UNEVEN_LAST),
    (2, INTERLEAVED),
    (2, CONTEXT),
    (2, CONTEXT | SELECTIVE),
    (2, SEQUENCE | FULL),
    (2, EXPERT),
    (2, SEQUENCE | EXPERT),
    (4, TENSOR | PIPELINE),
    (4, TENSOR | CONTEXT),
    (4, SEQUENCE | CONTEXT),
    (4, SEQUENCE),
    (4, PIPELINE),
    (4, CONTEXT),
    (4, {"pipeline_parallel": 4}),
    (4, {"context_parallel": 4}),
    (4, {"expert_parallel": 4}),
    (4, PIPELINE | CONTEXT),
    (4, EXPERT),
    (4, PIPELINE | EXPERT),
    (4, CONTEXT | EXPERT),
    (4, SEQUENCE | PIPELINE | SELECTIVE),
    (4, SEQUENCE | INTERLEAVED | FULL),
)
"""(number of processes, changes to ONE_PROCESS). The remaining ranks are data parallel."""
WITHOUT_BALANCE = ((1, DATA), (2, DATA), (2, EXPERT), (4, EXPERT))
"""Layouts that are also tested without the load-balancing loss, if the model has experts."""


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One row of the table.

    `split` is "planned" (micro-batches as in a run), "skewed" (see `skewed_plan`) or "single" (one
    sequence per micro-batch, for the reference). `yours`: the layout is the config's own.
    """

    policy: PolicyConfig
    num_ranks: int
    split: str
    packed: bool
    yours: bool = False

    @property
    def layout(self) -> str:
        """Name of the layout: `TP2+SP x CP2`."""
        return layout_name(self.policy, self.num_ranks)

    @property
    def name(self) -> str:
        """Name of the case: `TP2+SP x CP2, skewed, packed`, `yours: TP2, planned, padded`."""
        yours, rows = "yours: " if self.yours else "", "packed" if self.packed else "padded"
        return f"{yours}{self.layout}, {self.split}, {rows}"

    def config(self, config: Config, model: str) -> Config:
        """Return `config` in this layout, for the model in the folder `model`."""
        return config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": model}),
                "policy": self.policy,
                "train": config.train.model_copy(
                    update={"packing": self.packed, "max_tokens_per_microbatch": MAX_TOKENS}
                ),
            }
        )

    def planner(self, config: Config) -> MicrobatchPlanner:
        """Return the planner that splits the mini-batch; `config` is from `self.config`."""
        if self.split == "planned":
            return planner(config.policy, config.train)
        return {"single": single_plan, "skewed": skewed_plan}[self.split]


def single_plan(lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Plan one sequence per micro-batch, all on one rank."""
    assert num_ranks == 1
    return [[[index] for index in range(len(lengths))]]


def skewed_plan(lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Return the split for which a mean of means would be most wrong: one micro-batch with only the
    shortest sequence, one with all others, and empty micro-batches on all other ranks."""
    shortest = min(range(len(lengths)), key=lambda index: lengths[index])
    rest = [index for index in range(len(lengths)) if index != shortest]
    return [[[shortest], rest]] + [[[], []] for _ in range(num_ranks - 1)]


def layout_name(policy: PolicyConfig, num_ranks: int) -> str:
    """Return the name of a layout, such as `TP2+SP x PP2 interleaved x2`. Experts over all
    data-parallel ranks are named EP only; experts over half of them, DP2 x EP."""
    data, expert = data_parallel(policy, num_ranks), policy.expert_parallel
    pipeline = f"PP{policy.pipeline_parallel}"
    if policy.virtual_pipeline_parallel:
        pipeline += f" interleaved x{policy.virtual_pipeline_parallel}"
    for end in ("first", "last"):
        layers = getattr(policy, f"{end}_stage_layers")
        pipeline += f" {end} {layers}" if layers else ""
    sizes = {
        f"DP{data // expert if data % expert == 0 else data}": data > 1 and data != expert,
        f"TP{policy.tensor_parallel}{'+SP' if policy.sequence_parallel else ''}": (
            policy.tensor_parallel > 1
        ),
        pipeline: policy.pipeline_parallel > 1,
        f"CP{policy.context_parallel}": policy.context_parallel > 1,
        f"EP{expert}": expert > 1,
    }
    name = " x ".join(axis for axis, is_used in sizes.items() if is_used) or "one process"
    name += f", {policy.recompute} recompute" if policy.recompute != "none" else ""
    return name + (", balance loss" if policy.moe_aux_loss else "")


def reference(case: LayoutCase, precision: str = "float64") -> LayoutCase:
    """Return the case with which `case` must agree: one process, one sequence per micro-batch, no
    packing. It shares as little code as possible with `case`."""
    changes = {**ONE_PROCESS, "precision": precision}
    return LayoutCase(case.policy.model_copy(update=changes), 1, "single", packed=False)


def matrix(config: Config, arch: Architecture, num_ranks: int, precision: str) -> list[LayoutCase]:
    """Return all cases for a model on up to `num_ranks` processes: first the config's own layout,
    then the others with an increasing number of ranks. Layouts that the model does not allow are
    left out."""
    base = config.policy.model_copy(update={"precision": precision, "kernels": "auto"})
    if precision != "bfloat16":  # Transformer Engine's attention supports only bfloat16
        base = base.model_copy(update={"kernels": "local", "fused_rope": False})
    fits = (n for n in range(num_ranks, 0, -1) if not any(policy_problems(config.policy, n, arch)))
    layouts = [(ranks, base, True) for ranks in islice(fits, 1)]
    balance = (base.moe_aux_loss or AUX_LOSS) if arch.num_experts else 0.0
    others = [(ranks, changes, balance) for ranks, changes in LAYOUTS]
    if balance:
        others += [(ranks, changes, 0.0) for ranks, changes in WITHOUT_BALANCE]
    for ranks, changes, moe_aux_loss in sorted(others, key=itemgetter(0)):
        update = {**ONE_PROCESS, **changes, "moe_aux_loss": moe_aux_loss}
        policy = base.model_copy(update=update)
        if ranks <= num_ranks and not any(policy_problems(policy, ranks, arch)):
            layouts.append((ranks, policy, False))
    return [
        LayoutCase(policy, ranks, split, packed, yours)
        for ranks, policy, yours in layouts
        for split in ("planned", "skewed")
        for packed in (True, False)
    ]


def smallest_world(policy: PolicyConfig, arch: Architecture) -> int:
    """Return the smallest number of processes that the layout can use. If no number fits, return
    the number of one model copy."""
    copy = policy.tensor_parallel * policy.pipeline_parallel * policy.context_parallel
    sizes = range(copy, copy * policy.expert_parallel + 1, copy)
    return next((size for size in sizes if not any(policy_problems(policy, size, arch))), copy)
