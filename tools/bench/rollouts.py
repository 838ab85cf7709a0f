"""Compare seconds per step, with real vLLM and Megatron-core: rounds of prompts or the coordinator.

    python tools/bench/rollouts.py                     # 2 processes, 2 engines, no GPU

The first form computes the size of a round from the keep rate and waits for the whole round, until
N groups are mixed. It keeps finished groups beyond N, and nothing else. Both forms take turns in
the same processes, with the same policy and engines: rollout, log-probs, updates, verified sync.

The model is the tiny one, with uneven lengths. Each completion stops at a log-normal length (mean
16, at most 144 tokens) that its ticket and sample decide, whatever its text. Half of the prompts
give mixed groups.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dapo_megatron.cluster.instruments import MemoryMeter, StepInstruments, TimelineRecorder
from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.engine import engine as engine_module
from dapo_megatron.engine.engine import VllmEngine
from dapo_megatron.loop import train_step
from dapo_megatron.protocols import DataParallel, Parts
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.driver import Driver
from dapo_megatron.rollout.evaluate import sample_all
from dapo_megatron.rollout.exchange import TokenExchange
from dapo_megatron.rollout.messages import Move, Sampling
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.rollout.replay import NoEvaluation
from dapo_megatron.run import build
from dapo_megatron.run.build import learning_rate
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.tracking.recorder import RankRecorder
from dapo_megatron.types import (
    Collected,
    Completion,
    Finish,
    Grade,
    Group,
    Outcome,
    Prompt,
    SampleRequest,
)

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 2
MAX_TOKENS, MEAN_TOKENS, SIGMA = 144, 16.0, 1.0
TARGET = 0.8
FORMS = ("whole rounds", "coordinator")
ROUNDS = 10_000_000
"""First ticket of the whole rounds. Both forms keep completions in the same stores; the n-th
tickets of both have the same lengths and grades."""


def rng_of(*names: object) -> random.Random:
    """Return a random generator that depends on `names` only."""
    seed = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(seed, "big"))


def num_tokens(ticket: int, sample: int) -> int:
    """Return the length of a completion, in tokens."""
    mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    length = rng_of(ticket % ROUNDS, sample, "length").lognormvariate(mu, SIGMA)
    return min(max(round(length), 1), MAX_TOKENS)


class UnevenEngine(VllmEngine):
    """Engine that samples `num_tokens` tokens and ignores the end-of-sequence token."""

    def _sampling(self, request: SampleRequest) -> Any:
        params = super()._sampling(
            replace(request, max_tokens=num_tokens(request.ticket, request.sample))
        )
        params.ignore_eos, params.stop_token_ids = True, []
        params._all_stop_token_ids = set()
        return params

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        """Return completions as ended by themselves, unless they are MAX_TOKENS long."""
        return [
            (request, completion)
            if completion.num_tokens == MAX_TOKENS
            else (request, replace(completion, finish=Finish.STOP))
            for request, completion in super().step()
        ]


class ScriptedGrading:
    """Grading pool that answers at once and makes half of the groups mixed."""

    last_errors: Mapping[str, str] = {}

    def __init__(self) -> None:
        self._answers: deque[tuple[Any, Grade, str]] = deque()

    @property
    def pending(self) -> int:
        return len(self._answers)

    def submit(self, key: Any, source: str, response: str, truth: str, extra: Any) -> None:
        _, ticket, sample = key
        is_correct = sample == 0 and rng_of(ticket % ROUNDS, "mixed").random() < 0.5
        self._answers.append((key, Grade(1.0 if is_correct else -1.0, is_correct, ""), "graded"))

    def collect(self, wait: bool) -> list[tuple[Any, Grade | None, str]]:
        answers = [*self._answers]
        self._answers.clear()
        return answers

    def close(self) -> None:
        """Do nothing: there are no processes."""


@dataclass
class WholeRounds:
    """Stands in for a coordinator: issues rounds of prompts and waits for each, until N groups are
    mixed."""

    config: Config
    stream: PromptStream
    driver: Driver
    keep_rate: float = 0.5
    next_ticket: int = ROUNDS
    carried: list[Group] = field(default_factory=list)

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Collected:
        rollout = self.config.rollout
        mixed, ended = self.carried, []
        sampling = Sampling(
            name="rounds",
            max_tokens=MAX_TOKENS,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            is_seeded=False,
            is_kept=True,
        )
        issued = 0
        while len(mixed) < rollout.prompts_per_step:
            number = math.ceil((rollout.prompts_per_step - len(mixed)) / self.keep_rate)
            tickets = range(self.next_ticket, self.next_ticket + number)
            self.next_ticket, issued = tickets.stop, issued + number
            prompts = list(zip(tickets, self.stream.take(number), strict=True))
            for group in sample_all(self.driver, prompts, sampling, rollout.samples_per_prompt):
                if any(c.grade is not None and c.grade.correct for c in group.completions):
                    mixed.append(group)
                else:
                    ended.append((group, Outcome.ALL_WRONG))
        train, self.carried = mixed[: rollout.prompts_per_step], mixed[rollout.prompts_per_step :]
        return Collected(
            train=train,
            ended=ended + [(group, Outcome.TRAINED) for group in train],
            decided=[],
            version=version,
            counts={"issued": issued},
            gradings=Counter(),
            keep_rate=self.keep_rate,
            interrupted=0,
            grade_seconds=0.0,
        )

    def rebalance(self) -> Sequence[Move]:
        """Move nothing: no completion is unfinished."""
        return []


@dataclass
class FormMetrics:
    """Means over the measured steps of one form."""

    step: float
    """Seconds."""
    generate: float
    """Seconds of the rollout."""
    prompts: float
    """Prompts issued."""
    response_tokens: float
    """Tokens trained on."""
    age: float
    """Mean age of the trained groups, in weight versions."""


def measure(config: Config, ranks: Ranks, steps: int, warmup: int) -> dict[str, FormMetrics]:
    """Measure both forms in turns. Collective."""
    engine_module.VllmEngine = UnevenEngine  # type: ignore[misc]  # what build takes
    build._grading_pool = lambda config: ScriptedGrading()  # type: ignore[assignment,return-value]
    with build.build_core(config, ranks) as core:
        return _measure(config, ranks, core, steps, warmup)


def _collectors(
    config: Config, ranks: Ranks, core: build.Core, data_parallel: DataParallel
) -> dict[str, EngineCollector]:
    """Return the collector of each form. They differ in the coordinator of rank 0."""
    prompts = [Prompt("uneven", n, tuple(range(3, 3 + 8 + n % 8)), "", "") for n in range(997)]

    def coordinator(form: str) -> Any:
        driver, stream = core.engines.driver, PromptStream(prompts, seed=0, shuffle=True)
        if driver is None:
            return None
        if form == FORMS[0]:
            return WholeRounds(config, stream, driver)
        return Coordinator(config.rollout, config.overlong, stream, driver, seed=0)

    return {
        form: EngineCollector(
            config=config,
            coordinator=coordinator(form),
            engines=core.engines,
            exchange_tokens=TokenExchange(
                ranks, data_parallel, core.leaders, core.store, build.route_size(config)
            ),
            data_parallel=data_parallel,
            recorder=RankRecorder(),
            replica=core.engine.replica if core.engine.is_leader else None,
            store=core.store,
        )
        for form in FORMS
    }


def _measure(
    config: Config, ranks: Ranks, core: build.Core, steps: int, warmup: int
) -> dict[str, FormMetrics]:
    policy, sync = core.policy, core.sync
    data_parallel = build._data_parallel(config, ranks, policy)
    collectors = _collectors(config, ranks, core, data_parallel)
    watchdog = Watchdog(config.folder, ranks.rank, ranks.world_size, config.watchdog.model_dump())
    instruments = StepInstruments(watchdog, MemoryMeter(ranks), TimelineRecorder(ranks, every=0))
    steps_of: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    for step in range(1, warmup + steps + 1):
        for form, collector in collectors.items():
            parts = Parts(
                policy=policy,
                sync=sync,
                loss=core.loss,
                learning_rate=learning_rate(config.optimizer),
                data_parallel=data_parallel,
                collector=collector,
                evaluator=NoEvaluation(),
                recorder=RankRecorder(),
                checkpoints=None,  # type: ignore[arg-type]
                instruments=instruments,
            )
            sync.switch_to_policy()
            sync(step - 1)  # both forms sample step N with version N - 1
            ranks.barrier()
            partial_step = PartialStep()
            instruments.begin(step)
            metrics, num_tokens = train_step(config, parts, step, partial_step)
            with instruments.phase("sync"):
                sync(step)
            metrics |= instruments.metrics(num_tokens)
            trained = partial_step.sequences or []
            metrics["tokens"] = sum(sequence.response_tokens for sequence in trained)
            if step > warmup:
                steps_of[form].append(metrics)
    return {form: _means(rows) for form, rows in steps_of.items()}


def _means(rows: list[dict[str, float]]) -> FormMetrics:
    def mean(name: str) -> float:
        return fmean(row[name] for row in rows)

    return FormMetrics(
        mean("time/step"),
        mean("time/generate"),
        mean("groups/issued"),
        mean("tokens"),
        mean("groups/age_mean"),
    )


def main(
    steps: Annotated[int, typer.Option(help="Measured steps of each form.")] = 12,
    warmup: Annotated[int, typer.Option(help="Steps before the measured ones.")] = 3,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE")] = None,
) -> None:
    """Measure the time per step of both forms. The last line is JSON."""
    if not is_launched():
        raise SystemExit(launch([sys.executable, *sys.argv], NUM_PROCESSES))
    config = load_config(
        REPOSITORY / "model_configs" / "tiny_cpu.yaml",
        [
            f"model.path={REPOSITORY / 'model_configs' / 'tiny_qwen3'}",
            "engine.tensor_parallel=1",
            "engine.max_sequences=64",
            "rollout.prompts_per_step=16",
            "rollout.samples_per_prompt=8",
            f"rollout.max_response_tokens={MAX_TOKENS}",
            f"overlong.max_tokens={MAX_TOKENS}",
            "rollout.on_policy=false",
            "rollout.deterministic=false",
            "loss.tis_cap=2.0",
            *(overrides or []),
        ],
    )
    ranks = join("gloo")
    metrics_of = measure(config, ranks, steps, warmup)
    if ranks.rank:
        return
    table = Table(
        "form", "seconds\nper step", "of which\nrollout", "prompts", "trained\ntokens", "age"
    )
    for form, metrics in metrics_of.items():
        table.add_row(
            form, f"{metrics.step:.2f}", f"{metrics.generate:.2f}", f"{metrics.prompts:.1f}",
            f"{metrics.response_tokens:,.0f}", f"{metrics.age:.2f}",
        )  # fmt: skip
    Console(soft_wrap=True).print(table)
    rounds, coordinator = (metrics_of[form] for form in FORMS)
    ratio = coordinator.step / rounds.step
    print(f"time per step {ratio:.2f} of the first form (at most {TARGET}: "
          f"{'met' if ratio <= TARGET else 'missed'})")  # fmt: skip
    by_form = {form: asdict(metrics) for form, metrics in metrics_of.items()}
    print(json.dumps({**facts(), "steps": steps, "ratio": ratio, **by_form}))


if __name__ == "__main__":
    typer.run(main)
