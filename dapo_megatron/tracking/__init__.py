"""Where the metrics and files of a run go: JSONL in the run's folder, MLflow, the console.
Rank 0 has a composite of them; every other rank has the null tracker."""

from dapo_megatron.tracking.console import RolloutProgress, RunConsole
from dapo_megatron.tracking.jsonl import JsonlTracker, write_samples
from dapo_megatron.tracking.mlflow_tracker import MlflowTracker
from dapo_megatron.tracking.provenance import commit, versions
from dapo_megatron.tracking.recorder import RunRecorder, SilentRecorder
from dapo_megatron.tracking.tracker import CompositeTracker, NullTracker

__all__ = [
    "CompositeTracker",
    "JsonlTracker",
    "MlflowTracker",
    "NullTracker",
    "RolloutProgress",
    "RunConsole",
    "RunRecorder",
    "SilentRecorder",
    "commit",
    "versions",
    "write_samples",
]
