"""The gated delta net (arXiv 2412.06464) of Qwen3.5, which Megatron-core lacks without a GPU.

Megatron's own gated delta net needs flash-linear-attention, whose kernels run only on GPUs. Without
them, it accepts neither packed rows nor context parallelism. This one is made of Megatron's linear
layers and torch, and uses the kernels where they are installed. Its sequences are the blocks of
`attention_plan`, so packed and padded rows are one code path, and the state of each sequence starts
at zero. With context parallelism the projected tokens of all ranks are gathered, as
attention gathers keys and values, and each rank keeps the outputs of its own tokens.

Shape letters: T tokens of a micro-batch on this rank, C channels of query, key and value, W width
of the convolution; S sequences of one block, padded to L tokens; H value heads of this rank, K and
V sizes of a key and a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional

from dapo_megatron.model import Delta
from dapo_megatron.policy.attention import attention_plan, bounds_of, widened
from dapo_megatron.policy.device import has_cuda

CHUNK = 64
"""Tokens whose outputs are computed from one state."""
EPS = 1e-6
"""Added to the squared length of queries and keys, as in transformers and vLLM."""


class GatedDeltaNet(MegatronModule):
    """Gated delta net in the place of Megatron's SelfAttention. Each tensor-parallel rank has
    complete heads. `in_proj` gives their queries, keys, values, gates, beta and decay."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, sizes: Delta, **_: Any
    ) -> None:
        super().__init__(config=config)
        ranks = config.tensor_model_parallel_size
        self.sizes, self.layer_number = sizes, layer_number
        self.heads = sizes.value_heads // ranks
        self.keys, self.values = sizes.key_rows // ranks, sizes.value_rows // ranks
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method}
        rows = 2 * (self.keys + self.values + self.heads)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, rows * ranks, bias=False, gather_output=False, **linear
        )
        self.conv1d = _Weight(_sharded(2 * self.keys + self.values, 1, sizes.kernel))
        self.A_log, self.dt_bias = _sharded(self.heads), _sharded(self.heads)
        self.out_norm = _Weight(torch.nn.Parameter(torch.empty(sizes.value_dim)))
        self.out_proj = RowParallelLinear(
            sizes.value_rows,
            config.hidden_size,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Map [length, rows, hidden] to ([length, rows, hidden], no bias)."""
        projected, _none = self.in_proj(hidden_states)
        length, rows = projected.shape[:2]
        parts = (2 * self.keys + self.values, self.values, 2 * self.heads)
        # Tokens of a sequence next to each other.
        qkv, gate, rates = projected.transpose(0, 1).flatten(0, 1).split(parts, -1)
        core = self._core(torch.cat([qkv, rates], -1), bounds_of(packed_seq_params, length, rows))
        output = self._gated_norm(core, gate.unflatten(-1, (self.heads, -1)))
        return self.out_proj(output.view(rows, length, -1).transpose(0, 1))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Describe the parameters for checkpoints, with the keys of Megatron's own layer."""
        described: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        by_head = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        described |= _sharded_by_rows(by_head, prefix, sharded_offsets)
        qkv = {"query": self.keys, "key": self.keys, "value": self.values}
        others = {"z": self.values, "beta": self.heads, "alpha": self.heads}
        for name, rows in (("in_proj.weight", qkv | others), ("conv1d.weight", qkv)):
            whole = described[f"{prefix}{name}"]

            def segments(key: str, weight: Tensor, *_: Any, rows: Any = rows) -> Any:
                parts = dict(zip(rows, weight.split([*rows.values()]), strict=True))
                return _sharded_by_rows(parts, f"{key}.", sharded_offsets)

            described[f"{prefix}{name}"] = ShardedTensorFactory(
                whole.key, whole.data, segments, torch.cat, whole.replica_id
            )
        return described

    def _core(self, features_TC: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """Return the outputs of the recurrence for this rank's tokens, [T, H, V]."""
        group = parallel_state.get_context_parallel_group()
        plan = attention_plan(bounds, group.rank(), group.size(), features_TC.device)
        if group.size() > 1:
            features_TC = gather_from_sequence_parallel_region(
                features_TC.contiguous(), group=group
            )
        repeats = self.sizes.value_heads // self.sizes.key_heads
        rule, outputs = rule_for(features_TC.dtype), []
        for block in plan.blocks:
            parts = [2 * self.keys + self.values, self.heads, self.heads]
            qkv, b, a = features_TC[block.keys_SK].split(parts, -1)
            convolved = functional.silu(causal_convolution(qkv, self.conv1d.weight))
            q, k, v = convolved.split([self.keys, self.keys, self.values], -1)
            q, k = (
                x.unflatten(-1, (-1, self.sizes.key_dim)).repeat_interleave(repeats, 2)
                for x in (q, k)
            )
            a = widened(a)
            decay = -self.A_log.to(a.dtype).exp() * functional.softplus(
                a + self.dt_bias.to(a.dtype)
            )
            out = rule(q, k, v.unflatten(-1, (self.heads, -1)), decay, b.sigmoid())
            outputs.append(out[block.own_2])
        return torch.cat(outputs)[plan.order_T]

    def _gated_norm(self, core: Tensor, gate: Tensor) -> Tensor:
        # Every rank has other heads, so the gradients of the weight are summed over ranks.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight)
        wide = widened(core)
        normed = functional.rms_norm(
            wide, weight.shape, weight.to(wide.dtype), self.config.layernorm_epsilon
        )
        return (normed * functional.silu(gate.to(wide.dtype))).to(core.dtype)


def causal_convolution(x_SLC: Tensor, weight_C1W: Tensor) -> Tensor:
    """Convolve each channel with its W last tokens; there are zeros before the first."""
    padded = functional.pad(x_SLC.transpose(1, 2), (weight_C1W.shape[-1] - 1, 0))
    return functional.conv1d(padded, weight_C1W, groups=len(weight_C1W)).transpose(1, 2)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of the gated delta rule, [S, L, H, V].

    `q` and `k` are [S, L, H, K], `v` [S, L, H, V], `decay` (a logarithm) and `beta` [S, L, H]. With
    q and k of length 1, and q divided by the root of K, for each token:

        state = exp(decay) state
        state = state + k (beta (v - k state))
        output = q state

    It is computed in float32 or more, for chunks of `CHUNK` tokens. What the tokens of a chunk
    write follows from a triangular system (arXiv 2412.06464, section 3.3). Chunks are one after the
    other, because each needs the state before it.
    """
    length, key_dim = k.shape[1], k.shape[3]
    q, k = (_normalized(widened(x)) for x in (q, k))

    def in_chunks(x: Tensor) -> Tensor:
        """Map [S, L, H, ...] to [S, H, chunks, CHUNK, ...]. Zeros neither decay nor write."""
        padding = [0, 0] * (x.dim() - 2) + [0, -length % CHUNK]
        return (
            functional.pad(widened(x), padding).unflatten(1, (-1, CHUNK)).movedim(3, 1).contiguous()
        )

    q, k, values, decay, beta = map(in_chunks, (q * key_dim**-0.5, k, v, decay, beta))
    total = decay.cumsum(-1)
    # Decay between two tokens of a chunk. The exponent is 0 where it would overflow.
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.mT * between).tril(-1)
    known = torch.cat([values * beta[..., None], k_beta * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    written, forgotten = solved.split([v.shape[-1], key_dim], -1)
    scores = (q @ k.mT) * between
    q_in = q * total.exp()[..., None]
    k_out = k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    state = values.new_zeros(*values.shape[:2], key_dim, v.shape[-1])
    outputs = []
    for chunk in range(total.shape[2]):
        new = written[:, :, chunk] - forgotten[:, :, chunk] @ state
        outputs.append(q_in[:, :, chunk] @ state + scores[:, :, chunk] @ new)
        state = state * kept[:, :, chunk] + k_out[:, :, chunk].mT @ new
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2).to(v.dtype)


def rule_for(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return the function that computes the gated delta rule for inputs of `dtype`."""
    # The kernels of flash-linear-attention refuse float32.
    fused = fused_rule() if dtype == torch.bfloat16 else None
    return fused or gated_delta_rule


@cache
def fused_rule() -> Callable[..., Tensor] | None:
    """Return the same function with the kernels of flash-linear-attention, or None if they cannot
    be used."""
    if not has_cuda() or find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    def rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        out, _state = chunk_gated_delta_rule(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            decay,
            beta,
            use_qk_l2norm_in_kernel=True,
        )
        return out

    return rule


def _sharded_by_rows(parts: Mapping[str, Tensor], prefix: str, offsets: Any) -> dict[str, Any]:
    made = make_sharded_tensors_for_checkpoint(parts, prefix, dict.fromkeys(parts, 0), offsets)
    return dict(made)


class _Weight(torch.nn.Module):
    """A weight with the name that it has in Megatron's own layer."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _sharded(*shape: int) -> torch.nn.Parameter:
    """Return a parameter whose rows are sharded by tensor parallelism."""
    parameter = torch.nn.Parameter(torch.empty(shape))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
