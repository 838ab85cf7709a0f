"""Where the metrics and files of a run go: JSONL in the run's folder, MLflow, the console.
Rank 0 has a composite of them; the other ranks track nothing."""

from dapo_megatron.tracking.console import RolloutProgress, RunConsole
from dapo_megatron.tracking.jsonl import JsonlTracker
from dapo_megatron.tracking.mlflow_spool import MlflowSpool, deliver, deliver_rest, why_waiting
from dapo_megatron.tracking.provenance import commit, cpu_name, run_tags, versions
from dapo_megatron.tracking.recorder import RunRecorder, SilentRecorder
from dapo_megatron.tracking.run_report import RunReport
from dapo_megatron.tracking.samples import write_samples
from dapo_megatron.tracking.speedometer import Speedometer
from dapo_megatron.tracking.tracker import CompositeTracker

__all__ = [
    "CompositeTracker",
    "JsonlTracker",
    "MlflowSpool",
    "RolloutProgress",
    "RunConsole",
    "RunRecorder",
    "RunReport",
    "SilentRecorder",
    "Speedometer",
    "commit",
    "cpu_name",
    "deliver",
    "deliver_rest",
    "run_tags",
    "versions",
    "why_waiting",
    "write_samples",
]
