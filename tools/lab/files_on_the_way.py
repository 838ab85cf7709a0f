"""Count the files of the package that three paths through a run use.

    python tools/lab/files_on_the_way.py model_configs/tiny_cpu.yaml

A file counts if one of its functions is called, in the process of a run with one rank:

start   from the command line to the first line of the training loop
token   in a rollout step, from a prompt to the tokens that the optimizer gets
weight  in a sync, from the optimizer's parameters to the verified engine

The last line is JSON with the numbers. docs/architecture.md shows them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

SMALL = (
    "run.name=files_on_the_way",
    "run.processes=1",
    "policy.tensor_parallel=1",
    "train.rollout_steps=1",
    "tracking.mlflow=false",
    "tracking.report=false",
)
START, TOKEN, WEIGHT = "start", "token", "weight"


class Tracer:
    """Profiler that collects, by path, the files of the package with a called function."""

    def __init__(self, package: Path) -> None:
        self.files: dict[str, set[str]] = {START: set(), TOKEN: set(), WEIGHT: set()}
        self.way: str | None = START
        self._package = f"{package}{os.sep}"

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Handle an event of sys.setprofile."""
        code = frame.f_code
        if (
            event == "call"
            and self.way
            and code.co_filename.startswith(self._package)
            and code.co_flags & CO_NEWLOCALS  # not set for the code of a module
            and not _is_class_body(frame)
        ):
            self.files[self.way].add(code.co_filename.removeprefix(self._package))

    def during(self, way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, with its calls counted on this path."""

        def traced(*arguments: Any, **options: Any) -> Any:
            outer, self.way = self.way, way
            try:
                return function(*arguments, **options)
            finally:
                self.way = outer

        return traced


def _is_class_body(frame: FrameType) -> bool:
    return "__module__" in frame.f_code.co_names and "__qualname__" in frame.f_code.co_names


def main(config: Path, overrides: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run one step of CONFIG and print the files of each path."""
    sys.path.insert(0, str(Path.cwd()))
    terminal = os.dup(1)  # a run redirects its output to a log
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    import dapo_megatron

    tracer = Tracer(Path(dapo_megatron.__file__).parent)
    sys.setprofile(tracer)
    threading.setprofile(tracer)
    from dapo_megatron import __main__ as program
    from dapo_megatron import loop
    from dapo_megatron.bridge.sync import WeightSync

    WeightSync.__call__ = tracer.during(WEIGHT, WeightSync.__call__)  # type: ignore[method-assign]
    loop.train_step = tracer.during(TOKEN, loop.train_step)
    loop_train = loop.train

    def train(*arguments: Any, **options: Any) -> Any:
        tracer.way = None
        return loop_train(*arguments, **options)

    loop.train = train
    sys.argv = ["dapo_megatron", "train", str(config), *SMALL, *(overrides or [])]
    try:
        program.main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    with os.fdopen(terminal, "w") as out:
        for way, files in tracer.files.items():
            print(f"\n{way}: {len(files)} files", *sorted(files), sep="\n  ", file=out)
        print(json.dumps({way: len(files) for way, files in tracer.files.items()}), file=out)


if __name__ == "__main__":
    typer.run(main)
