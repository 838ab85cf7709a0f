"""Policies that collect the mixed groups of a step, on the same virtual engines and answers.

Three use the real coordinator (carrying, on-policy, and sampling while the policy trains). The
others are small simulations of what other systems do: whole batches until enough groups are mixed,
and a fixed over-sampling that trains on the groups that finish first and drops the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import numpy as np
from rollout_workload import Workload
from virtual_engines import EngineModel, VirtualDriver

from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.engine.messages import GroupRequest
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.types import Outcome, Prompt

FAR = 10_000_000
"""A ticket that no run reaches. Groups from here on are an independent sample."""

FILTERED = (Outcome.ALL_CORRECT, Outcome.ALL_WRONG)
TURN_SECONDS = 0.0003
"""Measured seconds of a turn (tools/bench/data_plane.py)."""


@dataclass(frozen=True)
class Setting:
    """A cluster and a run on it."""

    replicas: int = 32
    engine: EngineModel = field(default_factory=lambda: EngineModel(turn_seconds=TURN_SECONDS))
    report_seconds: float = 0.5
    """Interval at which leaders report. That of 32 leaders is 0.13 s, but this is faster to
    simulate."""
    overhead_seconds: float = 0.1
    """Seconds of each step in which ranks agree on it, whatever its size."""
    overhead_per_token: float = 4e-8
    """Seconds of each step per token that it trains on: interrupt, plan, exchange, assembly, and
    the start of recording, as tools/bench/data_plane.py measures them."""
    training_seconds: float = 60.0
    """Seconds of training per step. Only `asynchronous` generates meanwhile."""
    prompts_per_step: int = 512
    samples: int = 16
    max_tokens: int = 20_480
    prompt_tokens: int = 200
    steps: int = 50
    warmup: int = 10
    """First steps that do not count for ages and lengths, because nothing is carried yet."""
    batch_prompts: int = 1_536
    """Prompts per batch of `whole_batches` and `first_finished`."""
    lookahead: float = RolloutConfig.model_fields["lookahead"].default
    max_overtake: int = RolloutConfig.model_fields["max_overtake"].default
    max_age: int = RolloutConfig.model_fields["max_age"].default
    max_staleness: int | None = None


@dataclass
class Log:
    """Record of what a policy did."""

    step_seconds: list[float] = field(default_factory=list)
    generation_seconds: float = 0.0
    trained: list[list[int]] = field(default_factory=list)
    """Tickets of each step."""
    ages: list[list[int]] = field(default_factory=list)
    """Ages of the groups of each step: the trained version minus that of the oldest token."""
    filtered: list[int] = field(default_factory=list)
    """Tickets whose groups were all correct or all wrong."""
    num_issued: int = 0
    carried: set[int] = field(default_factory=set)
    """Tickets still open at the end."""


Policy = Callable[[Setting, Workload, VirtualDriver], Log]


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
    length_distance: float
    """Kolmogorov-Smirnov distance between the mean lengths of trained and of mixed groups."""
    length_p: float
    """Probability of at least that distance if both have the same distribution."""


def run(policy: Policy, setting: Setting, workload: Workload) -> Figures:
    """Run a policy and return its figures."""

    def outcome(ticket: int, sample: int) -> tuple[int, bool]:
        answers = workload.group(ticket)
        return answers.lengths[sample], answers.correct[sample]

    driver = VirtualDriver(setting.engine, setting.replicas, outcome, setting.report_seconds)
    return figures(policy(setting, workload, driver), setting, workload, driver)


def figures(log: Log, setting: Setting, workload: Workload, driver: VirtualDriver) -> Figures:
    """Compute the figures of a log."""
    trained = {ticket for step in log.trained for ticket in step}
    qualified = {t for t in range(log.num_issued) if workload.group(t).is_mixed}
    used = trained | set(log.filtered) | log.carried
    wasted = sum(tokens for t, tokens in driver.tokens_of.items() if t not in used)
    steady = [workload.group(t).mean_length for step in log.trained[setting.warmup :] for t in step]
    independent = mixed_lengths(workload, 2 * len(steady))
    distance, p = kolmogorov_smirnov(steady, independent)
    ages = [age for step in log.ages[setting.warmup :] for age in step]
    capacity = setting.engine.capacity * setting.replicas
    return Figures(
        seconds_per_step=fmean(log.step_seconds),
        steady_seconds=fmean(log.step_seconds[setting.warmup :]),
        busy=driver.num_generated / (capacity * log.generation_seconds),
        age_mean=fmean(ages),
        age_max=max(ages),
        prompts_per_step=log.num_issued / setting.steps,
        lost_groups=len(qualified - trained - log.carried),
        wasted_tokens=wasted / driver.num_generated,
        length_ratio=fmean(steady) / fmean(independent),
        length_distance=distance,
        length_p=p,
    )


def mixed_lengths(workload: Workload, num: int) -> list[float]:
    """Return the mean lengths of `num` mixed groups that no policy has drawn."""
    lengths: list[float] = []
    ticket = FAR
    while len(lengths) < num:
        group = workload.group(ticket)
        if group.is_mixed:
            lengths.append(group.mean_length)
        ticket += 1
    return lengths


def kolmogorov_smirnov(first: Iterable[float], second: Iterable[float]) -> tuple[float, float]:
    """Return the distance and p-value of the two-sample Kolmogorov-Smirnov test.

    The p-value is asymptotic, with Stephens' correction.
    """
    left, right = np.sort(list(first)), np.sort(list(second))
    union = np.concatenate([left, right])
    cdfs = [np.searchsorted(values, union, side="right") / values.size for values in (left, right)]
    distance = float(np.abs(cdfs[0] - cdfs[1]).max())
    size = np.sqrt(left.size * right.size / union.size)
    scaled = (size + 0.12 + 0.11 / size) * distance
    if scaled < 0.2:  # here the series converges slowly, and the result is 1
        return distance, 1.0
    terms = np.arange(1, 101)
    series = 2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * terms**2 * scaled**2))
    return distance, float(min(max(series, 0.0), 1.0))


# ---------------------------------------------------------------------------- other systems


def whole_batches(setting: Setting, workload: Workload, driver: VirtualDriver) -> Log:
    """Issue batches of prompts and wait for each, until N groups are mixed. Drop the surplus."""
    return _in_batches(setting, workload, driver, stops_early=False)


def first_finished(setting: Setting, workload: Workload, driver: VirtualDriver) -> Log:
    """Issue a batch of prompts, train on the first N mixed groups to finish, and drop the rest.

    If a batch has too few mixed groups, another one is issued.
    """
    return _in_batches(setting, workload, driver, stops_early=True)


def _in_batches(
    setting: Setting, workload: Workload, driver: VirtualDriver, *, stops_early: bool
) -> Log:
    log, wanted = Log(), setting.prompts_per_step
    for _ in range(setting.steps):
        started = driver.clock
        mixed: list[int] = []
        while len(mixed) < wanted:
            batch = range(log.num_issued, log.num_issued + setting.batch_prompts)
            log.num_issued += len(batch)
            for ticket in _groups_in_finish_order(setting, driver, batch):
                (mixed if workload.group(ticket).is_mixed else log.filtered).append(ticket)
                if stops_early and len(mixed) == wanted:
                    break
        driver.interrupt()
        train = sorted(mixed)[:wanted]
        tokens = sum(sum(workload.group(ticket).lengths) for ticket in train)
        _close(log, setting, driver, started, train, [0] * len(train), tokens)
    return log


def _groups_in_finish_order(setting: Setting, driver: VirtualDriver, batch: range) -> Iterator[int]:
    driver.max_tokens = setting.max_tokens
    requests: list[list[GroupRequest]] = [[] for _ in range(setting.replicas)]
    samples = tuple((sample, None) for sample in range(setting.samples))
    for ticket in batch:
        request = GroupRequest(ticket, _prompt(setting.prompt_tokens), samples)
        requests[ticket % setting.replicas].append(request)
    missing = dict.fromkeys(batch, setting.samples)
    while missing:
        reports = driver.advance(requests)
        requests = [[] for _ in range(setting.replicas)]
        for ticket, *_ in (item for _, report in reports for item in report.returned):
            missing[ticket] -= 1
            if not missing[ticket]:
                del missing[ticket]
                yield ticket


# ---------------------------------------------------------------------------- this project


def coordinated(
    setting: Setting,
    workload: Workload,
    driver: VirtualDriver,
    *,
    on_policy: bool = False,
    ahead: bool = False,
) -> Log:
    """Collect with the real coordinator. `ahead`: engines sample on while the policy trains."""
    coordinator = Coordinator(
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
        stream=PromptStream([_prompt(setting.prompt_tokens)] * 1024, seed=0, shuffle=False),
        driver=driver,
        seed=0,
    )
    log = Log()
    for step in range(setting.steps):
        driver.version = step
        started = driver.clock
        collected = coordinator.collect(version=step, on_progress=lambda done: None)
        ages = [
            step - min(completion.oldest_version for completion in group.completions)
            for group in collected.train
        ]
        log.filtered += [group.ticket for group, fate in collected.ended if fate in FILTERED]
        train = [group.ticket for group in collected.train]
        tokens = sum(c.num_tokens for group in collected.train for c in group.completions)
        _close(log, setting, driver, started, train, ages, tokens, coordinator if ahead else None)
    # Those of the last training are not collected yet.
    log.filtered += [group.ticket for group, fate in coordinator._ended if fate in FILTERED]
    log.num_issued = coordinator.ledger.next_ticket
    log.carried = set(coordinator.ledger.open)
    return log


def _prompt(num_tokens: int) -> Prompt:
    return Prompt("simulated", 0, tuple(range(num_tokens)), "", "")


def _close(
    log: Log,
    setting: Setting,
    driver: VirtualDriver,
    started: float,
    train: list[int],
    ages: list[int],
    tokens: int,
    ahead: Coordinator | None = None,
) -> None:
    """End a step. During its training, the coordinator `ahead` keeps the engines busy."""
    log.trained.append(train)
    log.ages.append(ages)
    driver.sleep(setting.overhead_seconds + setting.overhead_per_token * tokens)
    if ahead is None:
        log.generation_seconds += driver.clock - started
        driver.sleep(setting.training_seconds)
    else:
        with driver.until(driver.clock + setting.training_seconds) as is_over:
            ahead.sample_ahead(driver.version, is_over)
        log.generation_seconds += driver.clock - started
    log.step_seconds.append(driver.clock - started)


WHOLE_BATCHES = "whole batches until enough"
FIRST_FINISHED = "over-sampling, first finished"
CARRYING = "ours, carrying"
ON_POLICY = "ours, on-policy"
asynchronous: Policy = partial(coordinated, ahead=True)
on_policy: Policy = partial(coordinated, on_policy=True)
POLICIES: dict[str, Policy] = {
    WHOLE_BATCHES: whole_batches,
    FIRST_FINISHED: first_finished,
    CARRYING: coordinated,
    ON_POLICY: on_policy,
}
