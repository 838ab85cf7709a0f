"""Evaluation through the same engines and graders: avg@k, pass@k and cons@k of each set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dapo_megatron.algo.evaluation import (
    avg_per_problem,
    bootstrap_interval,
    cons_per_problem,
    pass_at_k,
    pass_per_problem,
)
from dapo_megatron.config import EvaluationConfig
from dapo_megatron.rollout.dispatch import Dispatcher, OpenGroup, Sampling
from dapo_megatron.rollout.driver import Driver
from dapo_megatron.types import Group, Prompt, Stopped


@dataclass(frozen=True)
class Evaluator:
    """Held-out problems by set name. The same on every rank."""

    config: EvaluationConfig
    sets: Mapping[str, Sequence[Prompt]]
    driver: Driver
    max_tokens: int
    """Generation limit where `evaluation.max_response_tokens` is null: that of rollouts."""
    seed: int

    def run(self) -> dict[str, float]:
        """`eval/<set>/avg@k` and the like. The same random numbers at every call, so that two
        evaluations differ by the weights alone."""
        metrics: dict[str, float] = {}
        for name, prompts in self.sets.items():
            sampling = Sampling(
                num_samples=self.config.samples,
                max_tokens=self.config.max_response_tokens or self.max_tokens,
                temperature=self.config.temperature,
                top_p=self.config.top_p,
                seed_name=f"{self.seed}/evaluate/{name}",
            )
            groups = sample_all(self.driver, list(enumerate(prompts)), sampling)
            figures = evaluation_figures(groups, resamples=self.config.resamples, seed=self.seed)
            metrics |= {f"eval/{name}/{figure}": value for figure, value in figures.items()}
        return metrics

    def due(self, step: int, last: int) -> bool:
        """Whether to evaluate after rollout step `step`."""
        if not self.sets:
            return False
        return step in (0, last) or (self.config.every > 0 and step % self.config.every == 0)


def sample_all(
    driver: Driver,
    tickets: Sequence[tuple[int, Prompt]],
    sampling: Sampling,
    on_progress: Callable[[int], None] = lambda num_groups: None,
) -> list[Group]:
    """Sample and grade all of `tickets`. Every rank gets the groups, in their order.

    The grade of a completion that could not be graded is None. `on_progress` gets the number of
    groups that are done. Raises Stopped, with the engines stopped, if a rank was asked to stop.
    """
    dispatcher = Dispatcher(driver, sampling)
    groups = [OpenGroup(ticket, prompt, sampling.num_samples) for ticket, prompt in tickets]
    for group in groups:
        dispatcher.submit(group)
    by_ticket = {group.ticket: group for group in groups}
    num_decided = 0
    while num_decided < len(groups):
        events = dispatcher.advance()
        if events.stop:
            dispatcher.interrupt()
            raise Stopped(f"stopped by {events.stop}")
        for ticket, completion in events.sampled:
            by_ticket[ticket].completions[completion.sample] = completion
        for ticket, sample, grade, _ in events.graded:
            by_ticket[ticket].set_grade(sample, grade)
            num_decided += by_ticket[ticket].is_decided
        on_progress(num_decided)
    return [group.group() for group in groups]


def evaluation_figures(groups: Sequence[Group], *, resamples: int, seed: int) -> dict[str, float]:
    """avg@k, pass@k and cons@k of k samples per problem, each followed by its 95% interval
    (`avg@k_low`, `avg@k_high`; none if `resamples` is 0); pass@j for the powers of two below k;
    `ungraded`, the completions whose grader hung, died or raised: they count as wrong.

    Raises ValueError if there is no problem.
    """
    correct = [[c.grade is not None and c.grade.correct for c in g.completions] for g in groups]
    preds = [["" if c.grade is None else c.grade.pred for c in g.completions] for g in groups]
    k = len(correct[0]) if correct else 0
    per_problem = {
        f"avg@{k}": avg_per_problem(correct),
        f"pass@{k}": pass_per_problem(correct),
        f"cons@{k}": cons_per_problem(correct, preds),
    }
    figures: dict[str, float] = {}
    for name, values in per_problem.items():
        figures[name] = sum(values) / len(values)
        if resamples:
            low, high = bootstrap_interval(values, resamples=resamples, seed=seed)
            figures |= {f"{name}_low": low, f"{name}_high": high}
    for fewer in (2**power for power in range(k.bit_length()) if 2**power < k):
        figures[f"pass@{fewer}"] = pass_at_k(correct, k=fewer)
    figures["ungraded"] = float(sum(c.grade is None for g in groups for c in g.completions))
    return figures
