"""Seconds per step with real vLLM and Megatron-core: whole rounds of prompts or the coordinator.

    python tools/bench/rollouts.py                     # 2 processes, 2 engines, no GPU

The first form sizes a round by the keep rate and waits for all of it, until enough groups are
mixed; finished groups beyond N are kept, nothing else is. Both forms run by turns in the same
processes, with the same policy and engines: rollout, log-probs, updates, verified sync. The tiny
model runs with lengths made uneven: each completion stops at a length drawn log-normally (mean 16,
at most 144 tokens) by its ticket and sample, whatever it says, and half of the prompts are mixed.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
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
from dapo_megatron.protocols import Parts
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.dispatch import Sampling
from dapo_megatron.rollout.driver import Driver, EngineDriver
from dapo_megatron.rollout.evaluate import Evaluator, sample_all
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.run import build
from dapo_megatron.run.build import learning_rate, loss_function
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.tracking.recorder import SilentRecorder
from dapo_megatron.types import Collected, Grade, Group, Outcome, Prompt, SampleRequest

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 2
MAX_TOKENS, MEAN_TOKENS, SIGMA = 144, 16.0, 1.0
TARGET = 0.8
FORMS = ("whole rounds", "coordinator")


def drawn(*names: object) -> random.Random:
    """Random numbers that depend on `names` alone."""
    seed = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(seed, "big"))


def num_tokens(ticket: int, sample: int) -> int:
    """Length of a completion."""
    mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    length = drawn(ticket, sample, "length").lognormvariate(mu, SIGMA)
    return min(max(round(length), 1), MAX_TOKENS)


class UnevenEngine(VllmEngine):
    """Samples as many tokens as `num_tokens` says, end-of-sequence or not."""

    def _sampling(self, request: SampleRequest) -> Any:
        params = super()._sampling(
            replace(request, max_tokens=num_tokens(request.ticket, request.sample))
        )
        params.ignore_eos, params.stop_token_ids = True, []
        params._all_stop_token_ids = set()
        return params


class ScriptedGrading:
    """Answers at once; half of the groups are mixed."""

    last_errors: Mapping[str, str] = {}

    def __init__(self) -> None:
        self._answers: deque[tuple[Any, Grade, str]] = deque()

    @property
    def pending(self) -> int:
        return len(self._answers)

    def submit(self, key: Any, source: str, response: str, truth: str, extra: Any) -> None:
        _, ticket, sample = key
        right = sample == 0 and drawn(ticket, "mixed").random() < 0.5
        self._answers.append((key, Grade(1.0 if right else -1.0, right, ""), "graded"))

    def collect(self, wait: bool) -> list[tuple[Any, Grade | None, str]]:
        answers = [*self._answers]
        self._answers.clear()
        return answers


@dataclass
class WholeRounds:
    """loop.Collector as it first was: rounds of prompts, each awaited, until N groups are mixed."""

    config: Config
    stream: PromptStream
    driver: Driver
    keep_rate: float = 0.5
    next_ticket: int = 0
    carried: list[Group] = field(default_factory=list)

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Collected:
        rollout = self.config.rollout
        mixed, ended = self.carried, []
        sampling = Sampling(
            rollout.samples_per_prompt, MAX_TOKENS, rollout.temperature, rollout.top_p, "rounds"
        )
        issued = 0
        while len(mixed) < rollout.prompts_per_step:
            number = math.ceil((rollout.prompts_per_step - len(mixed)) / self.keep_rate)
            tickets = range(self.next_ticket, self.next_ticket + number)
            self.next_ticket, issued = tickets.stop, issued + number
            prompts = list(zip(tickets, self.stream.take(number), strict=True))
            for group in sample_all(self.driver, prompts, sampling):
                right = any(c.grade is not None and c.grade.correct for c in group.completions)
                if right:
                    mixed.append(group)
                else:
                    ended.append((group, Outcome.ALL_WRONG))
        train, self.carried = mixed[: rollout.prompts_per_step], mixed[rollout.prompts_per_step :]
        return Collected(
            train=train,
            ended=ended,
            decided=[],
            version=version,
            counts={"issued": issued},
            gradings=Counter(),
            keep_rate=self.keep_rate,
            interrupted=0,
            grade_seconds=0.0,
        )

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Never resumed."""


@dataclass
class Figures:
    """Of one form; seconds per step."""

    step: float
    generate: float
    prompts: float
    response_tokens: float
    """Trained on, per step."""
    age: float


def measure(config: Config, ranks: Ranks, steps: int, warmup: int) -> dict[str, Figures]:
    """Both forms by turns; every rank."""
    engine_module.VllmEngine = UnevenEngine  # type: ignore[misc]  # what build takes
    policy, engine, sync = build.build_models(config, ranks)
    driver = EngineDriver(
        engine,
        ScriptedGrading(),  # type: ignore[arg-type]
        ranks,
        deterministic=False,
    )
    prompts = [Prompt("uneven", n, tuple(range(3, 3 + 8 + n % 8)), "", "") for n in range(997)]

    def stream() -> PromptStream:
        return PromptStream(prompts, seed=0, shuffle=True)

    collectors = {
        FORMS[0]: WholeRounds(config, stream(), driver),
        FORMS[1]: Coordinator(config.rollout, config.overlong, stream(), driver, seed=0),
    }
    watchdog = Watchdog(config.folder, ranks.rank, ranks.world_size, config.watchdog.model_dump())
    instruments = StepInstruments(watchdog, MemoryMeter(ranks), TimelineRecorder(ranks, every=0))
    seen: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    for step in range(1, warmup + steps + 1):
        for form, collector in collectors.items():
            parts = Parts(
                policy=policy,
                sync=sync,
                loss=loss_function(config.loss),
                learning_rate=learning_rate(config.optimizer),
                coordinator=collector,
                evaluator=Evaluator(config.evaluation, {}, driver, MAX_TOKENS, 0),
                recorder=SilentRecorder(),
                checkpoints=None,  # type: ignore[arg-type]
                instruments=instruments,
            )
            sync.switch_to_policy()
            sync(step - 1)  # each form has versions of its own
            ranks.barrier()
            partial_step = PartialStep()
            instruments.begin(step)
            metrics, num_tokens = train_step(config, parts, step, partial_step)
            with instruments.phase("sync"):
                sync(step)
            metrics |= instruments.metrics(num_tokens)
            trained = partial_step.train or []
            metrics["tokens"] = sum(len(c.tokens) for g in trained for c in g.completions)
            if step > warmup:
                seen[form].append(metrics)
    return {form: _figures(rows) for form, rows in seen.items()}


def _figures(rows: list[dict[str, float]]) -> Figures:
    def mean(name: str) -> float:
        return fmean(row[name] for row in rows)

    return Figures(
        mean("time/step"),
        mean("time/generate"),
        mean("groups/issued"),
        mean("tokens"),
        mean("groups/age_mean"),
    )


def main(
    steps: Annotated[int, typer.Option(help="Measured steps of each form.")] = 12,
    warmup: Annotated[int, typer.Option(help="Steps before, not measured.")] = 3,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE")] = None,
) -> None:
    """Time per step of both forms; the last line is JSON."""
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
    found = measure(config, ranks, steps, warmup)
    if ranks.rank:
        return
    table = Table(
        "form", "seconds\nper step", "of which\nrollout", "prompts", "trained\ntokens", "age"
    )
    for form, one in found.items():
        table.add_row(
            form, f"{one.step:.2f}", f"{one.generate:.2f}", f"{one.prompts:.1f}",
            f"{one.response_tokens:,.0f}", f"{one.age:.2f}",
        )  # fmt: skip
    Console(soft_wrap=True).print(table)
    first, ours = (found[form] for form in FORMS)
    ratio = ours.step / first.step
    print(f"time per step {ratio:.2f} of the first form (at most {TARGET}: "
          f"{'met' if ratio <= TARGET else 'missed'})")  # fmt: skip
    figures = {form: asdict(one) for form, one in found.items()}
    print(json.dumps({**facts(), "steps": steps, "ratio": ratio, **figures}))


if __name__ == "__main__":
    typer.run(main)
