"""Process groups of vLLM over ranks that are not consecutive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from dapo_megatron.model import Groups


@contextmanager
def vllm_groups(groups: Groups) -> Iterator[None]:
    """Make the engines that are constructed inside this context consist of the ranks in `groups`.

    vLLM computes the members of its groups (tensor-, data-, expert-parallel and others) as if the
    ranks of an engine were consecutive. Here they are renumbered before a group is created. Only
    the group of all ranks is left as it is.
    """
    from vllm.distributed import parallel_state

    original = parallel_state.init_model_parallel_group
    order = list(chain(*groups))

    def create(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        renumbered = [[order[rank] for rank in ranks] for ranks in group_ranks]
        return original(renumbered, *args, **kwargs)

    parallel_state.init_model_parallel_group = create
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original
