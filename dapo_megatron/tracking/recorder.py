"""Recorder of a run: metrics to the trackers, rollouts to samples/, progress to the console. Rank 0
has a RunRecorder; every other rank has a RankRecorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_megatron.files import write_json
from dapo_megatron.model import Architecture
from dapo_megatron.model.flops import model_flops
from dapo_megatron.protocols import Tracker
from dapo_megatron.tracking.mlflow_tracker import MlflowTracker
from dapo_megatron.tracking.rollout_writer import RolloutWriter
from dapo_megatron.tracking.run_report import RunReport

TERA = 1e12


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
class RunRecorder(RolloutWriter):
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
        """Print the summary of the run. `metrics` are those of summary.json."""
        self.console.summary(
            accuracy_before=metrics["accuracy_before"],
            accuracy_after=metrics["accuracy_after"],
            seconds=metrics["seconds"],
            folder=folder,
            report=self.report.path if self.report and self.report.is_written else None,
            ui=self.mlflow.ui if self.mlflow else None,
        )


class RankRecorder(RolloutWriter):
    """Recorder of every rank except 0. It records this rank's rollouts; the other methods have no
    effect."""

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""

    log = record = trained = timeline = groups = phase = note = summary = _nothing

    def finish(self, status: str) -> None:
        """Wait until this rank's rollouts are on disk."""
        self.close()

    def live(self) -> AbstractContextManager[Any]:
        """Show nothing."""
        return nullcontext()
