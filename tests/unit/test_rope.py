"""Rotary position embedding against Megatron's own: the same bits, from positions."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,
    _apply_rotary_pos_emb_thd,
)
from torch import Tensor

from dapo_megatron.policy.rope import apply, rotation
from dapo_megatron.policy.rows import RowShape, make_rows
from tests.helpers.batches import random_batch

LENGTHS = (5, 16, 33, 3)
HEADS, COLUMNS = 3, 16
PRECISIONS = [torch.float32, torch.bfloat16, torch.float64]


@dataclass(frozen=True)
class Group:
    """The part of a process group that Megatron asks for."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def settings(precision: torch.dtype, *, latent: bool = False) -> Any:
    return SimpleNamespace(
        params_dtype=precision, apply_rope_fusion=False, multi_latent_attention=latent
    )


def frequencies(rotated: int) -> Tensor:
    return 1.0 / 100.0 ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


def angles(length: int, rotated: int) -> Tensor:
    """Megatron's, for positions 0, 1, 2, ..."""
    half = torch.outer(torch.arange(length, dtype=torch.float32), frequencies(rotated))
    return torch.cat((half, half), dim=-1)[:, None, None]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("latent", "rotated"), [(False, 16), (True, 16), (False, 8)])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_rows_have_megatrons_bits(
    precision: torch.dtype, latent: bool, rotated: int, cp_size: int
) -> None:
    batch = random_batch(LENGTHS, vocab=9)
    multiple = 2 * cp_size if cp_size > 1 else 1
    for rank in range(cp_size):
        shape = RowShape(True, multiple, multiple, rank, cp_size)
        rows = make_rows(batch, [0, 1, 2, 3], shape, torch.device("cpu"))
        assert rows.packed is not None
        heads = torch.randn(rows.tokens.shape[1], HEADS, COLUMNS).to(precision)
        wanted = _apply_rotary_pos_emb_thd(
            heads,
            rows.packed.cu_seqlens_q,
            angles(rows.packed.max_seqlen_q, rotated),
            multi_latent_attention=latent,
            cp_group=Group(rank, cp_size),
        )
        config = settings(precision, latent=latent)
        got = apply(heads, rotation(rows.positions, frequencies(rotated), config), config)
        assert got.dtype == precision
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_padded_rows_have_megatrons_bits_and_gradient(precision: torch.dtype) -> None:
    rows = make_rows(
        random_batch(LENGTHS, vocab=9), [0, 2, 3], RowShape(False, 1, 1, 0, 1), torch.device("cpu")
    )
    num_rows, length = rows.tokens.shape
    assert num_rows == 3
    heads = torch.randn(length, num_rows, HEADS, COLUMNS).to(precision).requires_grad_()
    config = settings(precision)
    got = apply(heads, rotation(rows.positions, frequencies(COLUMNS), config), config)
    wanted = _apply_rotary_pos_emb_bshd(heads, angles(length, COLUMNS))
    assert torch.equal(got, wanted)
    weights = torch.randn_like(got)
    gradients = [torch.autograd.grad((x * weights).sum(), heads)[0] for x in (got, wanted)]
    assert torch.equal(*gradients)
