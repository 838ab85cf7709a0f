"""Run `doctor layouts` on a policy with a deliberate fault that occurs in practice.

`python -m tests.helpers.broken_doctor FAULT --ranks N doctor layouts CONFIG ...` starts the ranks,
patches the policy in each, and runs the command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dapo_megatron.cluster.launch import is_launched, launch


def none() -> None:
    """Leave the policy as it is."""


def times_data_parallel() -> None:
    """Multiply the loss by the data-parallel size, as if ranks took the mean and not the sum."""
    _scale_loss(lambda state, _: state.get_data_parallel_world_size())


def mean_of_means() -> None:
    """Divide each micro-batch by its own tokens, then by the number of micro-batches."""

    def factor(state: Any, call: Any) -> Callable[[int], float]:
        micro, num_tokens = call
        num_means = len(micro) * state.get_data_parallel_world_size()
        return lambda own_tokens: num_tokens / (max(own_tokens, 1) * num_means)

    _scale_loss(factor)


def double_context_parallel() -> None:
    """Multiply the loss by the context-parallel size."""
    _scale_loss(lambda state, _: state.get_context_parallel_world_size())


def balance_by_tokens() -> None:
    """Multiply the balance loss of experts by the tokens of its micro-batch."""
    from dapo_megatron.policy.moe import Router

    original = Router._balance_loss

    def broken(self: Any, probs_TE: Any, taken_TE: Any, sequences_T: Any) -> Any:
        return original(self, probs_TE, taken_TE, sequences_T) * (sequences_T >= 0).sum()

    Router._balance_loss = broken  # type: ignore[method-assign]


def norms_not_added() -> None:
    """Leave out the all-reduce of the norms' gradients over sequence-parallel ranks."""
    from dapo_megatron.policy.specs import RMSNorm

    original = RMSNorm.__init__

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.weight.sequence_parallel = False

    RMSNorm.__init__ = broken  # type: ignore[method-assign]


def sequence_sums_of_one_rank() -> None:
    """Sum over the tokens of a sequence that this context-parallel rank holds, not over all."""
    from dapo_megatron.policy import step

    step._SumOverContextRanks.apply = lambda sums: sums  # type: ignore[method-assign]


def sequence_gradients_of_one_rank() -> None:
    """Leave out the all-reduce in the backward pass of the sums over sequences."""
    from dapo_megatron.policy import step

    step._SumOverContextRanks.backward = lambda _, gradient: gradient  # type: ignore[method-assign]


FAULTS = {
    fault.__name__: fault
    for fault in (
        none,
        times_data_parallel,
        mean_of_means,
        double_context_parallel,
        balance_by_tokens,
        norms_not_added,
        sequence_sums_of_one_rank,
        sequence_gradients_of_one_rank,
    )
}


def _scale_loss(factor: Callable[[Any, Any], Any]) -> None:
    """Multiply the loss of each micro-batch by `factor(parallel_state, (micro-batches, loss tokens
    of the mini-batch))`, a number or a function of the micro-batch's own loss tokens."""
    from dapo_megatron.policy.step import Runner, parallel_state

    original = Runner.gradients

    def broken(self: Any, micro: Any, loss: Any, num_tokens: int) -> Any:
        scale = factor(parallel_state, (micro, num_tokens))

        def scaled(logp: Any, inputs: Any) -> Any:
            result = loss(logp, inputs)
            by = scale(int(inputs.mask.sum())) if callable(scale) else scale
            return replace(result, total=result.total * by)

        return original(self, micro, scaled, num_tokens)

    Runner.gradients = broken  # type: ignore[method-assign]


def main() -> None:
    """Start the ranks, or run the command in a rank."""
    fault, option, ranks, *command = sys.argv[1:]
    assert option == "--ranks"
    if not is_launched():
        rank_command = [sys.executable, "-m", "tests.helpers.broken_doctor", *sys.argv[1:]]
        raise SystemExit(launch(rank_command, int(ranks)))
    FAULTS[fault]()
    from dapo_megatron.__main__ import main as command_line

    sys.argv[1:] = command
    command_line()


if __name__ == "__main__":
    main()
