"""Recorder of a run: metrics to the trackers, progress to the console, rollouts to samples/
(rollout/record.py), the policy's values to policy/. Rank 0 has a RunRecorder, others a
RankRecorder."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.files import write_json
from dapo_megatron.model import Architecture
from dapo_megatron.model.flops import model_flops
from dapo_megatron.protocols import Tracker
from dapo_megatron.rollout.record import StepRecord
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.mlflow_tracker import MlflowTracker
from dapo_megatron.tracking.policy_files import policy_path, policy_row, write_policy
from dapo_megatron.tracking.run_report import RunReport
from dapo_megatron.types import SequenceDiagnostics, TrainingSequence

TERA = 1e12
MAX_WAITING = 6
"""Maximum number of files that wait for the disk: about two steps. Then the next one blocks."""


@dataclass
class Speedometer:
    """Model FLOPs per second of the update phase: forward and backward, without recomputation.

    peak_flops   dense bfloat16 FLOPs per second of a device, also for FP8 runs; None if unknown, as
                 on CPU
    """

    arch: Architecture
    num_devices: int
    peak_flops: float | None
    _done: float = 0.0

    def trained(self, lengths: Sequence[int], num_scored: int) -> None:
        """Count an optimizer update on sequences of `lengths`, with `num_scored` loss tokens."""
        self._done += model_flops(self.arch, lengths, backward=True, num_scored=num_scored)

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return throughput/model_tflops_per_device and throughput/mfu of the step with these
        metrics, and reset the count. Empty if the step made no update."""
        done, self._done = self._done, 0.0
        seconds = metrics.get("time/update", 0.0)
        if not done or not seconds:
            return {}
        speed = done / seconds / self.num_devices
        throughput = {"throughput/model_tflops_per_device": speed / TERA}
        if self.peak_flops is not None:
            throughput["throughput/mfu"] = speed / self.peak_flops
        return throughput


@dataclass(kw_only=True)
class RankRecorder:
    """Recorder of a rank: writes files of recorded rollouts in the background. All else has an
    effect on rank 0 only, which has a RunRecorder.

    An error of the disk is a warning on `console`: that file is missing. Any other error is raised
    by a later call.

    run                the run's folder; None writes nothing
    inspected_groups   first groups of a step whose per-token policy log-probs are written
    """

    console: RunConsole
    run: Path | None = None
    inspected_groups: int = 0
    max_waiting: int = MAX_WAITING

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rollout writer")
        self._waiting: deque[tuple[str, Future[None]]] = deque()

    def record(self, step: int, record: StepRecord) -> None:
        """Write what a step collected."""
        if self.run is not None:
            self._put(f"samples of step {step}", record.write, self.run / "samples", step)

    def sequence_diagnostics(
        self,
        step: int,
        diagnostics: Iterable[SequenceDiagnostics],
        sequences: Sequence[TrainingSequence],
        data_parallel: DataParallelRanks,
    ) -> None:
        """Write the policy's values of the sequences that this data-parallel index trains on, on
        its first rank. `sequences` are everybody's."""
        if data_parallel.is_first:
            tickets = dict.fromkeys(sequence.ticket for sequence in sequences)
            inspected = list(tickets)[: self.inspected_groups]
            self.policy(step, data_parallel.index, diagnostics, inspected)

    def policy(
        self,
        step: int,
        index: int,
        sequences: Iterable[SequenceDiagnostics],
        inspected: Collection[int],
    ) -> None:
        """Write the policy's values of the sequences that data-parallel rank `index` trained on.
        Values per token are written for the tickets in `inspected`, and copied before this method
        returns."""
        if self.run is None:
            return
        rows = [
            policy_row(sequence, has_tokens=sequence.ticket in inspected) for sequence in sequences
        ]
        path = policy_path(self.run, step, index)
        self._put(f"policy log-probs of step {step}", write_policy, path, rows)

    def flush(self) -> None:
        """Wait until all files are on disk."""
        while self._waiting:
            self._finish_first()

    def close(self) -> None:
        """Wait until all files are on disk, and end the thread."""
        self.flush()
        self._thread.shutdown()

    def _put(self, files: str, write: Callable[..., None], *arguments: Any) -> None:
        while len(self._waiting) >= self.max_waiting:
            self._finish_first()
        self._waiting.append((files, self._thread.submit(write, *arguments)))

    def _finish_first(self) -> None:
        files, future = self._waiting.popleft()
        try:
            future.result()
        except OSError as error:
            self.console.warn(f"{files} were not written: {error}")

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    log = trained = timeline = groups = phase = note = summary = _nothing

    def finish(self, status: str) -> None:
        """Wait until this rank's files are on disk."""
        self.close()

    def live(self) -> AbstractContextManager[Any]:
        """Show nothing."""
        return nullcontext()


@dataclass(kw_only=True)
class RunRecorder(RankRecorder):
    """Recorder of rank 0.

    trackers           get the metrics, in this order: local files before servers
    timeline_folder    where timelines are written; None writes none
    mlflow             the MLflow tracker, if any; `trackers` includes it
    """

    trackers: Sequence[Tracker]
    num_devices: int
    timeline_folder: Path | None = None
    speedometer: Speedometer | None = None
    mlflow: MlflowTracker | None = None
    report: RunReport | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, and per-device throughput computed from them."""
        if self.speedometer is not None:
            metrics = {**metrics, **self.speedometer.metrics(metrics)}
        speed = metrics.get("throughput/tokens_per_second")
        if speed is not None:
            per_device = {"throughput/tokens_per_second_per_device": speed / self.num_devices}
            metrics = {**metrics, **per_device}
        self.flush()  # steps with metrics are recorded, whenever the run is killed
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def trained(self, lengths: Sequence[int], num_scored: int) -> None:
        """Count an update on sequences of `lengths`, with `num_scored` loss tokens."""
        if self.speedometer is not None:
            self.speedometer.trained(lengths, num_scored)

    def timeline(self, step: int, record: Mapping[str, Any]) -> None:
        """Write the step's timeline (cluster/instruments.py). Disk errors are only warnings."""
        if self.timeline_folder is None:
            return
        try:
            self.timeline_folder.mkdir(exist_ok=True)
            write_json(self.timeline_folder / f"step_{step:06d}.json", record, durable=False)
        except OSError as error:
            self.console.warn(f"the timeline of step {step} was not written: {error}")

    def groups(self, done: int) -> None:
        """Show how many of the step's groups are ready."""
        self.console.groups(done)

    def phase(self, name: str, step: int) -> None:
        """Show that this rank enters phase `name` of `step`."""
        self.console.phase(name, step)

    def live(self) -> AbstractContextManager[Any]:
        """Return a context manager that shows the progress bar, if the console is a terminal."""
        return self.console.live()

    def note(self, text: str) -> None:
        """Print a line on the console."""
        self.console.note(text)

    def finish(self, status: str) -> None:
        """Write the report, then close the trackers with the run's final status."""
        try:
            self.close()
            if self.report is not None:
                self.report.write(status)
        finally:  # a second Ctrl-C during the report must not lose the status
            with ExitStack() as stack:
                for tracker in reversed(self.trackers):
                    stack.callback(tracker.finish, status)

    def summary(self, metrics: Mapping[str, Any], folder: Path) -> None:
        """Print the summary of the run. `metrics` go to summary.json."""
        pages = {"run folder": str(folder)}
        if self.report is not None and self.report.is_written:
            pages["report"] = str(self.report.path)
        if self.mlflow is not None:
            pages["look at it"] = self.mlflow.ui
        self.console.summary(metrics, pages)
