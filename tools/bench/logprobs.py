"""Compare time and memory of the log-prob head with plain `log_softmax` of whole logits.

    python tools/bench/logprobs.py                      # 8,192 tokens, 151,936 entries: 15 GiB free
    python tools/bench/logprobs.py --tokens 1024 --dtype float32

Each measurement is one forward and backward pass in a new process, so that its memory peak is not
that of another variant. Rounds go through the variants in alternating order, so that ratios are
fair on a busy machine. Memory counts what is added to hidden states, weights and targets, so it
includes gradients. Both variants compute log-probs, entropies (without gradient) and both
gradients. A third, "plain, no entropy", leaves entropies out. CPU seconds ("processor") are given
next to wall-clock seconds, because other processes hardly change them.

On a GPU there are three more variants:

    fused, triton         the head with Triton kernels
    its tiles' matmuls    the matmuls of the head's tiles and nothing else
    matmuls alone         the four matmuls of any such head (logits twice, two gradients) on whole
                          logits in bfloat16: the least time that this computation can take

On a GPU the first calls are not counted, because they load libraries and compile kernels.
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
from typing import Annotated, Any, TypeVar

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.policy.vocab_parallel import linear_logprobs
from dapo_megatron.tracking.provenance import facts

FUSED, PLAIN, NO_ENTROPY = "fused", "plain", "plain, no entropy"
TRITON, TILES, MATMULS = "fused, triton", "its tiles' matmuls", "matmuls alone"
EXACT = "plain, float64"  # only to compare values, of a few tokens
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GIB = 2**30
Result = TypeVar("Result")
WARM_UP_TOKENS = 64
GPU_WARM_UPS = 3  # at full size, because kernels are compiled and chosen by size
NUM_EXACT_TOKENS = 64
NUM_COMPARED_ROWS = 4096  # of the weight gradient, which is too large to send around


@dataclass(frozen=True)
class Case:
    """Variant, dtype and sizes of one measurement."""

    variant: str
    dtype: str
    num_tokens: int
    num_entries: int
    hidden_size: int

    @property
    def peak_bytes(self) -> int:
        """Upper bound of the bytes of tensors. Plain holds three [tokens, entries] tensors."""
        weights = (6 if self.variant == EXACT else 3) * self.num_entries * self.hidden_size * 4
        num_logits = 3 if self.variant in (PLAIN, NO_ENTROPY, MATMULS) else 0
        logits = num_logits * self.num_tokens * self.num_entries * 4
        return weights + logits + GIB // 2


@dataclass(frozen=True)
class Measured:
    """Result of one measurement."""

    forward_seconds: float
    backward_seconds: float
    processor_seconds: float
    extra_bytes: int
    """At the peak, in addition to hidden states, weights and targets."""
    values: dict[str, np.ndarray[Any, Any]]
    """Log-probs, entropies and gradients, to compare variants."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


# ------------------------------------------------------------------ in the measuring process


def plain_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies of whole logits, with as few copies as torch allows."""
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    logprobs_TV = (hidden_TH @ weight_VH.t()).to(wide).log_softmax(-1)
    entropy_T = None
    if entropy:
        with torch.no_grad():
            entropy_T = -logprobs_TV.exp().mul_(logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, targets_T[:, None]).squeeze(1), entropy_T


class _Nothing:
    """Tile kernels that do nothing, so that only the head's matmuls take time."""

    def fold(self, *_: Any) -> None:
        """Do nothing."""

    def error(self, *_: Any) -> None:
        """Do nothing. The next matmul reads whatever the tile holds."""


class _Matmuls(torch.autograd.Function):
    """The four matmuls of a head that computes its logits twice, on whole logits."""

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
    unsharded = {"first_entry": 0, "num_entries": case.num_entries, "group": None}
    return linear_logprobs(*inputs, temperature=1.0, head=HEADS[case.variant], **unsharded)  # type: ignore[arg-type]


def make_inputs(case: Case, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weights and targets. Logits have a standard deviation of 2."""
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
    """Measure a case. Runs in a new process."""
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
    """Return values of the first tokens in float64.

    The weight gradient is left out, because it depends on all tokens.
    """
    hidden_TH, weight_VH, targets_T = make_inputs(case, case.num_tokens)
    first = slice(0, NUM_EXACT_TOKENS)
    doubles = [value.detach().double().requires_grad_() for value in (hidden_TH[first], weight_VH)]
    logp_T, entropy_T = plain_logprobs(doubles[0], doubles[1], targets_T[first], entropy=True)
    grad_T = torch.linspace(-1.0, 1.0, case.num_tokens, device=hidden_TH.device)
    logp_T.backward(grad_T[first].double())
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
    """Reset the memory peak. Return the bytes in use."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    forget_peak()
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resident_bytes()


# -------------------------------------------------------------------------- in the first process


def in_new_process(
    case: Case, wait_seconds: float, function: Callable[..., Result], *more: Any
) -> Result:
    """Return `function(case, *more)`, run in a new process as soon as there is memory for it."""
    require_memory(case, wait_seconds)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, case, *more).result()


def require_memory(case: Case, wait_seconds: float) -> None:
    """Wait until there is memory for the case, so that the kernel kills no process for memory.

    Raises typer.BadParameter after `wait_seconds`.
    """
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
    values: dict[str, np.ndarray[Any, Any]], references: dict[str, np.ndarray[Any, Any]]
) -> dict[str, float]:
    """Return the largest difference per name.

    Differences of gradients are relative to the largest element of the reference, others absolute.
    """
    result = {}
    for name, reference in references.items():
        scale = np.abs(reference).max() if "gradient" in name else 1.0
        result[name] = float(np.abs(values[name][: len(reference)] - reference).max() / scale)
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
    """Measure all variants of one size, and compute the ratios of the fused one to the others."""
    runs: dict[str, list[Measured]] = {variant: [] for variant in case_of}
    for turn in range(rounds):
        order = list(case_of) if turn % 2 == 0 else list(reversed(case_of))
        for variant in order:
            runs[variant].append(in_new_process(case_of[variant], wait_seconds, measure, turn == 0))
    ratios = {}
    for variant in (name for name in runs if name != FUSED):
        pairs = list(zip(runs[FUSED], runs[variant], strict=True))
        ratios[variant] = {
            "time": statistics.median(fused.seconds / other.seconds for fused, other in pairs),
            "processor_time": statistics.median(
                fused.processor_seconds / other.processor_seconds for fused, other in pairs
            ),
            "memory": max(fused.extra_bytes / other.extra_bytes for fused, other in pairs),
        }
    fused_values, plain_values = runs[FUSED][0].values, runs[PLAIN][0].values
    exact = in_new_process(replace(case_of[FUSED], variant=EXACT), wait_seconds, exact_values)
    return {
        "rows": [summarize(case, runs[variant]) for variant, case in case_of.items()],
        "ratios": ratios,
        "differences": {
            "fused - plain": difference(fused_values, plain_values),
            "fused - exact": difference(fused_values, exact),
            "plain - exact": difference(plain_values, exact),
        },
    }


def sizes(tokens: int, growth: int) -> Iterator[int]:
    """Yield `tokens` halved `growth` times, then one time less, up to `tokens` itself."""
    for halving in reversed(range(growth + 1)):
        yield tokens >> halving


def table(results: list[dict[str, Any]]) -> Table:
    """Return the table of results.

    The columns `time`, `processor` and `memory` are ratios: the fused head over the row's variant.
    """
    names = ("forward_seconds", "backward_seconds", "seconds", "processor_seconds")
    output = Table("dtype", "tokens", "variant", "forward s", "backward s", "sum s", "processor s")
    for name in ("extra GiB", "time", "processor", "memory"):
        output.add_column(name)
    for result in results:
        for row in result["rows"]:
            ratio = result["ratios"].get(row["variant"])
            output.add_row(
                row["dtype"],
                f"{row['tokens']:,}",
                row["variant"],
                *(f"{row[name]:.3g}" for name in names),
                f"{row['extra_bytes'] / GIB:.2f}",
                *(ratio_texts(ratio) if ratio else ()),
            )
        output.add_section()
    return output


def ratio_texts(ratio: dict[str, float]) -> list[str]:
    times = [f"{ratio[name]:.2f} x" for name in ("time", "processor_time")]
    return [*times, f"1/{1 / ratio['memory']:.1f}"]


def variants() -> list[str]:
    """Return the variants that this machine can run."""
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
    """Compare the log-prob head with plain log_softmax. The last line has all results as JSON."""
    if unknown := set(dtype) - set(DTYPES):
        raise typer.BadParameter(f"--dtype {', '.join(sorted(unknown))}: use {' or '.join(DTYPES)}")
    # The children's OpenMP reads it. Without it, waiting threads would count as CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # In a file or a log the table would be folded to 80 columns.
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 130)
    plan = [(name, size) for name in dtype for size in sizes(tokens, growth)]
    results = []
    for name, size in track(plan, "measuring", console=console):
        case_of = {variant: Case(variant, name, size, vocabulary, hidden) for variant in variants()}
        results.append(compare(case_of, rounds if size == tokens else 1, wait_seconds))
        console.print(table(results))  # after each size, because the largest take minutes
    for result in results:
        row = result["rows"][0]
        for pair, differences in result["differences"].items():
            worst = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
            console.print(f"{row['dtype']}, {row['tokens']:,} tokens, {pair}: {worst}")
    setting = {"vocabulary": vocabulary, "hidden": hidden, "rounds": rounds}
    print(json.dumps({"bench": "logprobs", **facts(), **setting, "results": results}))


if __name__ == "__main__":
    typer.run(main)
