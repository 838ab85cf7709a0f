"""Pipeline stages that know the shapes they receive.

Rows differ between micro-batches. Megatron-core 0.16.1 then sends every shape before its tensor,
and the host waits twice for the device. But every stage lays out the same micro-batches
(policy/step.py), and Megatron's schedules are fixed, so each stage knows the shapes in advance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

GROUPS = ["tp", "pp", "cp", "embd", "pos_embd", "dp_cp"]
"""Process groups that Megatron's schedules require next to a communicator."""

Shape = tuple[int, int, int]


def communication(chunks: Sequence[Any], rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the arguments of Megatron's schedule for one pass over micro-batches of these rows
    (number, length on this rank); none without pipeline parallelism."""
    config = chunks[0].config
    if config.pipeline_model_parallel_size == 1:
        return {}
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    by_tokens = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [(length // by_tokens, number, config.hidden_size) for number, length in rows]
    return {
        "p2p_communicator": KnownShapes(groups.pp, config, shapes, num_chunks=len(chunks)),
        "pg_collection": groups,
    }


class KnownShapes(P2PCommunicator):
    """Megatron's communication between stages, for one pass over micro-batches of known shapes."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: ModelParallelConfig,
        shapes: Sequence[Shape],
        *,
        num_chunks: int,
    ) -> None:
        super().__init__(group, config)
        table = get_schedule_table(
            len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage
        )

        def received(is_leading: bool) -> Iterator[Shape]:
            # The leading stage (the first forward, the last backward) receives what the stage at
            # the other end sends. That one sends nothing of the last chunk that a micro-batch
            # passes through.
            for micro, turn in table:
                if not is_leading or turn < num_chunks - 1:
                    yield shapes[micro]

        self._forward = received(group.rank() == 0)
        self._backward = received(group.rank() == group.size() - 1)

    def _communicate_shapes(
        self, _send_next: Any, _send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next tensors from the previous and from the next stage."""
        return (
            next(self._forward) if recv_prev else None,
            next(self._backward) if recv_next else None,
        )
