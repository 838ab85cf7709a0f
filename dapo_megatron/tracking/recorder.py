"""What a run tells the world: metrics to the trackers, rollouts to samples/, progress to the
console. Rank 0 has the real one; every other rank has the silent one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_megatron.files import write_json
from dapo_megatron.protocols import Tracker
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.mlflow_tracker import MlflowTracker
from dapo_megatron.tracking.run_report import RunReport
from dapo_megatron.tracking.samples import write_policy, write_samples
from dapo_megatron.types import Completion, Group, Inspected

TERA = 1e12


@dataclass
class Speedometer:
    """Of the update phase alone: operations of the model (forward and backward; nothing that is
    computed again to save memory), over the seconds of the phase and all devices.

    `flops`: operations of an update on sequences of these lengths, of which so many tokens are in
    the loss. `peak_flops`: dense bfloat16 operations a second of a device, also where it computes
    in FP8; None where that is not known, as on CPU.
    """

    num_devices: int
    flops: Callable[[Sequence[int], int], float]
    peak_flops: float | None
    _done: float = 0.0

    def trained(self, lengths: Sequence[int], num_scored: int) -> None:
        """One optimizer update was made."""
        self._done += self.flops(lengths, num_scored)

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """throughput/model_tflops_per_device and throughput/mfu of a step whose metrics these are;
        the next step is counted anew."""
        done, self._done = self._done, 0.0
        seconds = metrics.get("time/update", 0.0)
        if not done or not seconds:
            return {}
        speed = done / seconds / self.num_devices
        found = {"throughput/model_tflops_per_device": speed / TERA}
        if self.peak_flops is not None:
            found["throughput/mfu"] = speed / self.peak_flops
        return found


@dataclass(frozen=True)
class RunRecorder:
    """Rank 0's. `samples_folder` None keeps no rollouts; of the first `inspected_groups` groups of
    a step it keeps what the policy said of every token. `mlflow`, if there is one, is among the
    trackers. `reward` is what a completion was rewarded with, None without a grade."""

    tracker: Tracker
    console: RunConsole
    samples_folder: Path | None
    num_devices: int
    inspected_groups: int = 0
    timeline_folder: Path | None = None
    speedometer: Speedometer | None = None
    mlflow: MlflowTracker | None = None
    report: RunReport | None = None
    reward: Callable[[Completion], float | None] | None = None

    @property
    def run_id(self) -> str | None:
        """Name of the MLflow run, for the checkpoints."""
        return self.mlflow.run if self.mlflow else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, with the per-device throughput added."""
        if self.speedometer is not None:
            metrics = {**metrics, **self.speedometer.metrics(metrics)}
        speed = metrics.get("throughput/tokens_per_second")
        if speed is not None:
            per_device = {"throughput/tokens_per_second_per_device": speed / self.num_devices}
            metrics = {**metrics, **per_device}
        self.tracker.log(step, metrics)

    def trained(self, lengths: Sequence[int], num_scored: int) -> None:
        """An update was made on sequences of these lengths, so many of their tokens in the loss."""
        if self.speedometer is not None:
            self.speedometer.trained(lengths, num_scored)

    def samples(self, step: int, groups: Iterable[tuple[Group, str]]) -> None:
        """The step's rollouts, with what became of each group; on a full disk they are left out."""
        if self.samples_folder is None:
            return
        with self._or_left_out(f"samples of step {step}"):
            _, index = write_samples(self.samples_folder, step, groups, self.reward)
            with self._or_left_out(f"index entries of step {step}"):
                index.write(self.samples_folder)

    def inspected(self, step: int, sequences: Iterable[Inspected]) -> None:
        """What the policy said of the sequences it is trained on in the step; kept beside its
        rollouts, and left out as they are."""
        if self.samples_folder is None:
            return
        with self._or_left_out(f"the policy's log-probs of step {step}"):
            write_policy(self.samples_folder, step, sequences, self.inspected_groups)

    def timeline(self, step: int, record: Mapping[str, Any]) -> None:
        """Who did what when in the step (cluster/instruments.py); on a full disk it is left out."""
        if self.timeline_folder is None:
            return
        try:
            self.timeline_folder.mkdir(exist_ok=True)
            write_json(self.timeline_folder / f"step_{step:06d}.json", record, durable=False)
        except OSError as error:
            self.console.warn(f"the timeline of step {step} is left out: {error}")

    @contextmanager
    def progress(self, num_groups: int) -> Iterator[Callable[[int], None]]:
        """A bar on the console; yields a function of the groups done."""
        with self.console.rollout_progress(num_groups) as bar:
            yield lambda done: bar.update(done)

    @contextmanager
    def live(self) -> Iterator[Callable[[str, int], None]]:
        """Show what the run is doing in a panel on the terminal, if there is one. Yields a function
        to be called with each new phase and its step."""
        with self.console.live() as view:
            yield view.phase

    def ask_requests(self, ask: Callable[[], str]) -> None:
        """Whom to ask how many requests engines run: "118 of 128"."""
        self.console.ask_requests(ask)

    def note(self, text: str) -> None:
        """A line on the console."""
        self.console.note(text)

    def finish(self, status: str) -> None:
        """How the run really ended; its report is written first."""
        try:
            if self.report is not None:
                self.report.write(status)
        finally:  # a second Ctrl-C must not cost the true status
            self.tracker.finish(status)

    def summary(self, figures: Mapping[str, Any], folder: Path) -> None:
        """The block at the end."""
        self.console.summary(
            accuracy_before=figures["accuracy_before"],
            accuracy_after=figures["accuracy_after"],
            seconds=figures["seconds"],
            folder=folder,
            report=self.report.path if self.report and self.report.is_written else None,
            ui=self.mlflow.ui if self.mlflow else None,
        )

    @contextmanager
    def _or_left_out(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.console.warn(f"{what} are left out: {error}")


class SilentRecorder:
    """Every other rank's: the same calls, no effect."""

    run_id: str | None = None

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""

    log = trained = samples = timeline = inspected = _nothing
    ask_requests = note = finish = summary = _nothing

    def progress(self, num_groups: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show nothing."""
        return nullcontext(lambda done: None)

    def live(self) -> AbstractContextManager[Callable[[str, int], None]]:
        """Show nothing."""
        return nullcontext(lambda phase, step: None)
