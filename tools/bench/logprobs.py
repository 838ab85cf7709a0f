"""Compare time and memory of the log-prob head with plain `log_softmax` of whole logits.

    python tools/bench/logprobs.py                      # 8,192 tokens, 151,936 entries: 15 GiB free
    python tools/bench/logprobs.py --tokens 1024 --dtype float32

Each measurement is one forward and backward pass in a new process, so that its memory peak is not
that of another variant. All variants compute log-probs, entropies (without gradient) and both
gradients. Variants take turns, so that a busy machine slows all. Memory is what is added to hidden
states, weights and targets, so it includes gradients. On a GPU there are two more variants:

    fused, triton    the head with Triton kernels
    matmuls alone    the four matmuls of any such head (logits twice, two gradients) on whole logits
                     in bfloat16: the least time that this computation can take
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import typer
from bench import GIB, Meter, finish, show
from torch import Tensor

from dapo_megatron.policy.vocab_parallel import linear_logprobs

FUSED, PLAIN, TRITON, MATMULS = "fused", "plain", "fused, triton", "matmuls alone"
HEADS = {FUSED: "torch", TRITON: "triton"}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def variants() -> list[str]:
    """Return the variants that this machine can run."""
    if not torch.cuda.is_available():
        return [FUSED, PLAIN]
    return [FUSED, PLAIN, *([TRITON] if find_spec("triton") else []), MATMULS]


def plain_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies of whole logits, with as few copies as torch allows."""
    logprobs_TV = (hidden_TH @ weight_VH.t()).float().log_softmax(-1)
    with torch.no_grad():
        entropy_T = -logprobs_TV.exp().mul_(logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, targets_T[:, None]).squeeze(1), entropy_T


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


@dataclass(frozen=True)
class Case:
    """Variant, dtype and sizes of one measurement."""

    variant: str
    dtype: str
    num_tokens: int
    num_entries: int
    hidden_size: int

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, weights and targets. Logits have a standard deviation of 2."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": DTYPES[self.dtype]}
        hidden_TH = torch.empty(self.num_tokens, self.hidden_size, **options)
        weight_VH = torch.empty(self.num_entries, self.hidden_size, **options)
        hidden_TH.normal_(generator=generator).requires_grad_()
        weight_VH.normal_(std=2.0 / self.hidden_size**0.5, generator=generator).requires_grad_()
        targets_T = torch.randint(
            self.num_entries, (self.num_tokens,), generator=generator, device=device
        )
        return hidden_TH, weight_VH, targets_T

    def run(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies, without the backward pass."""
        if self.variant == MATMULS:
            return _Matmuls.apply(*inputs[:2]), None  # type: ignore[no-untyped-call]
        if self.variant == PLAIN:
            return plain_logprobs(*inputs)
        hidden_TH, weight_VH, targets_T = inputs
        return linear_logprobs(
            hidden_TH,
            weight_VH,
            targets_T,
            temperature=1.0,
            first_entry=0,
            num_entries=self.num_entries,
            group=None,
            head=HEADS[self.variant],
        )

    def measure(self) -> tuple[float, float, int]:
        """Return seconds, CPU seconds and added bytes of a forward and backward pass, after one
        that loads libraries and, on a GPU, compiles kernels for these sizes."""
        self._pass()
        return self._pass()

    def _pass(self) -> tuple[float, float, int]:
        inputs = self.inputs()
        with Meter() as meter:
            self.run(inputs)[0].sum().backward()
        return meter.seconds, meter.cpu_seconds, meter.peak_bytes


def compare(cases: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Return a row per case: medians, and the largest memory."""
    runs: dict[str, list[tuple[float, float, int]]] = {case.variant: [] for case in cases}
    # A new process for each measurement.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for turn in range(rounds):
            for case in cases if turn % 2 == 0 else reversed(cases):
                runs[case.variant].append(pool.apply(case.measure))
    rows = []
    for case in cases:
        seconds, cpu_seconds, added = zip(*runs[case.variant])
        first = rows[0] if rows else None
        row = {
            "dtype": case.dtype,
            "tokens": case.num_tokens,
            "variant": case.variant,
            "seconds": statistics.median(seconds),
            "CPU seconds": statistics.median(cpu_seconds),
            "added GiB": max(added) / GIB,
        }
        for name in ("seconds", "CPU seconds", "added GiB"):
            row[f"fused / it, {name}"] = first[name] / row[name] if first else None
        rows.append(row)
    return rows


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the largest case.")] = 8192,
    vocabulary: Annotated[int, typer.Option(help="Vocabulary entries.")] = 151_936,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 896,
    dtype: Annotated[list[str], typer.Option(help="bfloat16, float32 or both.")] = list(DTYPES),  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Processes per variant and size.")] = 3,
    growth: Annotated[int, typer.Option(help="How often to halve the tokens.")] = 2,
) -> None:
    """Compare the log-prob head with plain log_softmax. The last line is JSON."""
    if unknown := set(dtype) - set(DTYPES):
        raise typer.BadParameter(f"--dtype {', '.join(sorted(unknown))}: use {' or '.join(DTYPES)}")
    # Read by OpenMP in the new processes. Without it, waiting threads would count as CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    rows = []
    for name in dtype:
        for halving in reversed(range(growth + 1)):
            sizes = (name, tokens >> halving, vocabulary, hidden)
            rows += compare([Case(variant, *sizes) for variant in variants()], rounds)
    show(f"log-probs of {vocabulary:,} entries, hidden size {hidden:,}", rows)
    finish("logprobs", vocabulary=vocabulary, hidden=hidden, rounds=rounds, measured=rows)


if __name__ == "__main__":
    typer.run(main)
