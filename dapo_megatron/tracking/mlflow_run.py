"""The calls that the mirror (mirror.py) makes for one MLflow run.

All calls use a client and a run id; the process-wide "active run" is not touched. Every call is
idempotent: MLflow stores a metric with the same time, step and value once. Methods raise whatever
MLflow's client raises.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_megatron.config import Config
from dapo_megatron.files import open_lock, try_lock, write_json
from dapo_megatron.tracking.mirror_state import (
    CHECKPOINTS,
    MAX_METRICS,
    PROVENANCE,
    REPORT,
    RUN_FILE,
    MetricsRow,
    MirrorState,
    parameters,
    read_or_empty,
)
from dapo_megatron.tracking.uri import without_password
from dapo_megatron.types import ConfigError, DapoError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_TAG = "dapo_megatron.run"
"""Tag of the MLflow run: this project's id of the run, known before the MLflow run exists."""
DESCRIPTION = "mlflow.note.content"
"""Tag that MLflow shows as the description of a run."""
OUR_DESCRIPTION = "dapo_megatron.description"
"""Tag with the description that this program wrote. If it differs from DESCRIPTION, a user has
edited the description."""
MAX_PER_CALL = 100
"""Parameters, or tags, per call: MLflow's limit."""
MAX_NAME = 250
"""Length of a metric or parameter name in characters: MLflow's limit."""
MAX_SHOWN = 3
"""Number of dropped metric names that the log lists."""
MAX_NAMES = 1000
"""Number of metric names per run. Many names slow a server down, and a metric name per prompt is
always a mistake."""

Item = TypeVar("Item")


class MlflowRun:
    """An MLflow run, looked up or created by the first `open` that reaches the server.

    home       path of the run's folder when this process started
    config     config of the newest start
    """

    def __init__(self, state: MirrorState, home: Path, config: Config) -> None:
        self._state, self._home, self._config = state, home, config
        provenance = read_or_empty(state.folder / PROVENANCE)
        self._tags: dict[str, str] = {RUN_TAG: state.cursor.run, **provenance.get("tags", {})}
        self._is_open = False
        self._client: MlflowClient = None
        self._run_id = ""
        self._names: set[str] = set()
        self._left_out: set[str] = set()

    def open(self) -> None:
        """Find or create the run and report this start to it. Does nothing if the run is open;
        `forget` closes it."""
        if self._is_open:
            return
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        uri = os.environ["MLFLOW_TRACKING_URI"]
        try:
            with _database_lock(uri, self._home.parent):
                self._client = MlflowClient(tracking_uri=uri)
                run = self._find() or self._create(uri)
        except Exception as error:
            if keys := keys_to_fix(error):
                where = (
                    f"experiment {self._config.tracking.experiment!r} at {without_password(uri)}"
                )
                reason = (str(error).splitlines() or [""])[0]
                raise ConfigError(f"{where}: {reason}. To fix it, change {keys}") from error
            raise
        server, run_id = without_password(uri), run.info.run_id
        if not run_id:
            raise DapoError(
                "the server at MLFLOW_TRACKING_URI is not MLflow: it created a run without an id"
            )
        entry = {"server": server, "run_id": run_id, "experiment_id": run.info.experiment_id}
        write_json(self._state.folder / RUN_FILE, entry, durable=False)
        if run_id != self._run_id:
            self._state.log(f"run {run_id} at {server}")
        self._run_id, self._names = run_id, set(run.data.metrics)
        self._state.aim(server, run_id)
        if self._state.cursor.begun < self._state.number:
            self._begin(run)
        self._is_open = True

    def forget(self) -> None:
        """Make the next `open` look the run up again, because an error may mean that it is gone."""
        self._is_open = False

    def end(self) -> None:
        """Set the status and end time of the last start that was reported to MLflow."""
        status, ended = self._state.end()
        self._client.set_terminated(self._run_id, status, ended)
        self._state.save(closed=self._state.cursor.begun)

    # ------------------------------------------------------------------------ the run

    def _find(self) -> Run | None:
        """Return the run that an earlier start created; None if this server does not have it."""
        run_id = read_or_empty(self._state.folder / RUN_FILE).get("run_id")
        if run_id and (run := self._get(run_id)):
            return run
        experiment = self._client.get_experiment_by_name(self._config.tracking.experiment)
        if experiment is None:
            return None
        same = f"tags.`{RUN_TAG}` = '{self._state.cursor.run}'"
        return next(
            iter(self._client.search_runs([experiment.experiment_id], same, max_results=1)), None
        )

    def _get(self, run_id: str) -> Run | None:
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        return None if run.info.lifecycle_stage == "deleted" else run

    def _create(self, uri: str) -> Run:
        from mlflow.exceptions import MlflowException

        name = self._config.tracking.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            # A server has an artifact location; a local database defaults to the working folder.
            artifacts = None
            if uri.startswith("sqlite"):
                artifacts = (self._home.parent / "mlartifacts").as_uri()
            try:
                self._client.create_experiment(name, artifact_location=artifacts)
            except MlflowException as error:  # another run created it first
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)
        if experiment.lifecycle_stage == "deleted":
            raise ConfigError(
                f"tracking.experiment: {name!r} was deleted in MLflow ({without_password(uri)}). "
                f"Choose another name, or run `mlflow experiments restore --experiment-id "
                f"{experiment.experiment_id}`"
            )
        return self._client.create_run(
            experiment.experiment_id,
            start_time=int(1000 * self._state.starts()[0]["began"]),
            run_name=self._config.run.name,
            tags={RUN_TAG: self._state.cursor.run},
        )

    def _begin(self, run: Run) -> None:
        """Report this start to MLflow, after the end of an earlier start that is still open there.
        MLflow's parameters cannot change: a value that differs from the first start's becomes a tag
        `resumed.<key>`."""
        from mlflow.entities import Param, RunTag

        cursor = self._state.cursor
        if was_open := cursor.begun > cursor.closed:
            self.end()
        current, known_params = parameters(self._config), run.data.params
        params = current | cursor.params | known_params
        tags = self._tags | {
            f"resumed.{key}": value for key, value in current.items() if params[key] != value
        }
        self._send(
            [Param(key[:MAX_NAME], params[key]) for key in params.keys() - known_params.keys()],
            lambda batch: self._log(params=batch),
            MAX_PER_CALL,
        )
        self._send(
            [RunTag(key[:MAX_NAME], value) for key, value in tags.items()],
            lambda batch: self._log(tags=batch),
            MAX_PER_CALL,
        )
        if was_open or run.info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        self._state.begin()

    # ------------------------------------------------------------------------ metrics

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        """Send the metrics of some rollout steps."""
        from mlflow.entities import Metric

        points = [
            Metric(valid_name, value, row.time, row.step)
            for row in rows
            for name, value in row.values.items()
            if (valid_name := self._register_name(name))
        ]
        self._send(points, lambda batch: self._log(metrics=batch), MAX_METRICS)

    def _register_name(self, name: str) -> str | None:
        """Return `name` as MLflow accepts it; None if it is too long or the run has MAX_NAMES."""
        valid_name = metric_name(name)
        if valid_name in self._names:
            return valid_name
        if len(valid_name) <= MAX_NAME and len(self._names) < MAX_NAMES:
            self._names.add(valid_name)
            return valid_name
        if valid_name not in self._left_out:
            self._left_out.add(valid_name)
            self._state.cursor.left_out += 1
            if len(self._left_out) <= MAX_SHOWN:
                limits = f"{MAX_NAMES} metric names per run, {MAX_NAME} characters per name"
                self._state.log(f"NOT SENT: {name}: the limits are {limits}")
        return None

    def _log(self, **batch: Any) -> None:
        self._client.log_batch(self._run_id, synchronous=True, **batch)

    def _send(
        self,
        items: Sequence[Item],
        send: Callable[[Sequence[Item]], None],
        batch_size: int,
    ) -> None:
        """Send items in batches. A refused batch is halved until only the invalid item is dropped
        and logged."""
        from mlflow.exceptions import MlflowException

        rest = iter(items)
        while batch := list(islice(rest, batch_size)):
            try:
                send(batch)
            except MlflowException as error:
                if not self._is_refusal(error):
                    raise
                if len(batch) > 1:
                    self._send(batch, send, (len(batch) + 1) // 2)
                    continue
                self._state.cursor.left_out += 1
                self._state.log(f"NOT SENT: {batch[0]}: {error.message}")

    def _is_refusal(self, error: Any) -> bool:
        """Return True if the value itself is invalid: the run is still active on the server."""
        if error.error_code != "INVALID_PARAMETER_VALUE":
            return False
        return bool(self._client.get_run(self._run_id).info.lifecycle_stage == "active")

    # ------------------------------------------------------------------------ files

    def file(self, name: str, folder: str) -> None:
        """Upload a file of the run's folder to an artifact folder ("": the root). The description
        of the run then points to an uploaded report."""
        path = self._state.folder / name
        self._client.log_artifact(self._run_id, str(path), folder or None)
        if name == CHECKPOINTS:
            self.tag("checkpoint.newest", read_or_empty(path)["checkpoints"][-1]["path"])
        if name == REPORT:
            self._describe(
                f"{REPORT}, among the artifacts, is this run's report: one page that needs no "
                f"network. On the run's machine it is {self._home / REPORT}"
            )

    def tag(self, name: str, value: str) -> None:
        """Set a tag of the run."""
        self._client.set_tag(self._run_id, name, value)

    def _describe(self, text: str) -> None:
        """Set the description, unless a user has edited it."""
        tags = self._client.get_run(self._run_id).data.tags
        if tags.get(DESCRIPTION, "") == tags.get(OUR_DESCRIPTION, ""):
            self.tag(DESCRIPTION, text)
            self.tag(OUR_DESCRIPTION, text)


def keys_to_fix(error: Exception) -> str:
    """Return what the user has to change if an error of MLflow at the lookup of the run is
    permanent; "" if a retry may help."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import ArgumentError

    if isinstance(error, ArgumentError | ImportError):
        return "MLFLOW_TRACKING_URI"  # not the URL of a database, or its driver is missing
    code = error.error_code if isinstance(error, MlflowException) else ""
    if code in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED"):
        return "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    if code != "INVALID_PARAMETER_VALUE":
        return ""
    if "MLFLOW_ALLOW_FILE_STORE" in str(error):
        return "MLFLOW_TRACKING_URI to sqlite:///FILE, or set MLFLOW_ALLOW_FILE_STORE=true"
    return "MLFLOW_TRACKING_URI or tracking.experiment"


def metric_name(name: str) -> str:
    """Return `name` as MLflow accepts it: `@` becomes `_at_`, other invalid characters `_`."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


@contextmanager
def _database_lock(uri: str, directory: Path) -> Iterator[None]:
    """Serialize the first use of a SQLite database. Runs that start together would each create its
    tables, and fail."""
    if not uri.startswith("sqlite"):
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "mlflow.lock"
    with open_lock(path) as lock:
        while not try_lock(lock, path):
            time.sleep(0.1)
        yield
