"""The log-prob head against log_softmax of full logits: values and both gradients, by torch and by
Triton's kernels on a GPU or in Triton's interpreter.

Triton is not in the CPU lock, because vLLM behaves differently where it is installed. Its
interpreter must be chosen before the import. `make test-triton` handles both.

Shape letters: T tokens, H hidden size, V vocabulary entries (of one rank, where there are several).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_megatron.policy import vocab_parallel
from dapo_megatron.policy.vocab_parallel import top_entries
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
    with_entropy,
)
from tests.helpers.ranks import run_ranks

HAS_CUDA = torch.cuda.is_available()
RUNS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None or not (HAS_CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="no GPU and TRITON_INTERPRET is not set: make test-triton",
)
TRITON = pytest.param("triton", marks=RUNS_TRITON)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def moved(values: Any, device: str) -> Any:
    """Return a head or its result with all tensors on this device."""
    parts = {field.name: getattr(values, field.name) for field in fields(values)}
    on_device = {name: part.to(device) for name, part in parts.items() if torch.is_tensor(part)}
    return replace(values, **on_device)


def device_of(by: vocab_parallel.Head) -> str:
    return "cuda" if by == "triton" and HAS_CUDA else "cpu"


def computed(head: Head, by: vocab_parallel.Head, **keys: Any) -> HeadResult:
    """Return the result of the head, computed where its kernels run."""
    result: HeadResult = moved(fused_head(moved(head, device_of(by)), by=by, **keys), "cpu")
    return result


@pytest.mark.parametrize(
    ("by", "dtype"),
    [
        ("torch", torch.float64),
        ("torch", torch.float32),
        pytest.param("triton", torch.float32, marks=RUNS_TRITON),
    ],
)
@settings(max_examples=60)
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
    has_entropy=st.booleans(),
    num_targets=st.sampled_from([None, 1, 3]),
)
@example(0, 30, 4, 8, 7, 16, 0.6, 1.0, 0, True, None)  # no tokens
@example(0, 30, 4, 8, 7, 16, 0.6, 1.0, 0, False, 3)
@example(6, 1, 4, 8, 7, 16, 0.6, 1.0, 0, True, None)  # one entry: its log-prob is 0
@example(6, 30, 2, 10, 3, 4, 0.6, 1.0, 0, True, 3)  # padding starts at a tile; several blocks a row
def test_values_and_gradients_equal_those_of_full_logits(
    by: vocab_parallel.Head,
    dtype: torch.dtype,
    num_tokens: int,
    num_entries: int,
    padding: int,
    tile: int,
    block: int,
    block_entries: int,
    temperature: float,
    std: float,
    seed: int,
    has_entropy: bool,
    num_targets: int | None,
) -> None:
    if by == "triton":
        num_targets, has_entropy = None, False
    head = make_head(num_tokens, num_entries, std=std, seed=seed, num_targets=num_targets).to(dtype)
    head = replace(head, temperature=temperature)
    head = with_entropy(head, seed) if has_entropy else head
    with pytest.MonkeyPatch.context() as patch, tiles_of(tile, block):
        if by == "triton":
            patch.setattr("dapo_megatron.policy.head_kernels.BLOCK_ENTRIES", block_entries)
        outcome = computed(padded(head, padding), by, num=num_entries)
    assert {outcome.logp.dtype, outcome.entropy.dtype, outcome.grad_weight.dtype} == {dtype}
    assert not outcome.grad_weight[num_entries:].any()
    outcome = replace(outcome, grad_weight=outcome.grad_weight[:num_entries])
    assert_equal(outcome, plain(head.to(torch.float64)), TOLERANCE[dtype])


@pytest.mark.parametrize("by", ["torch", TRITON])
@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_logits_neither_overflow_nor_lose_precision(
    by: vocab_parallel.Head, shift: float
) -> None:
    head = make_head(4, 20).to(torch.float32)
    head.hidden[:, 0], head.weight[:, 0] = 1.0, shift
    # Few digits, so that products and sums are exact.
    head.hidden[:, 1:] = (head.hidden[:, 1:] * 4).round() / 4
    head.weight[:, 1:] = (head.weight[:, 1:] * 8).round() / 8
    with tiles_of(6):
        outcome = computed(head, by)
    expected = plain(head.to(torch.float64))
    torch.testing.assert_close(outcome.logp.double(), expected.logp, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(outcome.entropy.double(), expected.entropy, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("by", "num_tokens", "has_entropy"),
    [
        ("torch", 0, True),
        ("torch", 5, True),
        ("torch", 5, False),
        pytest.param("triton", 20, False, marks=RUNS_TRITON),
    ],
)
def test_a_gradient_added_to_main_grad_is_that_of_autograd(
    by: vocab_parallel.Head, num_tokens: int, has_entropy: bool, dtype: torch.dtype
) -> None:
    """On CPU to the bit: the product of a tile is rounded before it is added. A GPU adds products
    in float32; without fusion they are rounded first."""
    head = padded(make_head(num_tokens, 30, hidden=8).to(dtype), 3)
    head = moved(with_entropy(head) if has_entropy else head, device_of(by))
    with tiles_of(8, 2):
        fused, separate = (accumulated(head, 30, fused=on, by=by) for on in (True, False))
    tolerance = 0.0
    if head.hidden.is_cuda:
        tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for left, right in zip(fused, separate, strict=True):
        scale = float(right.abs().max()) if right.numel() else 0.0
        torch.testing.assert_close(left, right, rtol=0.0, atol=tolerance * scale)
    assert bool(fused[1][:30].any()) == (num_tokens > 0) and not fused[1][30:].any()


@pytest.mark.parametrize("by", ["torch", TRITON])
def test_bfloat16_rounds_logits_and_gradients_but_not_the_softmax(by: vocab_parallel.Head) -> None:
    """The plain computation has the same bfloat16 logits. The gradient of a row is a sum over 300
    tokens that is rounded only once, so it is as close to float64 as bfloat16 allows."""
    head = make_head(300, 50, hidden=16, std=0.3).to(torch.bfloat16)
    head = replace(head, temperature=0.7 if by == "torch" else 1.0)
    with tiles_of(8):
        outcome = computed(head, by)
    assert outcome.logp.dtype == outcome.entropy.dtype == torch.float32
    assert outcome.grad_hidden.dtype == outcome.grad_weight.dtype == torch.bfloat16
    expected = moved(plain(moved(head, device_of(by)), torch.float32), "cpu")
    torch.testing.assert_close(outcome.logp, expected.logp, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(outcome.entropy, expected.entropy, rtol=0.0, atol=1e-5)
    exact = plain(head.to(torch.float64))
    for name in ("grad_hidden", "grad_weight"):
        left, right = getattr(outcome, name).double(), getattr(exact, name)
        assert float((left - right).norm() / right.norm()) < 2**-8, name


# --------------------------------------------------------------------------- several ranks

ROWS = 8
"""Rows of each of two ranks."""
NUM_ENTRIES = (13, 5, 16)
"""Padding on the last rank, only padding there, none."""


def _shards(rank: int, heads: list[Head], by: vocab_parallel.Head) -> list[tuple[HeadResult, int]]:
    return [_shard(rank, head, by) for head in heads]


def _shard(rank: int, head: Head, by: vocab_parallel.Head) -> tuple[HeadResult, int]:
    """Return this rank's outcome and its number of all-reduces."""
    first, num_entries = rank * ROWS, len(head.weight)
    whole = padded(head, 2 * ROWS - num_entries)
    own_head = replace(whole, weight=whole.weight[first : first + ROWS])
    calls = []
    reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, tiles_of(3, 4):
        patch.setattr(dist, "all_reduce", counted)
        num = min(ROWS, num_entries - first)
        world = dist.group.WORLD
        outcome = fused_head(own_head, first=first, num=num, group=world, by=by)
        top = top_entries(
            own_head.hidden, own_head.weight, 5, first_entry=first, num_entries=num, group=world
        )
    assert torch.equal(top, (head.hidden @ head.weight.t()).topk(5).indices)
    return outcome, len(calls)


@pytest.mark.skipif(HAS_CUDA, reason="two ranks of gloo, on CPU")
@pytest.mark.parametrize("by", ["torch", TRITON])
def test_tensor_parallel_ranks_agree_with_a_single_rank(by: vocab_parallel.Head) -> None:
    dtype = torch.float64 if by == "torch" else torch.float32
    heads = [make_head(7, num, seed=num) for num in NUM_ENTRIES]
    heads.append(make_head(0, NUM_ENTRIES[0]))  # an empty micro-batch
    heads = [replace(head.to(dtype), temperature=0.8) for head in heads]
    if by == "torch":
        heads += [with_entropy(head) for head in heads]
        heads.append(make_head(7, NUM_ENTRIES[0], num_targets=3))
    by_rank = run_ranks(_shards, 2, heads, by)
    for head, *parts in zip(heads, *by_rank, strict=True):
        outcomes = [outcome for outcome, _ in parts]
        num = len(head.weight)
        weight = torch.cat([outcome.grad_weight for outcome in outcomes])
        assert not weight[num:].any()
        for outcome in outcomes:
            total = replace(
                outcome,
                grad_hidden=torch.stack([outcome.grad_hidden for outcome in outcomes]).sum(0),
                grad_weight=weight[:num],
            )
            assert_equal(total, plain(head.to(torch.float64)), TOLERANCE[dtype])
        # Their number does not depend on the tiles.
        assert [calls for _, calls in parts] == [2, 2]


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


# ---------------------------------------------------------------------------------- memory


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any result, including views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def test_full_logits_are_never_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "TILE_BYTES", 2**19)
    with LargestTensor() as largest:
        fused_head(make_head(512, 4096, hidden=2).to(torch.float32))
    assert largest.num_elements <= 2**19 // 4 == 512 * 4096 // 16
