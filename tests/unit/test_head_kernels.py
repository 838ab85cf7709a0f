"""The Triton head compared with the torch head and with float64, on a GPU or in the interpreter.

Triton is not in the CPU lock, because vLLM behaves differently where it is installed. Its
interpreter must be chosen before the import. `make test-triton` handles both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.heads import (
    Head,
    HeadResult,
    accumulated,
    assert_equal,
    fused_head,
    make_head,
    padded,
    plain,
    tiles_of,
)
from tests.helpers.ranks import run_ranks

HAS_CUDA = torch.cuda.is_available()
runs = pytest.mark.skipif(
    find_spec("triton") is None or not (HAS_CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="no GPU and TRITON_INTERPRET is not set: make test-triton",
)
DEVICE = "cuda" if HAS_CUDA else "cpu"


def on_device(head: Head) -> Head:
    names = ("hidden", "weight", "targets", "weight_of_logprob")
    return replace(head, **{name: getattr(head, name).to(DEVICE) for name in names})


def on_cpu(actual: HeadResult) -> HeadResult:
    return HeadResult(*(getattr(actual, name).cpu() for name in HeadResult.__dataclass_fields__))


@runs
@settings(deadline=None, max_examples=100)
@given(
    num_tokens=st.integers(0, 6),
    num_entries=st.integers(1, 40),
    padding=st.integers(0, 4),
    tile=st.integers(1, 41),
    block=st.integers(1, 7),
    block_entries=st.sampled_from([4, 16, 4096]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    std=st.sampled_from([0.0, 1.0, 3.0]),
    seed=st.integers(0, 5),
)
@example(0, 30, 4, 8, 7, 16, 0.6, 1.0, 0)  # no tokens
@example(6, 1, 4, 8, 7, 16, 0.6, 1.0, 0)  # one entry, whose log-prob is 0
@example(6, 30, 2, 10, 3, 4, 0.6, 1.0, 0)  # several blocks per row; padding starts with a tile
def test_values_and_gradients_equal_the_torch_head(
    num_tokens: int,
    num_entries: int,
    padding: int,
    tile: int,
    block: int,
    block_entries: int,
    temperature: float,
    std: float,
    seed: int,
) -> None:
    from dapo_megatron.policy import head_kernels

    head = make_head(num_tokens, num_entries, std=std, seed=seed).to(torch.float32)
    head = on_device(replace(head, temperature=temperature))
    with pytest.MonkeyPatch.context() as patch, tiles_of(tile, block):
        patch.setattr(head_kernels, "BLOCK_ENTRIES", block_entries)
        actual = fused_head(padded(head, padding), num=num_entries, by="triton")
        expected = fused_head(padded(head, padding), num=num_entries, by="torch")
    assert actual.logp.dtype == actual.entropy.dtype == torch.float32
    assert not actual.grad_weight[num_entries:].any()
    assert_equal(actual, expected, 1e-5)
    actual = replace(actual, grad_weight=actual.grad_weight[:num_entries])
    assert_equal(on_cpu(actual), on_cpu(plain(head.to(torch.float64))), 1e-5)


@runs
def test_large_logits_neither_overflow_nor_lose_precision() -> None:
    head = make_head(4, 20).to(torch.float32)
    head.hidden[:, 0], head.weight[:, 0] = 1.0, 3e4
    head.weight[:, 1:] = (head.weight[:, 1:] * 8).round() / 8
    head.hidden[:, 1:] = (head.hidden[:, 1:] * 4).round() / 4
    head = on_device(head)
    with tiles_of(6):
        actual = on_cpu(fused_head(head, by="triton"))
    expected = on_cpu(plain(head.to(torch.float64)))
    torch.testing.assert_close(actual.logp.double(), expected.logp, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=0.0, atol=1e-5)


@runs
def test_bfloat16_gives_float32_values_and_bfloat16_gradients() -> None:
    head = on_device(make_head(300, 50, hidden=16, std=0.3).to(torch.bfloat16))
    with tiles_of(8, 64):
        actual, expected = (fused_head(head, by=by) for by in ("triton", "torch"))
    assert actual.logp.dtype == torch.float32 and actual.grad_hidden.dtype == torch.bfloat16
    torch.testing.assert_close(actual.logp, expected.logp, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(actual.entropy, expected.entropy, rtol=0.0, atol=1e-5)
    exact = on_cpu(plain(head.to(torch.float64)))
    for name in ("grad_hidden", "grad_weight"):
        left, right = getattr(on_cpu(actual), name).double(), getattr(exact, name)
        assert float((left - right).norm() / right.norm()) < 2**-8, name


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_the_weight_is_added_to_main_grad(dtype: torch.dtype) -> None:
    head = on_device(padded(make_head(20, 30, hidden=16, std=0.3).to(dtype), 2))
    with tiles_of(8, 16):
        fused, separate = (accumulated(head, 30, fused=on, by="triton") for on in (True, False))
        wanted = accumulated(head, 30, fused=True, by="torch")
    # A GPU adds products to main_grad in float32. Without fusion they are rounded first.
    tolerance = (2**-7 if dtype == torch.bfloat16 else 1e-5) if HAS_CUDA else 0.0
    for left, right, reference in zip(fused, separate, wanted, strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(left, right, rtol=0.0, atol=tolerance * scale)
        torch.testing.assert_close(left, reference, rtol=0.0, atol=2**-7 * scale)


def shard_outcome(rank: int, head: Head, rows: int) -> HeadResult:
    padded_head = padded(head, 2 * rows - len(head.weight))
    shard = replace(padded_head, weight=padded_head.weight[rank * rows : (rank + 1) * rows])
    with tiles_of(3, 4):
        return fused_head(
            shard,
            first=rank * rows,
            num=min(rows, len(head.weight) - rank * rows),
            group=torch.distributed.group.WORLD,
            by="triton",
        )


@runs
@pytest.mark.skipif(HAS_CUDA, reason="two ranks of gloo, on CPU")
@pytest.mark.parametrize("num_entries", [13, 5])  # the last rank has some padding, or only padding
def test_tensor_parallel_ranks_equal_one_rank(num_entries: int) -> None:
    head = replace(make_head(7, num_entries).to(torch.float32), temperature=0.8)
    parts = run_ranks(shard_outcome, 2, head, 8, timeout=120.0)
    expected = plain(head.to(torch.float64))
    for actual in parts:
        weight = torch.cat([part.grad_weight for part in parts])
        total = replace(
            actual,
            grad_hidden=parts[0].grad_hidden + parts[1].grad_hidden,
            grad_weight=weight[:num_entries],
        )
        assert not weight[num_entries:].any()
        assert_equal(total, expected, 1e-5)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dapo_megatron.policy import head_kernels

KINDS = {"targets": "*i64", "errors": "*bf16", "temperature": "fp32", "BLOCK": "constexpr"}
NUMBERS = ("num_entries", "row_stride", "error_stride", "start")
for kernel in (head_kernels._fold, head_kernels._error):
    kinds = {name: "i32" if name in NUMBERS else "*fp32" for name in kernel.arg_names} | {
        name: kind for name, kind in KINDS.items() if name in kernel.arg_names
    }
    # As for real tiles, whose rows start at multiples of 16 bytes.
    places = [number for number, kind in enumerate(kinds.values()) if kind[0] in "*i"]
    attrs = {(number,): [["tt.divisibility", 16]] for number in places}
    source = ASTSource(kernel, kinds, {"BLOCK": head_kernels.BLOCK_ENTRIES}, attrs)
    target = GPUTarget("cuda", 90, 32)
    text = triton.compile(source, target=target, options={"num_warps": 8}).asm["ptx"]
    assert "ld.global.v4.b32" in text, f"{kernel.__name__} reads less than 16 bytes at once"
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: make test-triton")
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Needs no GPU. Runs in a separate process, because the choice between interpreter and compiler
    is made at import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    completed = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
