"""Check a run and submit it to Slurm, as one job or a chain of jobs.

    python slurm/submit.py CONFIG --nodes 16 --time 24:00:00 [key.path=value ...]
    python slurm/submit.py CONFIG --nodes 16 --time 24:00:00 --chain 5 --container /images/a.sqsh
    python slurm/submit.py CONFIG --nodes 2 --time 1:00:00 --dry-run

It prints the plan (ranks, layout, engines, memory, logs, the sbatch command) and its problems. If
there are any, it submits nothing. --dry-run needs no Slurm: without the model's folder it uses
published dimensions and only lists the other missing files. Paths in a config are relative to the
checkout, where the job runs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dapo_megatron.config import Config, DatasetsSource, FileSource
from dapo_megatron.config.file import load_config
from dapo_megatron.model import planned_architecture, read_architecture
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.layout import check_layout, describe, policy_ranks
from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from dapo_megatron.plan.estimate import NodeSpec

CHECKOUT = Path(__file__).resolve().parents[1]
SCRIPT = CHECKOUT / "slurm/train.sbatch"
MARGIN_SECONDS = 60
"""Seconds added to run.stop_seconds, for MLflow and for Slurm to end the step."""
LOGS = Path(os.environ.get("DAPO_LOGS", "slurm_logs"))
"""Relative to the checkout, as in the job script."""
HEADER_LEAD_SECONDS = 300
"""Seconds before the limit at which the header of train.sbatch asks for SIGUSR1."""
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TIME = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII
)


@dataclass(frozen=True)
class Request:
    """Job that the command line asks for."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    time: str
    name: str
    options: dict[str, str]
    """Options that are passed to sbatch unchanged: account, partition, qos, ..."""
    chain: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    """DAPO_* variables of the job script."""
    arguments: tuple[str, ...] = ()
    """CONFIG, overlays and overrides."""
    gpu_memory_gib: float = 80.0
    """Memory of one GPU, for the memory plan."""
    host_memory_gib: float = 1024.0
    """Host memory of one node, for the memory plan."""

    @property
    def num_tasks(self) -> int:
        return self.nodes * self.tasks_per_node


def seconds_of(time: str) -> int | None:
    """Convert Slurm's --time to seconds. UNLIMITED is None. Raises ConfigError.

    Example: seconds_of("1-12") == 129600, seconds_of("90") == 5400, seconds_of("2:30:00") == 9000
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = TIME.fullmatch(time)
    if match is None:
        raise ConfigError(
            f"--time: {time} is not a time in Slurm's format; write minutes, "
            "hours:minutes:seconds, days-hours or days-hours:minutes:seconds"
        )
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"] is not None:
        return int(match["days"]) * 86400 + first * 3600 + second * 60 + third
    if match["third"] is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


# ------------------------------------------------------------------ checks


def problems(config: Config, request: Request, *, elsewhere: bool = False) -> Iterator[str]:
    """Yield everything that would make the job fail or lose work.

    `elsewhere` means that the run's files are on another machine. Then published dimensions are
    used for the model, and files are not checked.
    """
    try:
        arch = planned_architecture(config) if elsewhere else read_architecture(config)
        check_compatibility(config, arch)
        check_layout(config, arch, policy_ranks(config, request.num_tasks))
    except ConfigError as error:
        yield str(error)
    yield from _time_problems(config, request)
    yield from _step_problems(config, request)
    if not elsewhere:
        yield from missing_files(config, request.environment)


def _node_spec(request: Request) -> NodeSpec:
    from dapo_megatron.plan.estimate import NodeSpec

    return NodeSpec(request.gpus_per_node, request.gpu_memory_gib, request.host_memory_gib)


def _time_problems(config: Config, request: Request) -> Iterator[str]:
    try:
        limit = seconds_of(request.time)
    except ConfigError as error:
        yield str(error)
        return
    if limit is not None and limit <= lead_seconds(config):
        yield (
            f"--time: {request.time} is {limit} s, and {lead_seconds(config)} s before its end the "
            "run already saves and stops; increase --time, or lower run.stop_seconds"
        )


def _step_problems(config: Config, request: Request) -> Iterator[str]:
    engine, tasks = config.engine_tensor_parallel, request.tasks_per_node
    if not request.gpus_per_node and tasks % engine:
        yield (
            f"engine.tensor_parallel: the {engine} ranks of an engine without GPUs share memory, "
            f"so they must be on one node, but a node has {tasks} ranks; use "
            f"--tasks-per-node {engine}, or engine.tensor_parallel=1"
        )
    elif config.separate_gpus and tasks % engine:
        yield (
            f"engine.tensor_parallel: {engine} does not divide the {tasks} GPUs of a node, and an "
            "engine on other GPUs is on one node"
        )
    elif config.separate_gpus % tasks:
        yield (
            f"engine.replicas: {config.engine.replicas} engines of {engine} "
            f"(engine.tensor_parallel) do not fill whole nodes of {tasks}, and a node has trainers "
            f"or engines; use a multiple of {tasks // engine}"
        )
    if config.resume != "auto" and request.chain > 1:
        yield (
            f"resume: {config.resume}; every job of a chain would start there. Leave it out: then "
            "the job script resumes from the newest checkpoint"
        )


def missing_files(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the data, images, environments and folders that the job needs and that are missing."""
    sources = [
        ("data.train", config.data.train),
        ("evaluation.sets", config.evaluation.sets),
    ]
    for key, sources_of_key in sources:
        for number, source in enumerate(sources_of_key):
            if isinstance(source, FileSource) and not Path(source.path).is_file():
                yield f"{key}.{number}.path: no file {source.path} (from {CHECKOUT})"
            elif isinstance(source, DatasetsSource) and _is_missing_folder(source.path):
                yield f"{key}.{number}.path: no folder {source.path} (from {CHECKOUT})"
    if image := environment.get("DAPO_CONTAINER"):
        # A name that is not a path names an image of a registry.
        if image.startswith(("/", ".")) and not Path(image).exists():
            yield f"--container: no image {image}; 'enroot import' makes one, on shared storage"
    elif image := environment.get("DAPO_APPTAINER"):
        if not Path(image).exists():
            yield f"--apptainer: no image {image}; 'apptainer build' makes one, on shared storage"
    else:
        venv = Path(environment.get("DAPO_VENV", ".venv"))
        if not os.access(venv / "bin/python", os.X_OK):
            yield (
                f"--venv: no {venv}/bin/python (from {CHECKOUT}); run 'make env' on storage that "
                "the nodes share, or name a --container or --apptainer image"
            )
    for mount in filter(None, environment.get("DAPO_MOUNTS", "").split(",")):
        folder = mount.split(":")[0]
        if not Path(folder).exists():
            yield f"--mounts: no folder {folder}"


def _is_missing_folder(path: str) -> bool:
    """Return whether a data set does not exist and its name cannot be one of the hub."""
    return not Path(path).exists() and (path.startswith(("/", ".", "~")) or path.count("/") > 1)


# ------------------------------------------------------------------ the command


def lead_seconds(config: Config) -> int:
    """Return how many seconds before its time limit the job gets the signal to stop."""
    return max(HEADER_LEAD_SECONDS, ceil(config.run.stop_seconds) + MARGIN_SECONDS)


def sbatch_command(config: Config, request: Request) -> list[str]:
    """Return the sbatch command of one job of the chain."""
    options = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks-per-node": request.tasks_per_node,
        "gpus-per-node": request.gpus_per_node,
        "time": request.time,
        "signal": f"B:USR1@{lead_seconds(config)}",
        "output": f"{LOGS}/{request.name}/%x-%j.out",
        **request.options,
    }
    if request.chain > 1:
        options["dependency"] = "singleton"
    if config.separate_gpus:  # the job goes on without a lost node of engines
        options["no-kill"] = ""
    words = [f"--{name}" if value == "" else f"--{name}={value}" for name, value in options.items()]
    return ["sbatch", "--parsable", *words, str(SCRIPT.relative_to(CHECKOUT)), *request.arguments]


def plan(config: Config, request: Request) -> Iterator[tuple[str, str]]:
    """Yield (label, text) lines that describe what runs where."""
    ranks = policy_ranks(config, request.num_tasks)
    devices = "GPU" if request.gpus_per_node else "process without a GPU"
    jobs = f" x {request.chain} jobs, one after another" if request.chain > 1 else ""
    policy = config.policy
    yield "job", f"{request.name}, {request.time}{jobs}; stops {lead_seconds(config)} s before"
    tasks = f"{request.nodes} x {request.tasks_per_node} = {request.num_tasks}"
    yield "nodes", f"{tasks} tasks, one per {devices}"
    axes = ("tensor", "pipeline", "context", "expert")
    sizes = [getattr(policy, f"{axis}_parallel") for axis in axes]
    data = ranks // (sizes[0] * sizes[1] * sizes[2])
    product = " x ".join(map(str, [*sizes, data]))
    yield "layout", f"TP x PP x CP x EP x DP = {product}: {describe(policy, ranks)}"
    if policy.tensor_parallel > request.tasks_per_node:
        yield "", "tensor parallelism crosses nodes: every layer waits for the network"
    if config.checkpoint.every == 0 and config.checkpoint.max_minutes is None:
        yield "", "checkpoint.every is 0: a crash or a lost node loses the run"
    engines = f"{config.num_replicas(ranks)} of {config.engine_tensor_parallel}"
    if config.engine.colocated:
        yield "engines", f"{engines} ranks, on those of the policy"
    else:
        num_nodes = ceil(config.separate_gpus / request.tasks_per_node)
        yield "engines", f"{engines}, on the last {num_nodes} nodes; the policy has {ranks} ranks"
    yield "run", f"{config.folder} (metrics, checkpoints, logs of ranks)"
    yield "logs", f"{LOGS}/{request.name}/ (job log; ranks: JOB.START/NODE-RANK.log)"


# ------------------------------------------------------------------ the program

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Text = Annotated[str | None, typer.Option()]


@app.command()
def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE")] = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0 means without GPUs.")] = 8,
    tasks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks per node without GPUs. With GPUs, one rank per GPU."),
    ] = None,
    time: Annotated[
        str, typer.Option(help="Time limit of each job, in Slurm's format.")
    ] = "24:00:00",
    account: Text = None,
    partition: Text = None,
    qos: Text = None,
    constraint: Text = None,
    reservation: Text = None,
    overlay: Annotated[
        list[Path] | None, typer.Option(help="YAML that overrides keys of CONFIG.")
    ] = None,
    venv: Annotated[
        str | None, typer.Option(help="Environment. By default .venv of the checkout.")
    ] = None,
    container: Annotated[str | None, typer.Option(help="Image for pyxis (enroot).")] = None,
    apptainer: Annotated[str | None, typer.Option(help="Image for Apptainer, a .sif.")] = None,
    mounts: Annotated[str | None, typer.Option(help="Container mounts: A:A,B:B:ro")] = None,
    chain: Annotated[
        int, typer.Option(min=1, help="Number of jobs; each continues the one before.")
    ] = 1,
    exclude_bad: Annotated[
        bool, typer.Option(help="Exclude nodes that a check found bad, now and in later jobs.")
    ] = False,
    gpu_memory: Annotated[float, typer.Option(help="GiB per GPU, for the estimate.")] = 80.0,
    host_memory: Annotated[float, typer.Option(help="GiB per node, for the estimate.")] = 1024.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")] = False,
) -> None:
    """Check a run and submit it to Slurm."""
    texts, overlays = tuple(overrides or ()), [path.resolve() for path in overlay or ()]
    config_path = config.resolve()
    os.chdir(CHECKOUT)
    options = {
        "account": account,
        "partition": partition,
        "qos": qos,
        "constraint": constraint,
        "reservation": reservation,
    }
    variables = {
        "DAPO_VENV": venv,
        "DAPO_CONTAINER": container,
        "DAPO_APPTAINER": apptainer,
        "DAPO_MOUNTS": mounts,
        "DAPO_EXCLUDE_BAD": "1" if exclude_bad else None,
    }
    try:
        _check_options(gpus_per_node, tasks_per_node, container, apptainer, venv)
        options["exclude"] = _bad_nodes() if exclude_bad else None
        # resume=auto is the default of the job script.
        loaded = load_config(config_path, ("resume=auto", *texts), overlays)
        tasks = tasks_per_node or gpus_per_node or 1
        ranks = policy_ranks(loaded, nodes * tasks)
    except ConfigError as error:
        raise _refused([str(error)]) from None
    environment = {name: value for name, value in variables.items() if value is not None}
    overlay_words = [_from_checkout(path) for path in overlays]
    request = Request(
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus_per_node,
        time=time,
        name=loaded.run.name,
        options={name: value for name, value in options.items() if value},
        chain=chain,
        environment=environment,
        arguments=(
            _from_checkout(config_path),
            *(word for path in overlay_words for word in ("--overlay", path)),
            *texts,
        ),
        gpu_memory_gib=gpu_memory,
        host_memory_gib=host_memory,
    )
    if loaded.separate_gpus:
        size = loaded.engine_tensor_parallel
        environment["DAPO_ENGINES"] = f"{loaded.separate_gpus // size}x{size}"
    elsewhere = dry_run and not Path(loaded.model.path).exists()
    _show(loaded, request, elsewhere=elsewhere)
    if errors := list(problems(loaded, request, elsewhere=elsewhere)):
        raise _refused(errors)
    from dapo_megatron.plan.forecast import forecast

    if errors := forecast(loaded, ranks, _node_spec(request)):
        raise _refused(errors)
    if not dry_run:
        _submit(sbatch_command(loaded, request), request)


def _check_options(
    gpus: int, tasks: int | None, container: str | None, apptainer: str | None, venv: str | None
) -> None:
    if gpus and tasks not in (None, gpus):
        raise ConfigError(
            f"--tasks-per-node: {tasks} on nodes of {gpus} GPUs; there is one task per GPU, so "
            "leave it out, or use --gpus-per-node 0 to run without GPUs"
        )
    named = {"--container": container, "--apptainer": apptainer, "--venv": venv}
    if len(given := [name for name, value in named.items() if value is not None]) > 1:
        raise ConfigError(f"{' and '.join(given)}: give only one of them")


def _show(config: Config, request: Request, *, elsewhere: bool) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, text in plan(config, request):
        console.print(f"  {name:<8}{text}")
    variables = [f"{name}={shlex.quote(value)}" for name, value in request.environment.items()]
    console.print(f"  command {' '.join(variables)} {shlex.join(sbatch_command(config, request))}")
    for text in missing_files(config, request.environment) if elsewhere else ():
        console.print(f"  missing {text}")


def _submit(command: list[str], request: Request) -> None:
    if shutil.which("sbatch") is None:
        raise _refused(["sbatch: not found; submit from a login node, or use --dry-run"])
    environment = {**os.environ, **request.environment}

    def sbatch(words: list[str]) -> str:
        ran = subprocess.run(
            words, env=environment, check=False, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        if ran.returncode:
            raise _refused([f"Slurm refuses the job: {ran.stdout.strip()}"])
        return ran.stdout.strip()

    sbatch([command[0], "--test-only", *command[1:]])
    # Slurm does not make the log folder, and a job without it fails silently.
    (LOGS / request.name).mkdir(parents=True, exist_ok=True)
    (LOGS / ".gitignore").write_text("*\n", encoding="utf-8")
    for _ in range(request.chain):
        number = sbatch(command).split(";")[0]
        log = LOGS / request.name / f"{request.name}-{number}.out"
        print(f"submitted job {number}; log: {log}")


def _bad_nodes() -> str:
    """Return the nodes that train.sbatch found bad, separated by commas.

    Raises ConfigError for a line that is not the name of a node.
    """
    path = LOGS / "bad_nodes"
    nodes = set(path.read_text(encoding="utf-8").split()) if path.exists() else set()
    for node in nodes:
        if not NODE.fullmatch(node):
            raise ConfigError(f"{path}: {node!r} is not the name of a node; delete the line")
    return ",".join(sorted(nodes))


def _from_checkout(path: Path) -> str:
    return str(path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path)


def _refused(errors: list[str]) -> typer.Exit:
    for text in errors:
        print(f"error: {text}", file=sys.stderr)
    print("nothing was submitted", file=sys.stderr)
    return typer.Exit(2)


if __name__ == "__main__":
    app()
