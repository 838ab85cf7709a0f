"""Verify on a machine with one NVIDIA GPU what cannot be verified without one.

    python tools/gpu_check.py --quick --json gpu.json   # the first ten minutes on a new GPU
    python tools/gpu_check.py                        # all that fits, at most 30 minutes
    python tools/gpu_check.py --only bf16 --only head
    python tools/gpu_check.py --list

Each check runs in a process of its own, with a limit of time: one that crashes or takes all memory
ends no other, and the GPU is really free for the next. Rows are printed as they come; the last line
is one JSON object with everything. Models have published shapes and random weights, made on the
spot. What is not installed, or does not fit, is skipped by name. Checks run in the order of their
importance; before the first, it says how far the minutes should reach.

The table's verdicts: ok; short (it ran, and misses a target); failed; skipped; of a figure also
"not judged": its target is stated for an H100 or H200 and a whole model, and this is another. Exit
status 1 if any check failed, else 0.

Without a GPU it says what it would have run, and what each check needs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import typer
from gpu_checks.catalog import BY_NAME, QUICK, QUICK_MINUTES, SHOWN, Check
from gpu_checks.figures import WORST, Figure, Verdict
from rich.console import Console
from rich.table import Table

from dapo_megatron.files import write_text

LEAVE_SECONDS = 5.0
LOG_LINES = 4
CPU_PATIENCE = 5


@dataclass
class CheckResult:
    """What became of a check."""

    check: Check
    figures: list[Figure] = field(default_factory=list)
    reason: str = ""
    failed: bool = False
    cut: bool = False
    """By the end of the session's minutes."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst of its figures', if it ran to its end."""
        if self.failed:
            return "failed"
        if self.reason or not self.figures:
            return "skipped"
        return min((figure.verdict for figure in self.figures), key=WORST.index)

    def to_json(self) -> dict[str, Any]:
        """For the last line."""
        return {
            "check": self.check.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "figures": [asdict(figure) for figure in self.figures],
        }


# ---------------------------------------------------------------------------- a check's process


def run_child(check: Check, workspace: Path, tiny: bool, quick: bool, figures: Path | None) -> None:
    """Run one check here; its figures, a JSON line each, as they come."""
    from gpu_checks.rig import Setting

    out = figures.open("a", encoding="utf-8") if figures else sys.stdout
    for figure in check.run()(Setting(workspace, tiny, quick)):
        print(json.dumps(asdict(figure)), file=out, flush=True)


# ---------------------------------------------------------------------------- the first process


def reason_not_to_run(check: Check, gpu: dict[str, Any] | None, allow_cpu: bool) -> str:
    """Why a check is skipped here; empty if it is not."""
    if gpu is None:
        if allow_cpu and check.on_cpu:
            return ", ".join(f"{name} is not installed" for name in check.missing())
        return f"needs {check.needs()}"
    if missing := check.missing():
        return ", ".join(f"{name} is not installed" for name in missing)
    if tuple(gpu["capability"]) < check.capability:
        return f"needs {check.needs()}"
    if gpu["gib"] < check.gib:
        return f"needs {check.gib:g} GiB, there are {gpu['gib']:.0f}"
    return ""


def plan(
    checks: list[Check], gpu: dict[str, Any] | None, allow_cpu: bool, minutes: float
) -> tuple[list[Check], list[Check]]:
    """Those that can run here: what the minutes should be enough for, and what they are not. One
    that is too long is left out for shorter ones after it."""
    reached, missed, left = [], [], minutes * 60.0
    for check in checks:
        if reason_not_to_run(check, gpu, allow_cpu):
            continue
        if check.guess <= left:
            reached.append(check)
            left -= check.guess
        else:
            missed.append(check)
    return reached, missed


def plan_text(reached: list[Check], missed: list[Check], minutes: float) -> str:
    """For people."""

    def named(checks: list[Check]) -> str:
        return ", ".join(f"{check.name} ({check.guess} s)" for check in checks)

    lines = [f"\nIn {minutes:g} minutes, by guesses: {named(reached) or 'nothing'}."]
    if missed:
        needed = sum(check.guess for check in (*reached, *missed)) / 60.0
        only = " ".join(f"--only {check.name}" for check in missed)
        lines.append(f"Not reached: {named(missed)}.")
        lines.append(f"All would take --minutes {needed:.0f}; these alone: {only}")
    return "\n".join([*lines, ""])


def run_check(
    check: Check, workspace: Path, options: list[str], limit: float, left: float = float("inf")
) -> CheckResult:
    """In a process of its own; whatever it started is ended with it. `left`: seconds of the whole
    session; a check that these end has not failed."""
    outcome, started = CheckResult(check), time.monotonic()
    figures, log = workspace / f"{check.name}.jsonl", workspace / f"{check.name}.log"
    figures.write_text("")
    command = [sys.executable, __file__, "--child", check.name, "--figures", str(figures)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--workspace", str(workspace), *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=min(limit, left))
        except subprocess.TimeoutExpired:
            outcome.reason = f"not done after {min(limit, left):.0f} s"
            outcome.cut = left < limit
        finally:
            _end(process)
    outcome.seconds = time.monotonic() - started
    lines = figures.read_text(encoding="utf-8").splitlines()
    outcome.figures = [Figure(**json.loads(line)) for line in lines]
    if outcome.cut:
        outcome.reason += ", the end of --minutes"
    elif process.returncode != 0:
        outcome.failed = True
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        outcome.reason = outcome.reason or " | ".join(last[-LOG_LINES:])[-400:]
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and those it started: it leads a group of its own."""
    for number, seconds in ((signal.SIGTERM, LEAVE_SECONDS), (signal.SIGKILL, LEAVE_SECONDS)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def read_gpu() -> dict[str, Any] | None:
    """The GPU as torch sees it, asked in a process that ends: this one keeps no memory there."""
    code = (
        "import json, torch; p = torch.cuda.is_available() and torch.cuda.get_device_properties(0);"
        "print(json.dumps(p and {'name': p.name, 'capability': [p.major, p.minor],"
        "'gib': p.total_memory / 2**30, 'cuda': torch.version.cuda}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gpu: dict[str, Any] | bool = json.loads(ran.stdout.splitlines()[-1])
    return gpu or None  # type: ignore[return-value]


def about(gpu: dict[str, Any] | None) -> dict[str, Any]:
    """What the figures are worth nothing without."""
    from importlib import metadata

    from dapo_megatron.tracking.provenance import facts

    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), **facts(), "gpu": gpu}
    for name in ("triton", "transformer-engine", "apex", "flashinfer-python"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.check_output(asked, text=True, timeout=20).strip()
    except (OSError, subprocess.SubprocessError):
        found["driver"] = None
    return found


def rows_of(outcome: CheckResult) -> Table:
    """A check and its figures, as a part of the table."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    for width in (22, 52, 18, 10, 10):
        shown.add_column(width=width, overflow="fold")
    color = {"ok": "green", "short": "yellow", "failed": "red", "skipped": "dim"}
    color["not judged"] = "dim"
    first = (outcome.check.name, outcome.reason or f"took {outcome.seconds:.0f} s")
    if outcome.verdict == "skipped":
        first = (outcome.check.name, f"{outcome.check.title()} [yellow]{outcome.reason}[/]")
    verdict = outcome.verdict
    shown.add_row(*first, "", "", f"[{color[verdict]}]{verdict}[/]", style="bold")
    for one in outcome.figures:
        value = f"{one.value:.4g} {one.unit}".strip()
        word = f"[{color[one.verdict]}]{one.verdict}[/]" if one.target else ""
        shown.add_row("", one.name, value, one.target, word)
    return shown


def check_all(
    checks: list[Check],
    workspace: Path,
    options: list[str],
    minutes: float,
    allow_cpu: bool,
    json_file: Path | None,
) -> tuple[list[CheckResult], str]:
    """Run the checks that can run here. Print each outcome, and write all so far to `json_file`: a
    session that is cut short still leaves its figures. Return the outcomes, and as a JSON line."""
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    deadline = time.monotonic() + minutes * 60.0
    gpu = read_gpu()
    facts = about(gpu)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if gpu is None and not allow_cpu:
        console.print("\nNo NVIDIA GPU here. What would have run, and what it needs:\n")
    else:
        text = plan_text(*plan(checks, gpu, allow_cpu, minutes), minutes)
        console.print(text, highlight=False)
    outcomes = []
    for check in checks:
        left = deadline - time.monotonic()
        if reason := reason_not_to_run(check, gpu, allow_cpu):
            outcome = CheckResult(check, reason=reason)
        elif left < check.guess:
            outcome = CheckResult(check, reason=f"no time left of {minutes:g} minutes: --only it")
        else:
            limit = check.seconds * (CPU_PATIENCE if gpu is None else 1)
            outcome = run_check(check, workspace, options, limit, left)
        outcomes.append(outcome)
        console.print(rows_of(outcome), highlight=False)
        line = _result(outcomes, facts)
        if json_file is not None:
            write_text(json_file, line + "\n")
    return outcomes, line


def _result(outcomes: list[CheckResult], facts: dict[str, Any]) -> str:
    checks = [outcome.to_json() for outcome in outcomes]
    return json.dumps({"tool": "gpu_check", **facts, "checks": checks})


def main(
    only: Annotated[list[str] | None, typer.Option(help="Only this check; repeatable.")] = None,
    list_checks: Annotated[
        bool, typer.Option("--list", help="Names, and what each needs.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result here after every check.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Only what a first session on a GPU needs.")] = False,
    minutes: Annotated[
        float | None, typer.Option(help="No check runs for longer: 30, with --quick 10.")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(help="Keep models, logs and figures here (12 GB).")
    ] = None,
    shapes: Annotated[str, typer.Option(hidden=True)] = "real",
    allow_cpu: Annotated[bool, typer.Option(hidden=True)] = False,
    child: Annotated[str, typer.Option(hidden=True)] = "",
    figures: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Verify every GPU feature that fits on this machine's GPU."""
    if unknown := {*(only or []), *([child] if child else [])} - set(BY_NAME):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: see --list")
    if child:
        assert workspace is not None
        run_child(BY_NAME[child], workspace, shapes == "tiny", quick, figures)
        return
    names = only or (QUICK if quick else [check.name for check in SHOWN])
    checks = [BY_NAME[name] for name in names]
    if list_checks:
        for check in checks:
            print(f"{check.name:22} {check.title()}\n{'':22} needs {check.needs()}")
        return
    options = ["--shapes", shapes, *(["--quick"] if quick else [])]
    limit = minutes or (QUICK_MINUTES if quick else 30.0)
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as temporary:
        folder = workspace or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes, line = check_all(checks, folder.resolve(), options, limit, allow_cpu, json_file)
    print(line)
    raise typer.Exit(int(any(one.verdict == "failed" for one in outcomes)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
