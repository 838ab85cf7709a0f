"""One run at MLflow, as the sender sees it: what each event of the spool does there.

Everything goes through a client and a run id; the process-wide "active run" is left alone. Each
event may come twice, and does no harm the second time: a metric with the same time, step and value
is one metric to MLflow.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dapo_megatron.files import open_lock, try_lock, write_json
from dapo_megatron.tracking import spool
from dapo_megatron.tracking.spool import Cursor, Event
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
MAX_NAMES = 1000
"""Metrics of one run. A server gets slow with many, and a name per prompt is always a mistake."""
CHECKPOINTS = "checkpoints.json"

Item = TypeVar("Item")


class Target(NamedTuple):
    """Where a spool goes."""

    server: str
    """Without a password."""
    run_id: str


class MlflowRun:
    """Made without MLflow being there; found or created by the first `target` that reaches it.

    folder: the spool's, in the run's folder.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._run_folder = folder, folder / ".."
        self._say = say
        self.is_open = threading.Event()
        """Set once the run is known."""
        self._one_at_a_time = threading.Lock()
        self._target: Target | None = None
        self._client: MlflowClient = None
        self._run_id = ""
        self._names: set[str] = set()
        self._left_out: set[str] = set()

    def target(self) -> Target:
        """The run, looked for (or made) at the first call and at the first one after `forget`.
        Raises whatever MLflow's client raises; DapoError for a spool without any beginning."""
        with self._one_at_a_time:  # two lanes, one run
            if self._target is None:
                begin = spool.beginning(self._folder)
                if begin is None:
                    raise DapoError(f"{self._folder.resolve()}: no attempt has a beginning")
                self._target = self._open(begin)
            self.is_open.set()
            return self._target

    def forget(self) -> None:
        """Something went wrong, perhaps because the run is not there any more."""
        with self._one_at_a_time:
            self._target = None

    def deliver(self, chunk: Sequence[Event], number: int, cursor: Cursor) -> None:
        """One event, or the metrics of some steps, of attempt `number`; `cursor` is told what
        MLflow now knows. Raises whatever MLflow's client raises, if it has to be tried again."""
        kind = chunk[0]["kind"]
        if kind == "begin":
            self._begin(chunk[0], number, cursor)
        elif kind == "metrics":
            self._metrics(chunk, cursor)
        elif kind == "describe":
            self._describe(chunk[0]["text"])
        elif kind == "end":
            self._end(chunk[0]["status"], chunk[0]["time"], cursor)
        else:
            self._file(chunk[0], cursor)

    # ------------------------------------------------------------------------ the run

    def _open(self, begin: Event) -> Target:
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or begin["uri"]
        with _first_use_alone(uri, Path(begin["directory"])):
            self._client = MlflowClient(tracking_uri=uri)
            run = self._find(begin) or self._create(uri, begin)
        target = Target(without_password(uri), run.info.run_id)
        if not target.run_id:
            raise DapoError("what answers there is no MLflow: it made a run without an id")
        write_json(
            self._run_folder / spool.RUN_FILE,
            {**target._asdict(), "experiment_id": run.info.experiment_id},
            durable=False,
        )
        if target.run_id != self._run_id:
            self._say(f"run {target.run_id} at {target.server}")
        self._run_id, self._names = target.run_id, set(run.data.metrics)
        return target

    def _find(self, begin: Event) -> Run | None:
        """The run that an earlier attempt, or an earlier sender, made; None if this server never
        had it, or lost it."""
        known = spool.known(self._run_folder / spool.RUN_FILE).get("run_id")
        if known and (run := self._get(known)):
            return run
        experiment = self._client.get_experiment_by_name(begin["experiment"])
        if experiment is not None:
            same = f"tags.`{RUN_TAG}` = '{begin['run']}'"
            if found := self._client.search_runs([experiment.experiment_id], same, max_results=1):
                return found[0]
        return self._get(begin["run"])  # as checkpoints named it before there was a tag

    def _get(self, run_id: str) -> Run | None:
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        return None if run.info.lifecycle_stage == "deleted" else run

    def _create(self, uri: str, begin: Event) -> Run:
        from mlflow.exceptions import MlflowException

        name = begin["experiment"]
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            # A server knows where its files go; a local database would put them in the working
            # folder.
            files = None
            if uri.startswith("sqlite:"):
                files = (Path(begin["directory"]) / "mlartifacts").as_uri()
            try:
                self._client.create_experiment(name, artifact_location=files)
            except MlflowException as error:  # another run was faster
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)
        return self._client.create_run(
            experiment.experiment_id,
            start_time=next(spool.events(self._folder))[0]["time"],
            run_name=begin["name"],
            tags={RUN_TAG: begin["run"]},
        )

    # ------------------------------------------------------------------------ facts

    def _begin(self, begin: Event, number: int, cursor: Cursor) -> None:
        """Parameters cannot change in MLflow: one that differs from the first start becomes a tag
        `resumed.<key>`."""
        from mlflow.entities import Param, RunTag

        if cursor.begun not in (0, number):
            self._client.set_terminated(self._run_id, "KILLED", cursor.time)
        run = self._client.get_run(self._run_id)
        known, tags, params = run.data.params, {RUN_TAG: begin["run"], **begin["tags"]}, []
        for key, value in begin["params"].items():
            if key not in known:
                params.append(Param(key[:MAX_NAME], value))
            elif known[key] != value:
                tags[f"resumed.{key}"] = value
        self._send(params, lambda some: self._log(params=some), cursor, MAX_PER_CALL)
        self._send(
            [RunTag(key[:MAX_NAME], value) for key, value in tags.items()],
            lambda some: self._log(tags=some),
            cursor,
            MAX_PER_CALL,
        )
        if run.info.status != "RUNNING" or cursor.begun not in (0, number):
            self._client.update_run(self._run_id, status="RUNNING")
        cursor.begun = number

    def _metrics(self, chunk: Sequence[Event], cursor: Cursor) -> None:
        from mlflow.entities import Metric

        points = [
            Metric(taken, value, event["time"], event["step"])
            for event in chunk
            for name, value in event["values"].items()
            if (taken := self._take_name(name, cursor))
        ]
        self._send(points, lambda some: self._log(metrics=some), cursor, 1000)

    def _describe(self, text: str) -> None:
        """The description is the person's who wrote one: ours is marked as ours."""
        tags = self._client.get_run(self._run_id).data.tags
        if tags.get(DESCRIPTION, "") == tags.get(OUR_DESCRIPTION, ""):
            self._client.set_tag(self._run_id, DESCRIPTION, text)
            self._client.set_tag(self._run_id, OUR_DESCRIPTION, text)

    def _end(self, status: str, time: int, cursor: Cursor) -> None:
        self._client.set_terminated(self._run_id, status, time)
        cursor.begun = 0

    def _take_name(self, name: str, cursor: Cursor) -> str | None:
        """`name` as MLflow takes it, or None if it is too long or there are too many."""
        taken = metric_name(name)
        if taken in self._names:
            return taken
        if len(taken) <= MAX_NAME and len(self._names) < MAX_NAMES:
            self._names.add(taken)
            return taken
        if taken not in self._left_out:
            cursor.left_out += 1
            if len(taken) > MAX_NAME:
                self._say(f"LEFT OUT: metric {name}: longer than {MAX_NAME} characters")
            elif all(len(other) > MAX_NAME for other in self._left_out):
                self._say(f"LEFT OUT: {name} and more: {MAX_NAMES} metrics are the most of a run")
            self._left_out.add(taken)
        return None

    def _log(self, **what: Any) -> None:
        self._client.log_batch(self._run_id, synchronous=True, **what)

    def _send(
        self,
        items: Sequence[Item],
        send: Callable[[Sequence[Item]], None],
        cursor: Cursor,
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
                    self._send(some, send, cursor, (len(some) + 1) // 2)
                    continue
                cursor.left_out += 1
                self._say(f"LEFT OUT: {some[0]}: {error.message}")

    def _is_refusal(self, error: Any) -> bool:
        """Whether the server is well, and this alone is wrong."""
        if error.error_code != "INVALID_PARAMETER_VALUE":
            return False
        return bool(self._client.get_run(self._run_id).info.lifecycle_stage == "active")

    # ------------------------------------------------------------------------ files

    def _file(self, event: Event, cursor: Cursor) -> None:
        path = self._run_folder / event["path"]
        try:
            if event["kind"] == "artifact":
                self._client.log_artifact(self._run_id, str(path), event["folder"] or None)
            elif event["kind"] == "checkpoint":
                self._checkpoint(event, path)
            else:
                self._client.set_tag(self._run_id, f"data.{event['name']}.sha256", sha256(path))
        except FileNotFoundError as error:
            if path.exists():
                raise
            cursor.left_out += 1
            self._say(f"LEFT OUT: {event['path']}: {error}")

    def _checkpoint(self, event: Event, path: Path) -> None:
        """checkpoints.json lists every one that was published; of those that are gone by now,
        without what only the files could say."""
        manifest, export = path / "manifest.json", path / "hf"
        entry = {
            "step": event["step"],
            "time": event["time"],
            "path": event["path"],
            "bytes": _num_bytes(path) if path.exists() else None,
            "manifest_sha256": sha256(manifest) if manifest.exists() else None,
            "hf_export": f"{event['path']}/hf" if export.exists() else None,
        }
        listed = self._folder / CHECKPOINTS
        others = spool.known(listed).get("checkpoints", [])
        # By name: of one step there may be one from the middle of the next (step_000002_open).
        others = [other for other in others if other["path"] < event["path"]]
        write_json(listed, {"checkpoints": [*others, entry]}, durable=False)
        self._client.log_artifact(self._run_id, str(listed))
        self._client.set_tag(self._run_id, "checkpoint.newest", event["path"])


def metric_name(name: str) -> str:
    """`name` as MLflow takes it: avg@4 becomes avg_at_4, other strange characters `_`."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


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
