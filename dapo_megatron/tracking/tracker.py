"""A tracker made of other trackers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from dapo_megatron.protocols import Tracker


class CompositeTracker:
    """Hands everything to each of its trackers, in order: local files before servers.

    An error stops the ones behind it, so that what is local is written when a server fails;
    `finish` reaches all of them and raises afterwards.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout step."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a file with the run, under `folder`."""
        for tracker in self._trackers:
            tracker.artifact(path, folder)

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.finish, status)
