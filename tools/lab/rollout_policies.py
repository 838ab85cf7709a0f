"""Policies that collect the mixed groups of a step, on the same virtual engines and answers.

Three use the real coordinator (carrying, on-policy, and sampling while the policy trains). The
others are small simulations of what other systems do: whole batches until enough groups are mixed,
and a fixed over-sampling that trains on the groups that finish first and drops the rest.

Shape letters: P prompts, G completions of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaln
from scipy.stats import ks_2samp, norm
from virtual_engines import Answers, EngineModel, VirtualDriver

from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.engine.messages import GroupRequest
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.types import Group, Outcome, Prompt

FAR = 10_000_000
"""A ticket that no run reaches. Groups from here on are an independent sample."""
BLOCK = 256
"""Number of tickets that are drawn together."""
FILTERED = (Outcome.ALL_CORRECT, Outcome.ALL_WRONG)


class Policy(StrEnum):
    """Rule by which a step's groups are collected."""

    WHOLE_BATCHES = "whole batches until enough"
    FIRST_FINISHED = "over-sampling, first finished"
    CARRYING = "ours, carrying"
    ON_POLICY = "ours, on-policy"
    ASYNCHRONOUS = "ours, asynchronous"


@dataclass(frozen=True)
class Setting:
    """A cluster and a run on it."""

    replicas: int = 32
    engine: EngineModel = field(default_factory=lambda: EngineModel(turn_seconds=0.0003))
    report_seconds: float = 0.5
    """Interval at which engines report. They are faster, but this is faster to simulate."""
    overhead_seconds: float = 0.5
    """Seconds of each step outside engines and training, whatever the step's size."""
    overhead_per_token: float = 5e-8
    """The same, per token that the step trains on (docs/results.md, rounded up)."""
    training_seconds: float = 60.0
    """Seconds of training per step. Only ASYNCHRONOUS generates meanwhile."""
    prompts_per_step: int = 512
    samples: int = 16
    max_tokens: int = 20_480
    prompt_tokens: int = 200
    steps: int = 50
    warmup: int = 10
    """First steps that do not count for ages and lengths, because nothing is carried yet."""
    batch_prompts: int = 1_536
    """Prompts per batch of WHOLE_BATCHES and FIRST_FINISHED."""
    lookahead: float = RolloutConfig.model_fields["lookahead"].default
    max_overtake: int = RolloutConfig.model_fields["max_overtake"].default
    max_age: int = RolloutConfig.model_fields["max_age"].default
    max_staleness: int | None = None


# ---------------------------------------------------------------------------- answers


@dataclass
class LogNormal:
    """Log-normal lengths with mean `mean` after the cut at `cap`, and Beta-distributed pass rates.

    The logarithm of a length has standard deviation `sigma`. A share `between` of its variance is
    between prompts, the rest between completions of a prompt. Pass rates of prompts are Beta(a, a),
    with the `a` at which a share `keep_rate` of the groups is mixed. A group depends on seed and
    ticket only, so every policy meets the same groups.

    Raises ValueError for a mean or keep rate that no parameters give.
    """

    mean: float
    keep_rate: float
    samples: int = 16
    cap: int = 20_480
    sigma: float = 1.0
    between: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._mu = location(self.mean, self.sigma, self.cap)
        self._a = concentration(self.keep_rate, self.samples)
        self._blocks: dict[int, list[Answers]] = {}

    def group(self, ticket: int) -> Answers:
        """Return the group of a ticket."""
        block, place = divmod(ticket, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        return self._blocks[block][place]

    def _draw(self, block: int) -> list[Answers]:
        rng = np.random.default_rng([self.seed, block])
        shape = (BLOCK, self.samples)
        normal_P1 = rng.standard_normal((BLOCK, 1))
        normal_PG = rng.standard_normal(shape)
        normal_PG = math.sqrt(self.between) * normal_P1 + math.sqrt(1 - self.between) * normal_PG
        lengths_PG = np.exp(self._mu + self.sigma * normal_PG).round().clip(1, self.cap).astype(int)
        correct_PG = rng.random(shape) < rng.beta(self._a, self._a, (BLOCK, 1))
        return [
            Answers(tuple(lengths), tuple(correct))
            for lengths, correct in zip(lengths_PG.tolist(), correct_PG.tolist())
        ]


def location(mean: float, sigma: float, cap: int) -> float:
    """Return the mu of a log-normal x for which min(x, cap) has this mean."""
    if not 1 < mean < cap:
        raise ValueError(f"mean length {mean:g}: must be between 1 and the cap, {cap}")
    top = math.log(cap)

    def excess(mu: float) -> float:
        below = math.exp(mu + sigma**2 / 2) * norm.cdf((top - mu - sigma**2) / sigma)
        return float(below + cap * norm.sf((top - mu) / sigma) - mean)

    return float(brentq(excess, -10.0, 2 * top))


def concentration(keep_rate: float, samples: int) -> float:
    """Return the a at which a share `keep_rate` of groups is mixed.

    With pass rates from Beta(a, a), a group of G = `samples` completions is mixed with probability
    1 - 2 B(a, a + G) / B(a, a).
    """
    highest = 1 - 2.0 ** (1 - samples)  # all pass rates are 1/2
    if not 0 < keep_rate < highest:
        raise ValueError(f"keep rate {keep_rate:g}: must be between 0 and {highest:g}")

    def excess(log_a: float) -> float:
        a = math.exp(log_a)
        return float(1 - 2 * math.exp(betaln(a, a + samples) - betaln(a, a)) - keep_rate)

    return math.exp(brentq(excess, -20.0, 15.0))


# ---------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figures:
    """Results of a policy."""

    seconds_per_step: float
    steady_seconds: float
    """Seconds per step after the warmup."""
    busy: float
    """Generated tokens over the most that all engines can generate in the rollout seconds."""
    age_mean: float
    age_max: int
    prompts_per_step: float
    lost_groups: int
    """Issued groups that are mixed, or would be when finished, and are neither trained nor kept."""
    wasted_tokens: float
    """Share of generated tokens in groups that are neither trained, nor filtered, nor kept."""
    length_ratio: float
    """Mean length of trained groups over that of all mixed groups."""
    length_p: float
    """p of a Kolmogorov-Smirnov test that trained and mixed groups have the same mean lengths."""


def mixed_lengths(workload: LogNormal, num: int) -> list[float]:
    """Return the mean lengths of `num` mixed groups that no policy has drawn."""
    lengths: list[float] = []
    ticket = FAR
    while len(lengths) < num:
        group = workload.group(ticket)
        if group.is_mixed:
            lengths.append(group.mean_length)
        ticket += 1
    return lengths


# ---------------------------------------------------------------------------- runs


def run(policy: Policy, setting: Setting, workload: LogNormal) -> Figures:
    """Run a policy and return its figures."""
    match policy:
        case Policy.WHOLE_BATCHES | Policy.FIRST_FINISHED:
            simulation: Simulation = InBatches(policy, setting, workload)
        case _:
            simulation = Coordinated(policy, setting, workload)
    for step in range(setting.steps):
        simulation.run_step(step)
    simulation.finish()
    return simulation.figures()


class Simulation:
    """A run on virtual engines, and the record of what its policy did."""

    def __init__(self, policy: Policy, setting: Setting, workload: LogNormal) -> None:
        self.policy, self.setting, self.workload = policy, setting, workload
        self.driver = VirtualDriver(
            setting.engine, setting.replicas, workload, setting.report_seconds
        )
        self.prompt = Prompt("simulated", 0, tuple(range(setting.prompt_tokens)), "", "")
        self.num_issued = 0
        self.filtered: set[int] = set()
        """Tickets whose groups were all correct or all wrong."""
        self.carried: set[int] = set()
        """Tickets still open at the end."""
        self._trained: list[list[int]] = []
        self._ages: list[list[int]] = []
        self._step_seconds: list[float] = []
        self._generation_seconds = 0.0

    def run_step(self, step: int) -> None:
        """Collect the groups of a step and train on them."""
        raise NotImplementedError

    def finish(self) -> None:
        """Record what is still open after the last step."""

    def train(self, started: float, tickets: list[int], ages: list[int], num_tokens: int) -> None:
        """Train on the groups of these tickets. The step began at `started`."""
        setting, driver = self.setting, self.driver
        self._trained.append(tickets)
        self._ages.append(ages)
        driver.sleep(setting.overhead_seconds + setting.overhead_per_token * num_tokens)
        if self.policy is not Policy.ASYNCHRONOUS:
            self._generation_seconds += driver.clock - started
        self.while_training()
        if self.policy is Policy.ASYNCHRONOUS:
            self._generation_seconds += driver.clock - started
        self._step_seconds.append(driver.clock - started)

    def while_training(self) -> None:
        """Let the training time pass."""
        self.driver.sleep(self.setting.training_seconds)

    def figures(self) -> Figures:
        """Compute the figures of the run."""
        setting, workload = self.setting, self.workload
        trained = {ticket for step in self._trained for ticket in step}
        mixed = {t for t in range(self.num_issued) if workload.group(t).is_mixed}
        tokens_of, used = self.driver.tokens_of, trained | self.filtered | self.carried
        generated = tokens_of.total()
        wasted = sum(tokens for ticket, tokens in tokens_of.items() if ticket not in used)
        steady = [workload.group(t).mean_length for s in self._trained[setting.warmup :] for t in s]
        independent = mixed_lengths(workload, 2 * len(steady))
        ages = [age for step in self._ages[setting.warmup :] for age in step]
        capacity = setting.engine.capacity * setting.replicas
        return Figures(
            seconds_per_step=fmean(self._step_seconds),
            steady_seconds=fmean(self._step_seconds[setting.warmup :]),
            busy=generated / (capacity * self._generation_seconds),
            age_mean=fmean(ages),
            age_max=max(ages),
            prompts_per_step=self.num_issued / setting.steps,
            lost_groups=len(mixed - trained - self.carried),
            wasted_tokens=wasted / generated,
            length_ratio=fmean(steady) / fmean(independent),
            length_p=float(ks_2samp(steady, independent, method="asymp").pvalue),
        )


class InBatches(Simulation):
    """Other systems. Issue batches of prompts until enough groups are mixed, and drop the surplus.

    WHOLE_BATCHES waits for each batch. FIRST_FINISHED trains on the groups that finish first.
    """

    def run_step(self, step: int) -> None:
        """Collect the groups of a step and train on them."""
        started, wanted = self.driver.clock, self.setting.prompts_per_step
        stops_early = self.policy is Policy.FIRST_FINISHED
        mixed: list[int] = []
        while len(mixed) < wanted:
            batch = range(self.num_issued, self.num_issued + self.setting.batch_prompts)
            self.num_issued += len(batch)
            for ticket in self._in_finish_order(batch):
                if self.workload.group(ticket).is_mixed:
                    mixed.append(ticket)
                else:
                    self.filtered.add(ticket)
                if stops_early and len(mixed) == wanted:
                    break
        self.driver.interrupt()
        tickets = sorted(mixed)[:wanted]
        num_tokens = sum(sum(self.workload.group(ticket).lengths) for ticket in tickets)
        self.train(started, tickets, [0] * wanted, num_tokens)

    def _in_finish_order(self, batch: range) -> Iterator[int]:
        setting = self.setting
        self.driver.max_tokens = setting.max_tokens
        requests: list[list[GroupRequest]] = [[] for _ in range(setting.replicas)]
        samples = tuple((sample, None) for sample in range(setting.samples))
        for ticket in batch:
            request = GroupRequest(ticket, self.prompt, samples)
            requests[ticket % setting.replicas].append(request)
        missing = dict.fromkeys(batch, setting.samples)
        while missing:
            reports = self.driver.advance(requests)
            requests = [[] for _ in range(setting.replicas)]
            for ticket, *_ in (item for _, report in reports for item in report.returned):
                missing[ticket] -= 1
                if not missing[ticket]:
                    del missing[ticket]
                    yield ticket


class Coordinated(Simulation):
    """This project. The real coordinator decides what to issue, to wait for and to keep."""

    def __init__(self, policy: Policy, setting: Setting, workload: LogNormal) -> None:
        super().__init__(policy, setting, workload)
        on_policy = policy is Policy.ON_POLICY
        self._coordinator = Coordinator(
            config=RolloutConfig(
                prompts_per_step=setting.prompts_per_step,
                samples_per_prompt=setting.samples,
                temperature=1.0,
                top_p=1.0,
                max_prompt_tokens=setting.prompt_tokens,
                max_response_tokens=setting.max_tokens,
                on_policy=on_policy,
                dynamic_sampling=True,
                lookahead=setting.lookahead,
                max_overtake=setting.max_overtake,
                max_age=setting.max_age,
                max_staleness=None if on_policy else setting.max_staleness,
            ),
            overlong=OverlongConfig(
                max_tokens=setting.max_tokens,
                buffer_tokens=setting.max_tokens // 5,
                penalty=True,
                filter=False,
                filtered_in_mean=False,
            ),
            stream=PromptStream([self.prompt] * 1024, seed=0, shuffle=False),
            driver=self.driver,
            seed=0,
        )

    def run_step(self, step: int) -> None:
        """Collect the groups of a step and train on them."""
        self.driver.version = step
        started = self.driver.clock
        collected = self._coordinator.collect(version=step, on_progress=lambda num_ready: None)
        self._note_filtered(collected.ended)
        ages = [
            step - min(completion.oldest_version for completion in group.completions)
            for group in collected.train
        ]
        num_tokens = sum(c.num_tokens for group in collected.train for c in group.completions)
        self.train(started, [group.ticket for group in collected.train], ages, num_tokens)

    def while_training(self) -> None:
        """Let the training time pass. Asynchronous engines sample meanwhile."""
        if self.policy is not Policy.ASYNCHRONOUS:
            super().while_training()
            return
        with self.driver.until(self.driver.clock + self.setting.training_seconds) as is_over:
            self._coordinator.sample_ahead(self.driver.version, is_over)

    def finish(self) -> None:
        """Record what is still open after the last step."""
        self._note_filtered(self._coordinator._ended)
        self.num_issued = self._coordinator.ledger.next_ticket
        self.carried = set(self._coordinator.ledger.open)

    def _note_filtered(self, ended: list[tuple[Group, Outcome]]) -> None:
        self.filtered |= {group.ticket for group, fate in ended if fate in FILTERED}
