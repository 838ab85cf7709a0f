"""Triton kernels that reduce a tile of logits: one read forward, one read and one write backward.

torch's operations (vocab_parallel.py) pass over a tile eight times forward and five times backward.
A tile is in the GPU's cache, so these passes cost time between matmuls, not memory traffic. With
these kernels one launch remains next to the matmuls. They are written by hand because
torch.compile's kernels need several passes forward (a maximum, then sums), and are recompiled for
new token counts.

Imported only if policy.logprob_head selects it. The tests run these kernels on CPU, in Triton's
interpreter (TRITON_INTERPRET=1).

Shape letters: E entries and B tokens of a tile.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]
from torch import Tensor

from dapo_megatron.policy.vocab_parallel import Reductions

BLOCK_ENTRIES = 4096
"""Entries of a row that are in registers at a time: 16 for each of 256 threads."""


class WithTriton(Reductions):
    """The operations in float32, with one target per token and without the gradient of the
    entropy."""

    def fold(
        self, logits_BE: Tensor, targets_BK: Tensor, start: int, temperature: float, sums_SB: Tensor
    ) -> None:
        """See Reductions."""
        assert targets_BK.shape[1] == 1
        assert logits_BE.stride(1) == sums_SB.stride(1) == targets_BK.stride(0) == 1
        num_tokens, num_entries = logits_BE.shape
        block = _block(num_entries)
        _fold[(num_tokens,)](
            logits_BE,
            targets_BK,
            *sums_SB,
            num_entries,
            logits_BE.stride(0),
            start,
            temperature,
            BLOCK=block,
            num_warps=_warps(block),
        )

    def error(
        self,
        logits_BE: Tensor,
        targets_BK: Tensor,
        start: int,
        temperature: float,
        log_z_B: Tensor,
        terms_SB: Tensor | None,
        error_BE: Tensor,
    ) -> None:
        """See Reductions."""
        assert terms_SB is None and targets_BK.shape[1] == 1
        assert logits_BE.stride(1) == error_BE.stride(1) == targets_BK.stride(0) == 1
        num_tokens, num_entries = logits_BE.shape
        block = _block(num_entries)
        _error[(num_tokens, triton.cdiv(num_entries, block))](
            logits_BE,
            error_BE,
            targets_BK,
            log_z_B,
            num_entries,
            logits_BE.stride(0),
            error_BE.stride(0),
            start,
            temperature,
            BLOCK=block,
            num_warps=_warps(block),
        )


def _block(num_entries: int) -> int:
    return min(triton.next_power_of_2(num_entries), BLOCK_ENTRIES)


def _warps(block: int) -> int:
    return max(min(block // 512, 8), 1)


# The kernels' arguments have no annotations, because Triton evaluates them and knows only its own.


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    logits,
    targets,
    tops,
    totals,
    weighteds,
    target_logits,
    num_entries,
    row_stride,
    start,
    temperature,
    BLOCK: tl.constexpr,
):
    """Update the four running sums of a token with its row, in one pass. One program per token."""
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * row_stride
    target = tl.load(targets + token) - start
    top = tl.load(tops + token)
    total = tl.load(totals + token)
    weighted = tl.load(weighteds + token)
    target_logit = tl.load(target_logits + token)
    for first in range(0, num_entries, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_real = column < num_entries
        x = tl.load(row + column, mask=is_real, other=-float("inf"))
        if temperature != 1.0:
            x = tl.div_rn(x, temperature)
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = top - new_top
        exp = tl.exp(x - new_top)
        scale = tl.exp(shift)
        # exp is 0 beyond the row, but 0 * -inf is not.
        below = tl.where(is_real, x - new_top, 0.0)
        weighted = (weighted + shift * total) * scale + tl.sum(exp * below, 0)
        total = total * scale + tl.sum(exp, 0)
        target_logit += tl.sum(tl.where(is_real & (column == target), x, 0.0), 0)
        top = new_top
    tl.store(tops + token, top)
    tl.store(totals + token, total)
    tl.store(weighteds + token, weighted)
    tl.store(target_logits + token, target_logit)


@triton.jit
def _error(  # type: ignore[no-untyped-def]
    logits,
    errors,
    targets,
    log_zs,
    num_entries,
    row_stride,
    error_stride,
    start,
    temperature,
    BLOCK: tl.constexpr,
):
    """Write exp(x - log z) - [target] of a token's block. One program per token and block of its
    row. `errors` may be `logits`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < num_entries
    x = tl.load(logits + token * row_stride + column, mask=is_real, other=0.0)
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
    error = tl.exp(x - tl.load(log_zs + token))
    error = tl.where(column == tl.load(targets + token) - start, error - 1.0, error)
    error = error.to(errors.dtype.element_ty)
    tl.store(errors + token * error_stride + column, error, mask=is_real)
