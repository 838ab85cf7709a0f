"""One run at MLflow: what the mirror (mirror.py) does there.

Everything goes through a client and a run id; the process-wide "active run" is left alone. Each
call may be repeated, and does no harm the second time: a metric with the same time, step and value
is one metric to MLflow. Methods raise whatever MLflow's client raises.
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
    MirrorState,
    Row,
    known,
    parameters,
)
from dapo_megatron.tracking.uri import without_password
from dapo_megatron.types import DapoError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_TAG = "dapo_megatron.run"
"""Tag of the MLflow run: our own name of it, known before there is a run."""
DESCRIPTION = "mlflow.note.content"
"""Tag that MLflow shows as the description of a run."""
OUR_DESCRIPTION = "dapo_megatron.description"
"""What we made of it: another one is a person's."""
MAX_PER_CALL = 100
"""Parameters, or tags: MLflow's own limit."""
MAX_NAME = 250
"""Characters of a metric's or parameter's name: MLflow's own limit."""
MAX_SHOWN = 3
"""Metrics left out that the log names."""
MAX_NAMES = 1000
"""Metrics of one run. A server gets slow with many, and a name per prompt is always a mistake."""

Item = TypeVar("Item")


class MlflowRun:
    """Made without MLflow being there; found or created by the first `open` that reaches it.

    home       the run's folder: where it was when this process started
    config     of the newest start
    """

    def __init__(self, state: MirrorState, home: Path, config: Config) -> None:
        self._state, self._home, self._config = state, home, config
        provenance = known(state.folder / PROVENANCE)
        self._tags: dict[str, str] = {RUN_TAG: state.cursor.run, **provenance.get("tags", {})}
        self._is_open = False
        self._client: MlflowClient = None
        self._run_id = ""
        self._names: set[str] = set()
        self._left_out: set[str] = set()

    def open(self) -> None:
        """Look for the run, or make it, at the first call and at the first one after `forget`. Tell
        it of the start."""
        if self._is_open:
            return
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        uri = os.environ["MLFLOW_TRACKING_URI"]
        with _first_use_alone(uri, self._home.parent):
            self._client = MlflowClient(tracking_uri=uri)
            run = self._find() or self._create(uri)
        server, run_id = without_password(uri), run.info.run_id
        if not run_id:
            raise DapoError("what answers there is no MLflow: it made a run without an id")
        entry = {"server": server, "run_id": run_id, "experiment_id": run.info.experiment_id}
        write_json(self._state.folder / RUN_FILE, entry, durable=False)
        if run_id != self._run_id:
            self._state.say(f"run {run_id} at {server}")
        self._run_id, self._names = run_id, set(run.data.metrics)
        self._state.aim(server, run_id)
        if self._state.cursor.begun < self._state.number:
            self._begin(run)
        self._is_open = True

    def forget(self) -> None:
        """Something went wrong, perhaps because the run is not there any more."""
        self._is_open = False

    def end(self) -> None:
        """Tell MLflow how the last start that it knows ended."""
        status, ended = self._state.end()
        self._client.set_terminated(self._run_id, status, ended)
        self._state.save(closed=self._state.cursor.begun)

    # ------------------------------------------------------------------------ the run

    def _find(self) -> Run | None:
        """The run that an earlier start made; None if this server never had it, or lost it."""
        run_id = known(self._state.folder / RUN_FILE).get("run_id")
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
            # A server knows where its files go; a local database would put them in the working
            # folder.
            files = None
            if uri.startswith("sqlite:"):
                files = (self._home.parent / "mlartifacts").as_uri()
            try:
                self._client.create_experiment(name, artifact_location=files)
            except MlflowException as error:  # another run was faster
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)
        return self._client.create_run(
            experiment.experiment_id,
            start_time=int(1000 * self._state.starts()[0]["began"]),
            run_name=self._config.run.name,
            tags={RUN_TAG: self._state.cursor.run},
        )

    def _begin(self, run: Run) -> None:
        """Tell MLflow of this start, and before it how an earlier one ended. Parameters cannot
        change in MLflow: one that differs from the first start becomes a tag `resumed.<key>`."""
        from mlflow.entities import Param, RunTag

        cursor = self._state.cursor
        if was_open := cursor.begun > cursor.closed:
            self.end()
        now, known_params = parameters(self._config), run.data.params
        params = now | cursor.params | known_params
        tags = self._tags | {
            f"resumed.{key}": value for key, value in now.items() if params[key] != value
        }
        self._send(
            [Param(key[:MAX_NAME], params[key]) for key in params.keys() - known_params.keys()],
            lambda some: self._log(params=some),
            MAX_PER_CALL,
        )
        self._send(
            [RunTag(key[:MAX_NAME], value) for key, value in tags.items()],
            lambda some: self._log(tags=some),
            MAX_PER_CALL,
        )
        if was_open or run.info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        self._state.begin()

    # ------------------------------------------------------------------------ metrics

    def metrics(self, rows: Sequence[Row]) -> None:
        """Send the metrics of some steps."""
        from mlflow.entities import Metric

        points = [
            Metric(taken, value, row.time, row.step)
            for row in rows
            for name, value in row.values.items()
            if (taken := self._take_name(name))
        ]
        self._send(points, lambda some: self._log(metrics=some), MAX_METRICS)

    def _take_name(self, name: str) -> str | None:
        """`name` as MLflow takes it, or None if it is too long or there are too many."""
        taken = metric_name(name)
        if taken in self._names:
            return taken
        if len(taken) <= MAX_NAME and len(self._names) < MAX_NAMES:
            self._names.add(taken)
            return taken
        if taken not in self._left_out:
            self._left_out.add(taken)
            self._state.cursor.left_out += 1
            if len(self._left_out) <= MAX_SHOWN:
                why = f"{MAX_NAMES} metrics of a run, {MAX_NAME} characters of a name are the most"
                self._state.say(f"LEFT OUT: {name}: {why}")
        return None

    def _log(self, **what: Any) -> None:
        self._client.log_batch(self._run_id, synchronous=True, **what)

    def _send(
        self,
        items: Sequence[Item],
        send: Callable[[Sequence[Item]], None],
        most: int,
    ) -> None:
        """Send at most `most` at a time; one that MLflow refuses for what it is, is left out."""
        from mlflow.exceptions import MlflowException

        rest = iter(items)
        while some := list(islice(rest, most)):
            try:
                send(some)
            except MlflowException as error:
                if not self._is_refusal(error):
                    raise
                if len(some) > 1:
                    self._send(some, send, (len(some) + 1) // 2)
                    continue
                self._state.cursor.left_out += 1
                self._state.say(f"LEFT OUT: {some[0]}: {error.message}")

    def _is_refusal(self, error: Any) -> bool:
        """Whether the server is well, and this alone is wrong."""
        if error.error_code != "INVALID_PARAMETER_VALUE":
            return False
        return bool(self._client.get_run(self._run_id).info.lifecycle_stage == "active")

    # ------------------------------------------------------------------------ files

    def file(self, name: str, folder: str) -> None:
        """Keep a file of the run's folder. The report becomes the run's description."""
        path = self._state.folder / name
        self._client.log_artifact(self._run_id, str(path), folder or None)
        if name == CHECKPOINTS:
            self.tag("checkpoint.newest", known(path)["checkpoints"][-1]["path"])
        if name == REPORT:
            self._describe(
                f"{REPORT}, among the artifacts, shows how this run went: a page that needs no "
                f"network. On the run's machine it is {self._home / REPORT}"
            )

    def tag(self, name: str, value: str) -> None:
        """Set a tag."""
        self._client.set_tag(self._run_id, name, value)

    def _describe(self, text: str) -> None:
        """Set the description. One that a person wrote stays: ours is marked as ours."""
        tags = self._client.get_run(self._run_id).data.tags
        if tags.get(DESCRIPTION, "") == tags.get(OUR_DESCRIPTION, ""):
            self.tag(DESCRIPTION, text)
            self.tag(OUR_DESCRIPTION, text)


def metric_name(name: str) -> str:
    """`name` as MLflow takes it: avg@4 becomes avg_at_4, other strange characters `_`."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


@contextmanager
def _first_use_alone(uri: str, directory: Path) -> Iterator[None]:
    """Runs that start together on a new database would each make its tables, and fail."""
    if not uri.startswith("sqlite:"):
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "mlflow.lock"
    with open_lock(path) as lock:
        while not try_lock(lock, path):
            time.sleep(0.1)
        yield
