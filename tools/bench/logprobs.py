"""Time and memory of the log-prob head beside the plain `log_softmax` of whole logits.

    python tools/bench/logprobs.py                      # 8,192 tokens, 151,936 entries: 15 GiB free
    python tools/bench/logprobs.py --tokens 1024 --dtype float32

Each measurement is one forward and backward in a fresh process, so that a peak is its own; rounds
go through the variants in alternating order, so that ratios hold on a machine that is not quiet.
Memory is what comes on top of hidden states, weights and targets: gradients count. Both variants
give log-probs, entropies (without gradient) and both gradients; the third leaves entropies out.
Processor seconds are given beside the clock's: other processes hardly touch them.

On a GPU there are three more: the head with Triton kernels, its tiles' matmuls without anything
else, and the four matmuls that any such head has (logits, logits again, two gradients) on whole
logits in bfloat16, which is the least time that this computation can take. The first calls are not
counted there: they load libraries and compile kernels.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from dapo_megatron.policy.vocab_parallel import linear_logprobs
from dapo_megatron.tracking.provenance import facts

FUSED, PLAIN, NO_ENTROPY = "fused", "plain", "plain, no entropy"
TRITON, TILES, MATMULS = "fused, triton", "its tiles' matmuls", "matmuls alone"
EXACT = "plain, float64"  # for comparison alone, and of a few tokens
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GIB = 2**30
Result = TypeVar("Result")
WARM_UP_TOKENS = 64
GPU_WARM_UPS = 3  # of the whole size: a kernel is compiled and chosen for its sizes
NUM_EXACT_TOKENS = 64
NUM_COMPARED_ROWS = 4096  # of the weight gradient, which is too large to send around


@dataclass(frozen=True)
class Case:
    """One measurement: what runs, and the sizes."""

    variant: str
    dtype: str
    num_tokens: int
    num_entries: int
    hidden_size: int

    @property
    def peak_bytes(self) -> int:
        """What it may take beside the libraries; plain holds log-probs and two gradients."""
        weights = (6 if self.variant == EXACT else 3) * self.num_entries * self.hidden_size * 4
        num_whole = 3 if self.variant in (PLAIN, NO_ENTROPY, MATMULS) else 0
        whole = num_whole * self.num_tokens * self.num_entries * 4
        return weights + whole + GIB // 2


@dataclass(frozen=True)
class Measured:
    """`extra_bytes` at the peak; `values` to compare: log-probs, entropies, gradients."""

    forward_seconds: float
    backward_seconds: float
    processor_seconds: float
    extra_bytes: int
    values: dict[str, np.ndarray[Any, Any]]

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


# ------------------------------------------------------------------ in the measuring process


def plain_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of whole logits, with as few copies as torch's own functions need."""
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    logprobs_TV = (hidden_TH @ weight_VH.t()).to(wide).log_softmax(-1)
    entropy_T = None
    if entropy:
        with torch.no_grad():
            entropy_T = -logprobs_TV.exp().mul_(logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, targets_T[:, None]).squeeze(1), entropy_T


class _Nothing:
    """Reductions of a head that only multiplies."""

    def fold(self, *_: Any) -> None:
        """Nothing."""

    def error(self, *_: Any) -> None:
        """Nothing: what was in the tile's memory before is multiplied."""


class _Matmuls(torch.autograd.Function):
    """The four of a head that computes its logits twice, on whole logits."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH)
        return torch.mm(hidden_TH, weight_VH.t())[:, 0].float()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TH, weight_VH = ctx.saved_tensors
        logits_TV = torch.mm(hidden_TH, weight_VH.t())
        return torch.mm(logits_TV, weight_VH), torch.mm(logits_TV.t(), hidden_TH)


HEADS: dict[str, Any] = {FUSED: "torch", TRITON: "triton", TILES: _Nothing()}


def run_head(case: Case, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    if case.variant == MATMULS:
        return _Matmuls.apply(*inputs[:2]), None  # type: ignore[no-untyped-call]
    if case.variant not in HEADS:
        return plain_logprobs(*inputs, entropy=case.variant == PLAIN)
    whole = {"first_entry": 0, "num_entries": case.num_entries, "group": None}
    return linear_logprobs(*inputs, temperature=1.0, head=HEADS[case.variant], **whole)  # type: ignore[arg-type]


def make_inputs(case: Case, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and targets; logits have a standard deviation of 2."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device}

    def normal(rows: int, std: float) -> Tensor:
        empty = torch.empty(rows, case.hidden_size, device=device, dtype=DTYPES[case.dtype])
        return empty.normal_(std=std, generator=generator).requires_grad_()

    hidden_TH = normal(num_tokens, 1.0)
    weight_VH = normal(case.num_entries, 2.0 / case.hidden_size**0.5)
    return hidden_TH, weight_VH, torch.randint(case.num_entries, (num_tokens,), **options)


def measure(case: Case, compare: bool) -> Measured:
    """Runs in a process of its own."""
    on_gpu = torch.cuda.is_available()
    for _ in range(GPU_WARM_UPS if on_gpu else 1):
        warm_up = make_inputs(case, case.num_tokens if on_gpu else WARM_UP_TOKENS)
        run_head(case, warm_up)[0].sum().backward()
        del warm_up
    inputs = make_inputs(case, case.num_tokens)
    grad_T = torch.linspace(-1.0, 1.0, case.num_tokens, device=inputs[0].device)

    before = _start_peak()
    started, processor = _now(), time.process_time()
    logp_T, entropy_T = run_head(case, inputs)
    middle = _now()
    logp_T.backward(grad_T)
    ended = _now()
    processor = time.process_time() - processor
    extra_bytes = _peak() - before

    values = _values(inputs, logp_T, entropy_T) if compare else {}
    return Measured(middle - started, ended - middle, processor, extra_bytes, values)


def exact_values(case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """The first tokens in float64; the gradient of the weight is of all tokens and left out."""
    hidden_TH, weight_VH, targets_T = make_inputs(case, case.num_tokens)
    few = slice(0, NUM_EXACT_TOKENS)
    doubles = [value.detach().double().requires_grad_() for value in (hidden_TH[few], weight_VH)]
    logp_T, entropy_T = plain_logprobs(doubles[0], doubles[1], targets_T[few], entropy=True)
    grad_T = torch.linspace(-1.0, 1.0, case.num_tokens, device=hidden_TH.device)
    logp_T.backward(grad_T[few].double())
    values = _values((doubles[0], doubles[1], targets_T), logp_T, entropy_T)
    del values["weight gradient"]
    return values


def _values(
    inputs: tuple[Tensor, Tensor, Tensor], logp_T: Tensor, entropy_T: Tensor | None
) -> dict[str, np.ndarray[Any, Any]]:
    hidden_TH, weight_VH, _ = inputs
    assert hidden_TH.grad is not None and weight_VH.grad is not None
    values = {"log-prob": logp_T.detach(), "hidden gradient": hidden_TH.grad}
    values["weight gradient"] = weight_VH.grad[:NUM_COMPARED_ROWS]
    if entropy_T is not None:
        values["entropy"] = entropy_T
    return {name: value.double().cpu().numpy() for name, value in values.items()}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _start_peak() -> int:
    """Forget the peak so far; bytes in use now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# -------------------------------------------------------------------------- in the first process


def apart(case: Case, wait_seconds: float, function: Callable[..., Result], *more: Any) -> Result:
    """`function(case, *more)` in a fresh process, once there is memory for it."""
    require_memory(case, wait_seconds)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, case, *more).result()


def require_memory(case: Case, wait_seconds: float) -> None:
    """Wait until the case fits beside what else runs, rather than have the kernel end something."""
    deadline = time.monotonic() + wait_seconds
    while (free := _free_bytes()) < case.peak_bytes:
        if time.monotonic() > deadline:
            raise typer.BadParameter(
                f"{case.variant} in {case.dtype} with {case.num_tokens} tokens needs "
                f"{case.peak_bytes / GIB:.1f} GiB, {free / GIB:.1f} GiB are free: "
                "end other processes, wait longer (--wait-seconds) or take fewer --tokens"
            )
        time.sleep(5.0)


def _free_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)


def difference(
    ours: dict[str, np.ndarray[Any, Any]], theirs: dict[str, np.ndarray[Any, Any]]
) -> dict[str, float]:
    """Largest differences: absolute of values, of gradients relative to the largest element."""
    result = {}
    for name, value in theirs.items():
        scale = np.abs(value).max() if "gradient" in name else 1.0
        result[name] = float(np.abs(ours[name][: len(value)] - value).max() / scale)
    return result


def summarize(case: Case, runs: list[Measured]) -> dict[str, Any]:
    return {
        "variant": case.variant,
        "dtype": case.dtype,
        "tokens": case.num_tokens,
        "forward_seconds": statistics.median(run.forward_seconds for run in runs),
        "backward_seconds": statistics.median(run.backward_seconds for run in runs),
        "seconds": statistics.median(run.seconds for run in runs),
        "processor_seconds": statistics.median(run.processor_seconds for run in runs),
        "extra_bytes": max(run.extra_bytes for run in runs),
    }


def compare(case_of: dict[str, Case], rounds: int, wait_seconds: float) -> dict[str, Any]:
    """All variants of one size: figures of each, ratios of the fused one to the others."""
    runs: dict[str, list[Measured]] = {variant: [] for variant in case_of}
    for turn in range(rounds):
        order = list(case_of) if turn % 2 == 0 else list(reversed(case_of))
        for variant in order:
            runs[variant].append(apart(case_of[variant], wait_seconds, measure, turn == 0))
    ratios = {}
    for variant in (name for name in runs if name != FUSED):
        pairs = list(zip(runs[FUSED], runs[variant], strict=True))
        ratios[variant] = {
            "time": statistics.median(ours.seconds / theirs.seconds for ours, theirs in pairs),
            "processor_time": statistics.median(
                ours.processor_seconds / theirs.processor_seconds for ours, theirs in pairs
            ),
            "memory": max(ours.extra_bytes / theirs.extra_bytes for ours, theirs in pairs),
        }
    fused, plain = runs[FUSED][0].values, runs[PLAIN][0].values
    exact = apart(replace(case_of[FUSED], variant=EXACT), wait_seconds, exact_values)
    return {
        "rows": [summarize(case, runs[variant]) for variant, case in case_of.items()],
        "ratios": ratios,
        "differences": {
            "fused - plain": difference(fused, plain),
            "fused - exact": difference(fused, exact),
            "plain - exact": difference(plain, exact),
        },
    }


def sizes(tokens: int, growth: int) -> Iterator[int]:
    """`tokens`, and as many halves of it as asked for, the smallest first."""
    for halving in reversed(range(growth + 1)):
        yield tokens >> halving


def table(results: list[dict[str, Any]]) -> Table:
    """`time`, `processor` and `memory` are those of the fused head over those of the row."""
    names = ("forward_seconds", "backward_seconds", "seconds", "processor_seconds")
    shown = Table("dtype", "tokens", "variant", "forward s", "backward s", "sum s", "processor s")
    for name in ("extra GiB", "time", "processor", "memory"):
        shown.add_column(name)
    for result in results:
        for row in result["rows"]:
            ratio = result["ratios"].get(row["variant"])
            shown.add_row(
                row["dtype"],
                f"{row['tokens']:,}",
                row["variant"],
                *(f"{row[name]:.3g}" for name in names),
                f"{row['extra_bytes'] / GIB:.2f}",
                *(ratio_texts(ratio) if ratio else ()),
            )
        shown.add_section()
    return shown


def ratio_texts(ratio: dict[str, float]) -> list[str]:
    times = [f"{ratio[name]:.2f} x" for name in ("time", "processor_time")]
    return [*times, f"1/{1 / ratio['memory']:.1f}"]


def variants() -> list[str]:
    """What is compared on this machine."""
    more = []
    if torch.cuda.is_available():
        has_triton = find_spec("triton") is not None
        more = [*([TRITON] if has_triton else []), TILES, MATMULS]
    return [FUSED, PLAIN, NO_ENTROPY, *more]


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the largest case.")] = 8192,
    vocabulary: Annotated[int, typer.Option(help="Vocabulary entries.")] = 151_936,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 896,
    dtype: Annotated[list[str], typer.Option(help="bfloat16, float32 or both.")] = list(DTYPES),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Processes per variant of the largest case.")] = 3,
    growth: Annotated[int, typer.Option(help="How often to halve the tokens, one round each.")] = 3,
    wait_seconds: Annotated[float, typer.Option(help="How long to wait for free memory.")] = 600.0,
) -> None:
    """Measure the log-prob head beside plain log_softmax; the last line is all figures as JSON."""
    if unknown := set(dtype) - set(DTYPES):
        raise typer.BadParameter(
            f"--dtype {', '.join(sorted(unknown))}: want {' or '.join(DTYPES)}"
        )
    # Read by the children's OpenMP: threads that wait for others must not count as work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # In a file or a log the table would be folded to 80 columns.
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 130)
    plan = [(name, size) for name in dtype for size in sizes(tokens, growth)]
    results = []
    for name, size in track(plan, "measuring", console=console):
        case_of = {variant: Case(variant, name, size, vocabulary, hidden) for variant in variants()}
        results.append(compare(case_of, rounds if size == tokens else 1, wait_seconds))
        console.print(table(results))  # as far as it is: the largest sizes take minutes
    for result in results:
        row = result["rows"][0]
        for pair, differences in result["differences"].items():
            worst = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
            console.print(f"{row['dtype']}, {row['tokens']:,} tokens, {pair}: {worst}")
    setting = {"vocabulary": vocabulary, "hidden": hidden, "rounds": rounds}
    print(json.dumps({"bench": "logprobs", **facts(), **setting, "results": results}))


if __name__ == "__main__":
    typer.run(main)
