"""The run in MLflow: parameters, every metric per step, tags, files, and how it really ended.

Everything goes through a client and a run id; the process-wide "active run" is left alone. MLflow
takes seconds to import and to make a database, so it is imported when a tracker is made.
"""

from __future__ import annotations

import fcntl
import getpass
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Config
from dapo_megatron.config_file import dump_config
from dapo_megatron.tracking.provenance import commit, versions
from dapo_megatron.types import DapoError

if TYPE_CHECKING:
    from mlflow.entities import Run

STATUSES = ("FINISHED", "FAILED", "KILLED")
PARAMS_PER_CALL = 100
"""MLflow's own limit."""


class MlflowTracker:
    """One MLflow run. `run_id` belongs in the checkpoint: given back, the same run goes on.

    Resumed, the run is RUNNING again. Steps done again after a checkpoint are logged again; MLflow
    keeps both values and shows the later one. Parameters cannot change in MLflow: one that differs
    from the first start becomes a tag `resumed.<key>`.

    Raises DapoError, with what to do, if MLflow cannot be reached or does not know the run.
    """

    def __init__(self, config: Config, *, run_id: str | None = None) -> None:
        # Neither may slow down or fail a run behind a firewall.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        self.uri = tracking_uri(config)
        try:
            with _first_use_alone(config, self.uri):
                self._client = MlflowClient(tracking_uri=self.uri)
            run = self._client.get_run(run_id) if run_id else self._create(config)
            self.run_id: str = run.info.run_id
            self._experiment_id: str = run.info.experiment_id
            self._describe(config, run)
        except MlflowException as error:
            raise DapoError(
                f"MLflow at {self.uri}: {error.message}; set MLFLOW_TRACKING_URI to the server "
                "this run belongs to, or tracking.mlflow=false"
            ) from error

    @property
    def ui(self) -> str:
        """Where to look at the run: a command if it is on this machine, else an address."""
        if self.uri.startswith("http"):
            return f"{self.uri}/#/experiments/{self._experiment_id}/runs/{self.run_id}"
        program = (
            "mlflow" if shutil.which("mlflow") else str(Path(sys.executable).parent / "mlflow")
        )
        return shlex.join([program, "ui", "--backend-store-uri", self.uri])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout step, in one call."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(metric_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=batch, synchronous=True)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a file with the run, under `folder`."""
        self._client.log_artifact(self.run_id, str(path), folder or None)

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r}: must be one of {', '.join(STATUSES)}")
        self._client.set_terminated(self.run_id, status)

    def _create(self, config: Config) -> Run:
        from mlflow.exceptions import MlflowException

        name = config.tracking.experiment
        # A server knows where its files go; a local database would put them in the working folder.
        files = (_directory(config) / "mlartifacts").as_uri() if _is_local(self.uri) else None
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                self._client.create_experiment(name, artifact_location=files)
            except MlflowException as error:  # another run was faster
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)
        return self._client.create_run(experiment.experiment_id, run_name=config.run.name)

    def _describe(self, config: Config, run: Run) -> None:
        """Parameters, tags and the resolved configuration."""
        from mlflow.entities import Param, RunTag

        if run.info.status != "RUNNING":
            self._client.update_run(self.run_id, status="RUNNING")
        known, tags, params = run.data.params, run_tags(), []
        for key, value in flatten(config.model_dump(mode="json")):
            if key not in known:
                params.append(Param(key, value))
            elif known[key] != value:
                tags[f"resumed.{key}"] = value
        rest = iter(params)
        while chunk := list(islice(rest, PARAMS_PER_CALL)):
            self._client.log_batch(self.run_id, params=chunk, synchronous=True)
        self._client.log_batch(
            self.run_id, tags=[RunTag(*item) for item in tags.items()], synchronous=True
        )
        self._client.log_text(self.run_id, dump_config(config), "config.yaml")


def tracking_uri(config: Config) -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file in run.directory."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        return given
    return f"sqlite:///{_directory(config) / 'mlflow.db'}"


def metric_name(name: str) -> str:
    """`name` as MLflow takes it: avg@4 becomes avg_at_4, other strange characters `_`."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value) of every leaf; list entries are numbered from 0."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree)) or "[]"
    if not isinstance(tree, dict):
        yield prefix, "null" if tree is None else str(tree)
        return
    for key, value in tree.items():
        yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))


def run_tags() -> dict[str, str]:
    """Commit, versions, host, and the Slurm job if there is one."""
    tags = {f"version.{name}": version for name, version in versions().items()}
    tags |= {"host": socket.gethostname(), "mlflow.source.name": "dapo_megatron"}
    with suppress(KeyError, OSError):  # a container's user id may have no name
        tags["mlflow.user"] = getpass.getuser()
    if made_of := commit():
        tags |= {"commit": made_of, "mlflow.source.git.commit": made_of.removesuffix("-dirty")}
    if job := os.environ.get("SLURM_JOB_ID"):
        tags["slurm.job_id"] = job
    return tags


def _directory(config: Config) -> Path:
    return Path(config.run.directory).absolute()


@contextmanager
def _first_use_alone(config: Config, uri: str) -> Iterator[None]:
    """Runs that start together on a new database would each make its tables, and fail."""
    if not _is_local(uri):
        yield
        return
    directory = _directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_local(uri: str) -> bool:
    return uri.startswith("sqlite:")
