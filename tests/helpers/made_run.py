"""Generate a run folder in seconds, for tests and the benchmark of the report.

Curves are smooth, with a little seeded noise. Samples and metrics agree in accuracy, lengths and
groups by fate, as in a real run.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev

import torch
import yaml
from tokenizers import Tokenizer, decoders, models

from dapo_megatron.config.file import dump_config
from dapo_megatron.files import write_json
from dapo_megatron.segments import Segment
from dapo_megatron.tracking.recorder import RankRecorder
from dapo_megatron.tracking.trackers import JsonlTracker
from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, SequenceDiagnostics
from tests.helpers.configs import REPOSITORY, tiny_config
from tests.helpers.console import Console
from tests.helpers.groups import step_record

TOKENIZER = REPOSITORY / "model_configs" / "tiny_qwen3" / "tokenizer.json"
ATTEMPT = "20260101-000000"
BEGIN = 1_767_225_600.0
"""time.time() of the run's start."""

NUM_NOISE = 20_000

LONE = "\ud800"
"""A lone surrogate, which UTF-8 cannot encode."""
HOSTILE = (
    "<script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=1">',
    "</script><script>window.hacked=1</script>",
    "<!-- <![CDATA[ ]]> -->",
    "<a href=\"javascript:window.hacked=1\">javascript:window.hacked=1</a>",
    "{{ 7 * 7 }} {% raw %} ${window.hacked=1}",
    "line\u2028separator\u2029paragraph",
    "\u202eright to left\u202c \u2066isolate\u2069",
    "nul\x00bell\x07escape\x1b[31m",
    LONE,
    "w" * 5_000,
    "\U0001f469\u200d\U0001f680 \U0001f1ef\U0001f1f5 e\u0301 \U0001f92f",
    "&lt;b&gt; &amp; \"quotes\" 'single' `back`",
    "</textarea></style></title><svg onload=window.hacked=1>",
)  # fmt: skip


@dataclass(frozen=True)
class MadeRun:
    """Settings of a generated run. `groups_per_step` are trained on; every second step filters one
    more."""

    num_steps: int = 20
    groups_per_step: int = 8
    samples_per_group: int = 8
    tokens_per_completion: int = 60
    evaluate_every: int = 20
    timeline_every: int = 10
    inspected_groups: int = 4
    hostile: bool = False
    """Whether texts and names try to run as HTML or JavaScript."""
    name: str = "made"
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Write `folder`, which must not exist, and return it."""
        folder.mkdir(parents=True)
        _Writer(self, folder).write()
        return folder


def _reward(completion: Completion) -> float | None:
    return None if completion.grade is None else completion.grade.score


@dataclass
class _Writer:
    run: MadeRun
    folder: Path
    ids: dict[str, int] = field(default_factory=dict)
    """Text of a token -> its id."""
    ticket: int = 0
    carried: int = 0
    num_hostile: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.run.seed)
        # Each completion gets a slice. Drawing every number separately would take minutes.
        num = NUM_NOISE + self.run.tokens_per_completion + 1
        self.noise = tuple(-round(self.rng.expovariate(3), 5) for _ in range(num))
        self.set_name = HOSTILE[0] if self.run.hostile else "chain_sum_held_out"

    def write(self) -> None:
        self._config()
        self._tokenizer()
        self._answers()
        console = Console()
        writer = RankRecorder(run=self.folder, console=console)
        tracker = JsonlTracker(self.folder / "metrics.jsonl", console)
        tracker.log(0, self._evaluation(0))
        for step in range(1, self.run.num_steps + 1):
            groups = list(self._groups(step))
            writer.record(step, step_record(groups, _reward))
            trained = [group.ticket for group, outcome in groups if outcome == "trained"]
            inspected = trained[: self.run.inspected_groups]
            writer.policy(step, 0, self._inspected(groups), inspected)
            if step == 1 or (self.run.timeline_every and step % self.run.timeline_every == 0):
                self._timeline(step)
            tracker.log(step, self._metrics(step, groups))
        writer.close()
        tracker.finish("FINISHED")
        assert not console.warnings
        self._ends()

    def _config(self) -> None:
        config = tiny_config(
            run__name=self.run.name,
            run__directory=self.folder.parent,
            rollout__prompts_per_step=self.run.groups_per_step,
            rollout__samples_per_prompt=self.run.samples_per_group,
            rollout__max_response_tokens=self.run.tokens_per_completion + 4,
            overlong__max_tokens=self.run.tokens_per_completion + 4,
            train__rollout_steps=self.run.num_steps,
            evaluation__every=self.run.evaluate_every,
        )
        text = dump_config(config)
        if self.run.hostile:
            tree = yaml.safe_load(text)
            tree["run"]["name"] = HOSTILE[0]
            tree["model"]["path"] = HOSTILE[1]
            tree["data"]["train"][0]["name"] = HOSTILE[2]
            tree["evaluation"]["sets"][0]["name"] = self.set_name
            text = yaml.safe_dump(tree, sort_keys=False)
        (self.folder / "config.yaml").write_text(text, encoding="utf-8")

    def _tokenizer(self) -> None:
        if not self.run.hostile:
            shutil.copy(TOKENIZER, self.folder / "tokenizer.json")
            self.ids = Tokenizer.from_file(str(TOKENIZER)).get_vocab()
            return
        pieces = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
        pieces += ["\ufffd" if text == LONE else text for text in HOSTILE]
        self.ids = {piece: token for token, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.WordLevel(self.ids, unk_token="<unk>"))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
        tokenizer.save(str(self.folder / "tokenizer.json"))
        self.ids[LONE] = self.ids["\ufffd"]

    def _answers(self) -> None:
        """Make some correct and wrong answers to each of some prompts, for the groups."""
        self.problems = []
        for index in range(24):
            left, right = self.rng.randint(10, 99), self.rng.randint(10, 99)
            text = f"What is {left} + {right}?"
            truth = str(left + right)
            if self.run.hostile:
                text += HOSTILE[index % len(HOSTILE)]
                truth += HOSTILE[(index + 1) % len(HOSTILE)]
            prompt = Prompt(
                source=HOSTILE[2] if self.run.hostile else "chain_sum",
                index=index,
                tokens=tuple(self.ids[letter] for letter in f"What is {left} + {right}?"),
                text=text,
                truth=truth,
                extra={"dataset": HOSTILE[3] if self.run.hostile else "chain_sum"},
            )
            answers = {
                correct: [self._answer(left, right, correct, number) for number in range(4)]
                for correct in (True, False)
            }
            self.problems.append((prompt, answers))

    def _answer(self, left: int, right: int, correct: bool, number: int) -> Completion:
        answer = left + right + (0 if correct else self.rng.choice((-10, -1, 1, 10)))
        pieces = [*f"{left} + {right} is near {round(answer, -1)}. So it is {answer}"]
        num_tokens = self.run.tokens_per_completion - self.rng.randint(0, 9) - 1
        pieces = (pieces * (num_tokens // len(pieces) + 1))[: max(num_tokens, 1)]
        if self.run.hostile:
            self.num_hostile += 1
            pieces.insert(len(pieces) // 2, HOSTILE[self.num_hostile % len(HOSTILE)])
        stops = correct or number > 0
        tokens = [self.ids[piece] for piece in pieces] + [self.ids["<eos>"]] * stops
        return Completion(
            sample=0,
            tokens=tuple(tokens),
            logprobs=self.noise[: len(tokens)],
            text="".join(pieces),
            finish=Finish.STOP if stops else Finish.LENGTH,
            segments=(),
            grade=Grade(1.0 if correct else -1.0, correct, str(answer), parsed=stops),
        )

    def accuracy(self, step: int) -> float:
        """Return the accuracy of a step, which rises from 0.35 to 0.85."""
        return 0.85 - 0.5 * math.exp(-3 * step / self.run.num_steps)

    def _groups(self, step: int) -> Iterator[tuple[Group, str]]:
        most = self.run.samples_per_group
        for position in range(self.run.groups_per_step + (step % 2 == 0)):
            trained = position < self.run.groups_per_step
            share = self.accuracy(step) + self.rng.uniform(-0.2, 0.2)
            num_correct = min(max(round(share * most), 1), most - 1) if trained else most
            prompt, answers = self.rng.choice(self.problems)
            old = max(step - 1 - (position == 0), 0)
            completions = []
            for sample in range(most):
                made = self.rng.choice(answers[sample < num_correct])
                first = min(len(made.tokens) // 2, 5) if old < step - 1 else 0
                parts = [(old, first), (step - 1, len(made.tokens) - first)]
                segments = tuple(Segment(*part) for part in parts if part[1])
                at = self.rng.randrange(NUM_NOISE)
                noise = self.noise[at : at + len(made.tokens)]
                completions.append(replace(made, sample=sample, logprobs=noise, segments=segments))
            yield (
                Group(self.ticket, prompt, tuple(completions)),
                ("trained" if trained else "all_correct"),
            )
            self.ticket += 1

    def _inspected(self, groups: Sequence[tuple[Group, str]]) -> Iterator[SequenceDiagnostics]:
        """Yield diagnostics of each trained sequence, as by a policy very close to the engine."""
        for group in (group for group, fate in groups if fate == "trained"):
            scores = [
                completion.grade.score for completion in group.completions if completion.grade
            ]
            mean, spread = fmean(scores), pstdev(scores) or 1.0
            for completion, score in zip(group.completions, scores):
                gap, at = self.rng.uniform(1e-7, 2e-6), self.rng.randrange(NUM_NOISE)
                yield SequenceDiagnostics(
                    ticket=group.ticket,
                    sample=completion.sample,
                    advantage=(score - mean) / spread,
                    gap_mean=gap,
                    gap_max=gap,
                    logprobs=torch.tensor(completion.logprobs) - gap,
                    entropy=-torch.tensor(self.noise[at : at + len(completion.tokens)]),
                )

    def _metrics(self, step: int, groups: Sequence[tuple[Group, str]]) -> dict[str, float]:
        trained = [c for group, fate in groups if fate == "trained" for c in group.completions]
        lengths = [len(completion.tokens) for completion in trained]
        correct = sum(c.grade.correct for c in trained if c.grade) / len(trained)
        num_trained = self.run.groups_per_step
        before, self.carried = self.carried, step % 4
        issued = len(groups) + self.carried - before
        times = {
            "time/generate": 12 + self._noise(2),
            "time/logprobs": 3 + self._noise(0.3),
            "time/update": 9 + self._noise(1),
            "time/sync": 0.8 + self._noise(0.1),
        }
        values = {
            "groups/issued": issued,
            "groups/trained": num_trained,
            "groups/all_correct": len(groups) - num_trained,
            **{f"groups/{fate}": 0 for fate in ("all_wrong", "overlong", "abstained", "expired")},
            "groups/carried": self.carried,
            "groups/carried_ready": self.carried // 2,
            "groups/keep_rate": num_trained / len(groups),
            "groups/interrupted_completions": self.carried * 3,
            "time/grade": 0.1 + self._noise(0.02),
            "groups/age_mean": 1 / num_trained,
            "groups/age_max": min(step - 1, 1),
            "groups/token_age_mean": 0.1,
            "groups/fresh_token_fraction": 0.9 + self._noise(0.05),
            **{f"grading/{how}": 0 for how in ("timeout", "crash", "memory", "error")},
            "grading/unparsed": sum(not c.grade.parsed for c in trained if c.grade),
            "accuracy/raw": correct,
            "accuracy/perfect_fraction": (len(groups) - num_trained) / len(groups),
            "reward/mean": 2 * correct - 1,
            "response_tokens/mean": sum(lengths) / len(lengths),
            "response_tokens/max": max(lengths),
            "response_tokens/clipped_fraction": sum(c.finish is Finish.LENGTH for c in trained)
            / len(trained),
            "overlong/penalty_mean": -0.01,
            "overlong/penalised_fraction": 0.02,
            "overlong/filtered_fraction": 0.0,
            "mismatch/gap_mean": 4e-7 + self._noise(1e-7),
            "mismatch/gap_max": 9e-6 + self._noise(2e-6),
            "mismatch/kl": 3e-13,
            "policy/approx_kl": 0.003 + self._noise(0.001),
            "policy/clip_fraction_high": 0.004 + self._noise(0.002),
            "policy/clip_fraction_low": 0.006 + self._noise(0.002),
            "policy/dual_clip_fraction": 0.0,
            "policy/entropy": 0.7 - 0.3 * self.accuracy(step) + self._noise(0.03),
            "policy/mean_prob": 0.5 + 0.3 * self.accuracy(step) + self._noise(0.02),
            "policy/tis_capped_fraction": 0.001,
            "policy/tis_weight": 0.998,
            "policy/loss": self._noise(0.02),
            "policy/grad_norm": 1.5 + self._noise(0.5),
            "policy/lr": 1e-4 * min((step - 1) / 4, 1),
            "sync/bytes": 7168,
            "sync/tensors": 46,
            "sync/fingerprinted": 1,
            "sync/unread_tensors": 0,
            "time/sync_verify": 0.06,
            "time/sync_turns": 0.005,
            **times,
            **{
                f"memory/{phase}_gib": 1.5 + 0.2 * place + self._noise(0.05)
                for place, phase in enumerate(("generate", "logprobs", "sync", "update"))
            },
            "time/step": sum(times.values()) + 0.5,
            "time/engine_idle": 1.5 + self._noise(0.5),
            "throughput/running_mean": 0.7 + self._noise(0.05),
            "throughput/tokens_per_second": sum(lengths) / 25,
            "throughput/model_tflops_per_device": 0.02,
            "throughput/tokens_per_second_per_device": sum(lengths) / 50,
        }
        if step % self.run.evaluate_every == 0:
            values |= self._evaluation(step) | {"time/evaluate": 4.0, "time/checkpoint": 0.3}
        return {name: float(value) for name, value in values.items()}

    def _evaluation(self, step: int) -> dict[str, float]:
        accuracy = self.accuracy(step) + self._noise(0.01)
        estimates = {
            "avg@4": accuracy,
            "pass@4": min(accuracy + 0.12, 1.0),
            "cons@4": accuracy + 0.05,
        }
        values = {"pass@1": accuracy, "pass@2": accuracy + 0.06, "ungraded": 0.0}
        for name, middle in estimates.items():
            values |= {name: middle, f"{name}_low": middle - 0.04, f"{name}_high": middle + 0.04}
        return {f"eval/{self.set_name}/{name}": value for name, value in values.items()}

    def _noise(self, size: float) -> float:
        return self.rng.uniform(-size, size)

    def _timeline(self, step: int) -> None:
        spans = [["generate", 0.0, 12.0], ["logprobs", 12.1, 15.0], ["update", 15.1, 24.0],
                 ["sync", 24.1, 25.0]]  # fmt: skip
        most = self.run.groups_per_step * self.run.samples_per_group
        running = [[second / 4, round(most * (1 - second / 48))] for second in range(49)]
        path = self.folder / "timeline" / f"step_{step:06d}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(
            path,
            {
                "step": step,
                "begin": BEGIN + 25 * step,
                "ranks": [
                    {"rank": rank, "host": f"n{rank}", "spans": spans[: 4 - rank % 2]}
                    for rank in range(2)
                ],
                "replicas": [{"replica": 0, "running": running}],
            },
            durable=False,
        )

    def _ends(self) -> None:
        run, last = self.run, self.run.num_steps
        line = json.dumps({"attempt": ATTEMPT, "job": None, "step": 0, "time": BEGIN})
        (self.folder / "attempts.jsonl").write_text(line + "\n", encoding="utf-8")
        phases = {"generate": 1.4, "logprobs": 1.6, "update": 2.2, "sync": 1.9}
        write_json(
            self.folder / "plan.json", {"device": "cpu", "phases": phases, "note": "a made run"}
        )
        facts = {"model": HOSTILE[1] if run.hostile else "tiny_qwen3", "processes": "1"}
        tags = {"git.commit": "0" * 40, "version.torch": "0.0", "host": "n0", "attempt": ATTEMPT}
        write_json(
            self.folder / "provenance.json",
            {"facts": facts, "tags": tags, "devices": "CPU", "num_processes": 1},
        )
        before, after = self._evaluation(0), self._evaluation(last)
        avg = f"eval/{self.set_name}/avg@4"
        write_json(
            self.folder / "summary.json",
            {"accuracy_before": before[avg], "accuracy_after": after[avg], "steps": last,
             "seconds": 25.0 * last, "max_gap": 1.1e-5, "peak_memory_gib": 2.4,
             "evaluation_before": before, "evaluation_after": after, "seed": run.seed,
             "num_processes": 1, "versions": {"torch": "0.0"}, "commit": "0" * 40},
        )  # fmt: skip
