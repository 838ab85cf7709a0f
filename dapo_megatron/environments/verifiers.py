"""Environments of the package `verifiers`: their tasks are rows, and an episode is an agent, whose
reward is the rubric's.

`python -m dapo_megatron.environments.verifiers NAME LIMIT FILE` writes the tasks. Only processes of
environments import the package.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from statistics import fmean
from typing import Any

from dapo_megatron.cluster.processes import helper_environment
from dapo_megatron.rewards.process import INHERITED
from dapo_megatron.types import VERIFIERS, ConfigError

HARNESSES = Path(__file__).parent / "harnesses"
"""Harnesses of this package, besides those of verifiers."""
Task = tuple[str, dict[str, Any]]
"""A text that shows and names a task, and its data."""
REFUSED = 3
"""Exit status of the process that writes rows, if the file has the text of an error instead."""


def load_episodes(name: str) -> Callable[..., Awaitable[dict[str, float]]]:
    """Return the agent that runs episodes of the environment `verifiers:NAME:ARGS`. Raises
    ConfigError."""
    environment = _load(name)
    from verifiers.v1.configs.agent import agent_config_fields

    roles = agent_config_fields(environment.config)
    trained = [role for role, agent in roles.items() if agent.client is None]
    if len(trained) != 1:
        raise ConfigError(
            f"{_where(name)}: {len(trained)} of its agents ({', '.join(roles)}) would be the "
            "model, but one can be trained; give each of the others its own client in args, "
            "{ROLE: {client: {base_url: ...}, model: ...}}"
        )
    try:
        asyncio.run(_set_up(environment.config))
    except Exception as error:  # harnesses raise anything
        raise ConfigError(
            f"{_where(name)}: its harness cannot be installed: {_text(error)}; those of "
            "verifiers need uv on PATH and a package index, dapo_chat needs neither"
        ) from error

    async def run(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        return await _episode(environment, trained[0], row["task"], base_url)

    return run


async def _set_up(config: Any) -> None:
    """Install the programs of harnesses that run on this machine, once for all episodes."""
    from verifiers.v1.runtimes import SubprocessConfig, make_runtime
    from verifiers.v1.utils.loaders import load_harness

    for role, harness in config.agent_harnesses().items():
        settings = getattr(config, role).runtime
        if isinstance(settings, SubprocessConfig):
            runtime = make_runtime(settings)
            await runtime.start()
            try:
                await load_harness(harness).setup(runtime)
            finally:
                await runtime.stop()


async def _episode(
    environment: Any, role: str, task: dict[str, Any], base_url: str
) -> dict[str, float]:
    """Run an episode, and return its reward and metrics. Raises RuntimeError if it failed."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig

    kind = type(environment.taskset).task_type()
    data = kind.data_type().model_validate(task)
    client = EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(
            kind(data, environment.config.taskset.task), ModelContext("policy", client)
        )
    traces = [trace for trace in episode.traces if trace.agent.name in (role, "")]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not traces:
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "it has no trace"
        raise RuntimeError(f"the episode failed: {last}")
    numbers: dict[str, list[float]] = {}
    for trace in traces:
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward}
        for name, number in {**rewards, **trace.metrics, "reward": trace.reward}.items():
            if number is not None:
                numbers.setdefault(name, []).append(number)
    return {name: fmean(values) for name, values in numbers.items()}


def read_tasks(name: str, limit: int | None, variables: Collection[str] = ()) -> list[Task]:
    """Return the tasks of an environment.

    limit       maximum number of tasks; None: all
    variables   names of environment variables that the process gets besides INHERITED

    Raises ConfigError.
    """
    with tempfile.TemporaryDirectory(prefix="tasks-") as folder:
        file = Path(folder) / "tasks.jsonl"
        process = subprocess.run(
            [sys.executable, "-m", __name__, name, str(limit or ""), str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # environments print; stderr is inherited, for errors
            env=helper_environment((*INHERITED, *variables)),
            check=False,
        )
        if process.returncode == REFUSED:
            raise ConfigError(file.read_text())
        if process.returncode:
            raise ConfigError(f"{_where(name)}: its tasks cannot be read; see stderr")
        with file.open() as lines:
            return [(text, data) for text, data in map(json.loads, lines)]


def _write_tasks(name: str, limit: int | None, file: Path) -> None:
    environment = _load(name)
    tasks = environment.taskset
    if limit is not None:
        tasks = tasks.take(limit)
    if not tasks.bounded:
        raise ConfigError(f"{_where(name)}: it has no end of tasks; set limit of the source")
    try:
        with file.open("w") as lines:
            for number, task in enumerate(tasks):
                data = task.data
                texts = (data.name or data.id, data.prompt_text or data.description)
                text = "\n\n".join(filter(None, texts)) or f"task {number}"
                values = [text, data.model_dump(mode="json", exclude_defaults=True)]
                lines.write(json.dumps(values, allow_nan=False) + "\n")
    except Exception as error:  # environments raise anything
        raise ConfigError(
            f"{_where(name)}: its tasks cannot be read: {_text(error)}; does it need the "
            "network, or a variable that rewards.environment does not name?"
        ) from error


def _load(name: str) -> Any:
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            f"{_where(name)}: the package verifiers is missing; pip install 'verifiers>=0.3'"
        )
    package, args = _parts(name)
    try:
        import verifiers.v1.harnesses
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        verifiers.v1.harnesses.__path__.append(str(HARNESSES))
        taskset = {**(args.get("taskset") or {}), "id": package}
        return load_environment(resolve_env_config({**args, "taskset": taskset}))
    except Exception as error:  # environments raise anything
        raise ConfigError(
            f"{_where(name)}: cannot be loaded: {_text(error)}; see args, and whether its "
            "package is installed"
        ) from error


def _parts(name: str) -> tuple[str, dict[str, Any]]:
    """Return the package and the arguments of verifiers:NAME:ARGS."""
    package, _, args = name.removeprefix(VERIFIERS).partition(":")
    return package, json.loads(args)


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _where(name: str) -> str:
    return f"environment {{verifiers: {_parts(name)[0]}}}"


if __name__ == "__main__":
    _name, _limit, _path = sys.argv[1:]
    try:
        _write_tasks(_name, int(_limit) if _limit else None, Path(_path))
    except ConfigError as _error:
        Path(_path).write_text(str(_error))
        sys.exit(REFUSED)
