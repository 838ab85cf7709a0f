"""Evaluation through the same engines and graders: avg@k, pass@k and cons@k of each set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapo_megatron.algo.evaluation import avg_at_k, cons_at_k, pass_at_k
from dapo_megatron.config import EvaluationConfig
from dapo_megatron.rollout.driver import RolloutDriver, Sampling
from dapo_megatron.types import Group, Prompt


@dataclass(frozen=True)
class Evaluator:
    """Held-out problems by set name. The same on every rank."""

    config: EvaluationConfig
    sets: Mapping[str, Sequence[Prompt]]
    driver: RolloutDriver
    max_tokens: int
    seed: int

    def run(self) -> dict[str, float]:
        """`eval/<set>/avg@k` and the like. The same random numbers at every call, so that two
        evaluations differ by the weights alone. A completion that could not be graded is wrong."""
        metrics: dict[str, float] = {}
        for name, prompts in self.sets.items():
            sampling = Sampling(
                num_samples=self.config.samples,
                max_tokens=self.max_tokens,
                temperature=self.config.temperature,
                top_p=self.config.top_p,
                seed_name=f"{self.seed}/evaluate/{name}",
            )
            metrics |= _figures(name, self.driver.run(list(enumerate(prompts)), sampling))
        return metrics

    def due(self, step: int, last: int) -> bool:
        """Whether to evaluate after rollout step `step`."""
        if not self.sets:
            return False
        return step in (0, last) or (self.config.every > 0 and step % self.config.every == 0)


def _figures(name: str, groups: Sequence[Group]) -> dict[str, float]:
    correct = [[c.grade is not None and c.grade.correct for c in g.completions] for g in groups]
    preds = [["" if c.grade is None else c.grade.pred for c in g.completions] for g in groups]
    k = len(correct[0])
    return {
        f"eval/{name}/avg@{k}": avg_at_k(correct),
        f"eval/{name}/pass@{k}": pass_at_k(correct),
        f"eval/{name}/cons@{k}": cons_at_k(correct, preds),
    }
