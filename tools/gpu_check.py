"""Verify on a machine with an NVIDIA GPU what cannot be verified without one.

    python tools/gpu_check.py --quick --json gpu.json   # the first ten minutes on a new GPU
    python tools/gpu_check.py                           # everything that fits, at most 30 minutes
    python tools/gpu_check.py --only bf16 --only head
    python tools/gpu_check.py --list

Each check runs in its own process with a time limit. A check that crashes or runs out of memory
does not affect the others, and its GPU memory is free afterwards. Rows of the table are printed
after each check. The last line is one JSON object with all results. Models have published shapes
and random weights, which are made at the start. Checks that lack a package or memory are skipped,
with the reason. Checks run in the order of importance. One whose estimated time is not left is
skipped.

Verdicts: ok; short (it ran, but missed a target); failed; skipped. A figure may also be "not
judged": its target is stated for an H100 or H200 and a whole model. The exit code is 1 if any check
failed, else 0.

Without a GPU the tool prints what it would have run, and what each check needs.
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
from typing import TYPE_CHECKING, Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import typer
from gpu_checks.catalog import (
    BY_NAME,
    QUICK,
    QUICK_MINUTES,
    WORST,
    Check,
    Figure,
    Verdict,
)
from rich.console import Console
from rich.table import Table

from dapo_megatron.files import write_text

if TYPE_CHECKING:
    from gpu_checks.rig import Setting

LEAVE_SECONDS = 5.0
LOG_LINES = 4
CPU_PATIENCE = 5


@dataclass
class CheckResult:
    """Result of a check."""

    check: Check
    figures: list[Figure] = field(default_factory=list)
    reason: str = ""
    failed: bool = False
    cut: bool = False
    """Whether it was ended because the session's minutes were over."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Worst verdict of the figures, if the check ran to its end."""
        if self.failed:
            return "failed"
        if self.reason or not self.figures:
            return "skipped"
        return min((figure.verdict for figure in self.figures), key=WORST.index)

    def to_json(self) -> dict[str, Any]:
        """Return it for the last line."""
        return {
            "check": self.check.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "figures": [asdict(figure) for figure in self.figures],
        }


# ---------------------------------------------------------------------------- a check's process


def run_child(check: Check, setting: Setting, figures: Path | None) -> None:
    """Run one check in this process. Write each figure as a JSON line at once."""
    # The check's log then names the kernels that vLLM chose, and its memory.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    out = figures.open("a", encoding="utf-8") if figures else sys.stdout
    for figure in check.run()(setting):
        print(json.dumps(asdict(figure)), file=out, flush=True)


# ---------------------------------------------------------------------------- the first process


def reason_not_to_run(check: Check, gpu: dict[str, Any] | None, tiny: bool) -> str:
    """Return why a check is skipped, or an empty string. Tiny shapes also run on CPU."""
    if gpu is None:
        if tiny and check.on_cpu:
            return ", ".join(f"{name} is not installed" for name in check.missing())
        return f"needs {check.needs()}"
    if missing := check.missing():
        return ", ".join(f"{name} is not installed" for name in missing)
    if tuple(gpu["capability"]) < check.capability:
        return f"needs {check.needs()}"
    if gpu["gib"] < check.gib:
        return f"needs {check.gib:g} GiB, there are {gpu['gib']:.0f}"
    return ""


def run_check(
    check: Check, workspace: Path, options: list[str], limit: float, left: float = float("inf")
) -> CheckResult:
    """Run a check in its own process, and end everything that it started. `left`: seconds until the
    end of the session. A check that is ended by it has not failed."""
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
    """End the process and those it started. It leads its own process group."""
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
    """Return the properties of the first GPU, or None. Another process reads them, so that this one
    uses no GPU memory."""
    code = (
        "import json, torch; p = torch.cuda.is_available() and torch.cuda.get_device_properties(0);"
        "print(json.dumps(p and {'name': p.name, 'capability': [p.major, p.minor],"
        "'gib': p.total_memory / 2**30, 'cuda': torch.version.cuda}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gpu: dict[str, Any] | bool = json.loads(ran.stdout.splitlines()[-1])
    return gpu or None  # type: ignore[return-value]


def about(gpu: dict[str, Any] | None) -> dict[str, Any]:
    """Return the versions, date and hardware that figures depend on."""
    from importlib import metadata

    from dapo_megatron.tracking.provenance import facts

    versions: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), **facts(), "gpu": gpu}
    for name in ("triton", "transformer-engine", "apex", "flashinfer-python"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        drivers = subprocess.check_output(command, text=True, timeout=20)
        versions["driver"] = ", ".join(sorted(set(drivers.split())))
    except (OSError, subprocess.SubprocessError):
        versions["driver"] = None
    return versions


def rows_of(outcome: CheckResult) -> Table:
    """Return the rows of the table for a check and its figures."""
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
    for figure in outcome.figures:
        value = f"{figure.value:.4g} {figure.unit}".strip()
        word = f"[{color[figure.verdict]}]{figure.verdict}[/]" if figure.target else ""
        shown.add_row("", figure.name, value, figure.target, word)
    return shown


def check_all(
    checks: list[Check],
    workspace: Path,
    options: list[str],
    minutes: float,
    json_file: Path | None,
    gpu: dict[str, Any] | None,
    tiny: bool,
) -> tuple[list[CheckResult], str]:
    """Run the checks that can run here. Print each outcome, and write all outcomes so far to
    `json_file`, in case the session is interrupted. Return the outcomes, and as a JSON line."""
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    deadline = time.monotonic() + minutes * 60.0
    facts = about(gpu) | {"options": " ".join(options)}
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if gpu is None and not tiny:
        console.print("\nNo NVIDIA GPU here. These checks would have run:\n")
    else:
        seconds = sum(check.guess for check in checks if not reason_not_to_run(check, gpu, tiny))
        console.print(f"\n{minutes:g} minutes; all checks need about {seconds / 60.0:.0f}.\n")
    outcomes = []
    for check in checks:
        left = deadline - time.monotonic()
        if reason := reason_not_to_run(check, gpu, tiny):
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
    only: Annotated[list[str] | None, typer.Option(help="Run only this check; repeatable.")] = None,
    list_checks: Annotated[
        bool, typer.Option("--list", help="List all checks, and what each needs.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result here after every check.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Run the checks of a first session.")] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Maximum duration: 30, with --quick 10.")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(help="Keep models, logs and figures here (12 GB).")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", hidden=True)] = False,
    child: Annotated[str, typer.Option(hidden=True)] = "",
    figures: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Verify every GPU feature that fits on this machine's GPU."""
    if unknown := {*(only or []), *([child] if child else [])} - set(BY_NAME):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: see --list")
    if child:
        from gpu_checks.rig import Setting  # imports torch

        assert workspace is not None
        run_child(BY_NAME[child], Setting(workspace, tiny), figures)
        return
    names = only or (QUICK if quick else BY_NAME)
    checks = [BY_NAME[name] for name in names]
    if list_checks:
        for check in checks:
            print(f"{check.name:22} {check.title()}\n{'':22} needs {check.needs()}")
        return
    gpu = read_gpu()
    options = ["--tiny"] if tiny else []
    limit = minutes or (QUICK_MINUTES if quick else 30.0)
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as temporary:
        folder = workspace or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes, line = check_all(checks, folder.resolve(), options, limit, json_file, gpu, tiny)
    print(line)
    raise typer.Exit(int(any(outcome.verdict == "failed" for outcome in outcomes)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
