"""The command line: train, evaluate, plan, track, report, samples, doctor."""

from __future__ import annotations

import json
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dapo_megatron.cluster import interrupt  # first, because it handles Ctrl-C from now on
from dapo_megatron.cluster.address import engines_endpoint
from dapo_megatron.cluster.join import adopt_step
from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.output import protect_streams
from dapo_megatron.cluster.processes import raise_file_limit
from dapo_megatron.cluster.scratch import prepare_scratch
from dapo_megatron.cluster.secret import run_secret
from dapo_megatron.cluster.stop import leave_when_asked
from dapo_megatron.config import ENVIRONMENT_GRADER, Config, num_processes, refuse
from dapo_megatron.config.file import load_config
from dapo_megatron.files import check_result, write_result
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.layout import check_layout, policy_ranks
from dapo_megatron.rewards.registry import check_grader, grader_names, user_function
from dapo_megatron.rollout.record import require_steps
from dapo_megatron.text import visible
from dapo_megatron.types import ConfigError, DapoError, Outcome

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train language models with DAPO on Megatron-core and vLLM.",
)
doctor = typer.Typer(no_args_is_help=True, help="Find out what is wrong, and how to fix it.")
app.add_typer(doctor, name="doctor")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Replace values of the YAML.")
]
Overlays = Annotated[
    list[Path] | None,
    typer.Option(
        "--overlay", metavar="FILE", help="A YAML of some keys, merged into CONFIG; repeatable."
    ),
]
JsonPath = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Also write the results to FILE.", callback=check_result
    ),
]


class Precision(StrEnum):
    """Precisions of `doctor layouts`."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    overlay: Overlays = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Train on the recorded rollouts of another run, without an engine.",
        ),
    ] = None,
) -> None:
    """Train. Starts its own ranks, unless a launcher (torchrun, srun) has started them."""
    checked = _load(config, overrides, overlay, has_engine=replay is None)
    if replay is not None:
        require_steps(replay, checked.folder)
    if not is_launched():
        from dapo_megatron.run.folder import RunFolder

        RunFolder(checked.folder).create(whole=True)
    _on_ranks(checked.run.processes, checked.folder)
    from dapo_megatron.run import session

    session.train(checked, replay)


@app.command()
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    overlay: Overlays = None,
    json_file: JsonPath = None,
) -> None:
    """Evaluate the model. With checkpoint=PATH, evaluate the weights of that checkpoint."""
    overrides = overrides or []
    checkpoints = [text for text in overrides if text.startswith("checkpoint=")]
    checked = _load(config, [text for text in overrides if text not in checkpoints], overlay)
    if not checked.evaluation.sets:
        raise ConfigError("evaluation.sets: empty; add a data set to evaluate on")
    checkpoint = checkpoints[-1].partition("=")[2] if checkpoints else None
    if checkpoint is not None and not (Path(checkpoint) / "config.json").exists():
        raise ConfigError(f"checkpoint: {checkpoint} is not a checkpoint (no config.json)")
    _on_ranks(checked.run.processes)
    from dapo_megatron.run import session
    from dapo_megatron.tracking.console import print_evaluation

    metrics = session.evaluate(checked, checkpoint)
    if metrics is not None:
        print_evaluation(metrics)
        write_result(json_file, json.dumps(metrics))


@app.command()
def engine(
    connect: Annotated[
        str | None, typer.Option(help="tcp://HOST:PORT of rank 0. Default: $DAPO_MEGATRON_ENGINES.")
    ] = None,
    replica: Annotated[
        int | None, typer.Option(min=0, help="Number of the engine. Default: any that is free.")
    ] = None,
) -> None:
    """Serve a run as one of its engines, until it ends. Needs the run's secret."""
    from dapo_megatron.engine import server

    server.command(connect or engines_endpoint(), replica)


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    overlay: Overlays = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    gpu_memory_gib: Annotated[float, typer.Option(min=1.0)] = 80.0,
    host_memory_gib: Annotated[
        float, typer.Option(min=1.0, help="Host memory of a node in GiB.")
    ] = 1024.0,
    gpu: Annotated[
        str,
        typer.Option(help="GPU of the time forecast: H100, H200, H800, H20, A100 or A800."),
    ] = "H100",
    mfu: Annotated[
        float,
        typer.Option(min=0.01, max=1.0, help="Model FLOPs utilization of training."),
    ] = 0.4,
    response_tokens: Annotated[
        float | None,
        typer.Option(min=1.0, help="Mean tokens of a response. Default: 0.15 of the limit."),
    ] = None,
    json_file: JsonPath = None,
) -> None:
    """Forecast GPU memory, host memory, disk space and seconds per step. Needs no GPU."""
    from dapo_megatron.plan import forecast
    from dapo_megatron.plan.estimate import NodeSpec
    from dapo_megatron.plan.speed import Assumptions

    checked = load_config(config, overrides or [], overlay or [])
    num_ranks = policy_ranks(checked, nodes * gpus_per_node)
    spec = NodeSpec(gpus_per_node, gpu_memory_gib, host_memory_gib)
    assumptions = Assumptions(gpu=gpu, mfu=mfu, response_tokens=response_tokens)
    forecast.check(checked, num_ranks)
    refuse(forecast.forecast(checked, num_ranks, spec, assumptions, json_file))


@app.command()
def track(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="runs/<name>")],
    wait_seconds: Annotated[float, typer.Option(min=0.0)] = 300.0,
) -> None:
    """Send a run that has ended to MLflow: what it lacks after an outage or a kill."""
    from dapo_megatron.tracking import mlflow_tracker

    if not mlflow_tracker.track(run_folder, wait_seconds):
        raise typer.Exit(1)
    print("MLflow has all data of the run")


@app.command()
def report(
    run_folders: Annotated[list[Path], typer.Argument(metavar="RUN_FOLDER...", help="runs/<name>")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Default: report.html in the first folder, if it is yours."
        ),
    ] = None,
    completions: Annotated[
        int,
        typer.Option(min=0, help="Rollouts to include, over all runs."),
    ] = 2000,
    ticket: Annotated[
        list[int] | None, typer.Option(help="Ticket of a group to include always; repeatable.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Include only rollouts of these steps.")
    ] = None,
) -> None:
    """Write one HTML file that shows a run or compares several. It needs no network."""
    from dapo_megatron.report import command
    from dapo_megatron.report.page import Options

    options = Options(completions, tuple(ticket or ()), command.parse_steps(steps))
    command.report(run_folders, output, options)


@app.command()
def samples(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="runs/<name>")],
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the groups. Default: the last recorded one.")
    ] = None,
    ticket: Annotated[
        list[int] | None, typer.Option(help="Only the group of this ticket; repeatable.")
    ] = None,
    outcome: Annotated[
        Outcome | None, typer.Option(help="Only groups that ended like this.")
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="Maximum number of groups.")] = 4,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print each token with its log-prob and version.")
    ] = False,
) -> None:
    """Print recorded rollouts: prompts, completions and their grades."""
    from dapo_megatron.report import samples_command

    selection = samples_command.Selection(step, tuple(ticket or ()), outcome, num)
    samples_command.samples(run_folder, selection, with_tokens=tokens)


@doctor.command()
def env(json_file: JsonPath = None) -> None:
    """Check this machine and its Python environment."""
    from dapo_megatron.doctor import env

    if not env.command(json_file):
        raise typer.Exit(1)


@doctor.command()
def grades(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="runs/<name>")],
    json_file: JsonPath = None,
) -> None:
    """Grade a run's recorded answers again, and count the verdicts that changed."""
    from dapo_megatron.doctor import grades

    if not grades.command(run_folder, json_file):
        raise typer.Exit(1)


@doctor.command()
def template(config: ConfigPath, overrides: Overrides = None, json_file: JsonPath = None) -> None:
    """Check that the model's chat template can continue conversations token by token."""
    checked = load_config(config, overrides or [])
    from dapo_megatron.doctor import template

    if not template.command(checked, json_file):
        raise typer.Exit(1)


@doctor.command()
def layouts(
    config: ConfigPath,
    overrides: Overrides = None,
    overlay: Overlays = None,
    json_file: JsonPath = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes. Default: the GPUs, or 4 without a GPU."),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(help="Precision of the cases. Default: float64, or float32 on GPUs."),
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only cases with TEXT in their name.")
    ] = "",
    losses: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Also compare the gradient of the loss of each overlay in this folder.",
        ),
    ] = None,
) -> None:
    """Check that every layout of the model gives the same gradient as one process."""
    checked = load_config(config, overrides or [], overlay or [])
    from dapo_megatron.doctor import layouts

    others = layouts.other_losses(config, overrides or [], overlay or [], losses or [])
    dtype = layouts.check_options(checked, precision)
    _on_ranks(ranks or layouts.default_ranks())
    if not layouts.command(checked, others, precision=dtype, only=only, json_file=json_file):
        raise typer.Exit(1)


@doctor.command()
def sync(
    config: ConfigPath,
    overrides: Overrides = None,
    overlay: Overlays = None,
    json_file: JsonPath = None,
) -> None:
    """Check that a sync copies the policy's weights to the engines, and count its bytes."""
    checked = _load(config, overrides, overlay)
    _on_ranks(checked.run.processes)
    from dapo_megatron.doctor import sync

    sync.command(checked, json_file)


@doctor.command()
def nodes(
    config: ConfigPath,
    overrides: Overrides = None,
    overlay: Overlays = None,
    json_file: JsonPath = None,
    report: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the result of each node, NODE.json.")
    ] = Path("preflight"),
) -> None:
    """Check all nodes of a run and the network between them. Run one srun task per GPU."""
    checked = _load(config, overrides, overlay, is_on_all_nodes=True)
    _on_ranks(checked.run.processes)
    from dapo_megatron.doctor import nodes

    if not nodes.command(checked, report, json_file):
        raise typer.Exit(1)


@doctor.command()
def run(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="runs/<name>")],
    json_file: JsonPath = None,
    verdict: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The verdict file that slurm/train.sbatch names."),
    ] = None,
) -> None:
    """Show where each rank of a run is, or was when the run ended, and which ranks lag."""
    from dapo_megatron.doctor import run

    run.command(run_folder, verdict, json_file)


def _load(
    path: Path,
    overrides: list[str] | None,
    overlays: list[Path] | None,
    *,
    has_engine: bool = True,
    is_on_all_nodes: bool = False,
) -> Config:
    config = load_config(path, overrides or [], overlays or [])
    arch = read_architecture(config)
    num_ranks = num_processes(config)
    if is_on_all_nodes and is_launched():  # separate engines are included
        num_ranks = policy_ranks(config, num_ranks)
    if config.loss.distill is not None:  # first, because its layout is checked, too
        from dapo_megatron.run.other_weights import open_teacher

        open_teacher(config)
    check_layout(config, arch, num_ranks, has_engine=has_engine)
    check_compatibility(config, arch, has_engine=has_engine)
    lists = {"data.train": config.data.train, "evaluation.sets": config.evaluation.sets}
    for key, sources in lists.items():
        for number, source in enumerate(sources):
            try:
                for name in sorted(grader_names(source.grader) - {ENVIRONMENT_GRADER}):
                    check_grader(name)
            except ConfigError as error:
                raise ConfigError(f"{key}.{number}.grader: {error}") from None
    if config.loss.function is not None:
        try:
            user_function(config.loss.function)
        except ConfigError as error:
            raise ConfigError(f"loss.function: {config.loss.function}: {error}") from None
    if config.loss.kl.is_on and config.loss.kl.reference is not None:
        from dapo_megatron.run.other_weights import open_reference

        open_reference(config)
    return config


def _on_ranks(processes: int, run: Path | None = None) -> None:
    """Without a launcher, run this same command on `processes` ranks, then exit. Under a launcher,
    raise ConfigError if the secret that ranks need to join each other is missing.

    If a signal ends the ranks of a run with this folder, print what a resume continues from.
    """
    if not is_launched():
        command = [sys.executable, "-m", "dapo_megatron", *sys.argv[1:]]
        code = launch(command, processes)
        if run is not None and code in (128 + signal.SIGKILL, 128 + signal.SIGBUS):
            from dapo_megatron.checkpoints.folder import newest
            from dapo_megatron.run.folder import RunFolder

            saved = newest(RunFolder(run).checkpoints)
            print(f"resume=auto continues from {saved}" if saved else "no checkpoint was saved")
        raise typer.Exit(code)
    run_secret(int(os.environ["WORLD_SIZE"]))


def main() -> None:
    """Run the command line. A DapoError is printed as a message, without a traceback."""
    protect_streams()
    interrupt.listen()
    if not sys.stdout.isatty():
        # rich would squeeze tables in a pipe or a file into 80 columns.
        os.environ.setdefault("COLUMNS", "160")
    try:
        adopt_step()
        raise_file_limit()
        if is_launched():
            leave_when_asked()
            prepare_scratch()
        app()
    except DapoError as error:
        if os.environ.get("RANK", "0") == "0":
            print(visible(f"error: {error}"), file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
