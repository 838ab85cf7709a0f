"""The compiled module `transformer_engine_torch` in plain torch, for tests without a GPU.

It has the functions that Transformer Engine's own Python calls for the layers of this project:
matrix products, norms, attention (padded and packed), the helpers of context parallelism, and FP8
(float8.py). All other names exist, and raise NotImplementedError when they are called. Matrices are
multiplied and summed in float32, or in higher precision if they have it.

Names and arguments are those of Transformer Engine 2.20 (`transformer_engine/pytorch/csrc`).
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
_ENUMS = {
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "NONE BULK_OVERLAP_AG",
    "NVTEScalingMode": "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
    "NVTE_QKV_Format": "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD "
    "NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD NVTE_QKV_Format_NOT_SET",
    "NVTE_QKV_Layout": "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD "
    "NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD "
    "NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD "
    "NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD NVTE_Paged_KV_BSHD_BSHD_BSHD "
    "NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD NVTE_Paged_KV_SBHD_SBHD_SBHD "
    "NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD "
    "NVTE_QKV_Layout_NOT_SET",
}
"""Names of each enumeration, in order."""
calls: dict[str, int] = {}
"""How often each function was called."""
_functions: dict[str, Any] = {}


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a function to the module, and count its calls."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] = calls.get(function.__name__, 0) + 1
        return function(*args, **kwargs)

    _functions[function.__name__] = counted
    return function


def module(names: Iterable[str]) -> types.ModuleType:
    """Return the module. Transformer Engine uses `names`."""
    made = types.ModuleType("transformer_engine_torch")
    for name, members in _ENUMS.items():
        values = {member: number for number, member in enumerate(members.split())}
        setattr(made, name, enum.IntEnum(name, values))
    constants = {
        "DType": DType,
        "get_cudnn_version": lambda: 92000,
        "get_cublasLt_version": lambda: 130200,
        "get_num_cublas_streams": lambda: 4,
        "get_stream_priority_range": lambda *_: (0, -1),
        "get_fused_attn_backend": lambda *_, **__: (
            made.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
            "",
        ),
    }
    vars(made).update(constants | _functions)

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else _NotThere(name)
        setattr(made, name, value)
        return value

    made.__getattr__ = missing  # type: ignore[method-assign]
    for name in names:  # `import *` takes what is there
        getattr(made, name)
    return made


class _NotThere:
    """A function of the compiled module that is not here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{self._name}")


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def _matrix(value: Any, transposed: bool, *, columnwise: bool = False) -> Tensor:
    """Return a matrix; of an FP8 tensor the copy that was stored in this direction."""
    if hasattr(value, "_fp8_dtype"):
        value = _dequantized(value, columnwise)
    flat = _wide(value.reshape(-1, value.shape[-1]))
    return flat.t() if transposed else flat


def _dequantized(value: Any, columnwise: bool) -> Tensor:
    """Return the values of one of the copies. Raise if it was not made or is out of date."""
    assert not (columnwise and getattr(value, "_transpose_invalid", False))
    others = ("data", "rowwise_data") if columnwise else ("data_transpose", "columnwise_data")
    kept = {name: None if name in others else part for name, part in value.get_metadata().items()}
    storage: Any = next(each for each in type(value).__mro__ if each.__name__.endswith("Storage"))
    values: Tensor = storage(**kept).dequantize(dtype=torch.float32)
    return values


def _store(value: Tensor, out: Tensor, *, accumulate: bool) -> None:
    view = out.view(value.shape)
    view.add_(value) if accumulate else view.copy_(value)


# ------------------------------------------------------------------------- matrix products


@op
def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: Any,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: Any = None,
) -> tuple[Any, ...]:
    """Return op(B) @ op(A) in row-major order, the gradient of the bias, and unused values."""
    left, right = _matrix(B, transb, columnwise=transb), _matrix(A, transa, columnwise=not transa)
    product = left @ right * alpha
    bias_grad = None
    if bias is not None and grad:
        bias_grad = left.sum(1 if transb else 0).to(B.dtype)
    elif bias is not None:
        product = product + bias
    if out is not None:
        _store(product, out, accumulate=accumulate)
        return out, bias_grad, gelu_in, extra_output
    dtype = getattr(A, "dtype", None) if out_dtype is None else TORCH[DType(int(out_dtype))]
    result = product.to(dtype)
    if not transb:
        result = result.view(*B.size()[:-1], result.shape[-1])
    if quantizer is not None:
        result = quantizer(result)
    return result, bias_grad, gelu_in, extra_output


@op
def te_general_grouped_gemm(
    A: Sequence[Tensor],
    transa: bool,
    B: Sequence[Tensor],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Any,
    bias: Any,
    bias_type: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: Any,
    accumulate: bool,
    use_split_accumulator: bool,
    num_multiprocessors: Any,
) -> Any:
    """Multiply the matrices of each expert."""
    first = 0
    for number, (right, left) in enumerate(zip(A, B, strict=True)):
        product = _matrix(left, transb, columnwise=transb) @ _matrix(
            right, transa, columnwise=not transa
        )
        if single_output:
            rows = out[0].view(-1, out[0].shape[-1])[first : first + len(product)]
            first += len(product)
        else:
            rows = out[number]
        _store(product, rows, accumulate=accumulate)
    return bias


# ----------------------------------------------------------------------------------- norms


@op
def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """Return the normalized tensor, nothing, and 1 / rms of each row."""
    wide = _wide(x)
    inverse = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    gamma = _wide(weight) + (1 if zero_centered_gamma else 0)
    result = (wide * inverse[..., None] * gamma).to(TORCH[DType(int(out_dtype))])
    if quantizer is not None:
        result = quantizer.quantize(result, out=out)
    elif out is not None:
        out.copy_(result)
        result = out
    return result, None, inverse.reshape(-1)


@op
def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the tensor and of the weight."""
    rows, grad = _matrix(x, False), _matrix(dz, False)
    normal = rows * rsigma.reshape(-1, 1)
    weighted = grad * (_wide(gamma) + (1 if zero_centered_gamma else 0))
    dx = rsigma.reshape(-1, 1) * (weighted - normal * (weighted * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype).view(x.shape), (grad * normal).sum(0).to(gamma.dtype)


# ------------------------------------------------------------------------------- attention


def _scores(q: Tensor, k: Tensor, scale: float, *, causal: bool) -> Tensor:
    """Return scores [heads, queries, keys] of q and k [tokens, heads, size]."""
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if causal:
        allowed = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def _of_heads(value: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads of keys or values for each group of query heads."""
    return _wide(value).repeat_interleave(num_heads // value.shape[1], 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output [queries, heads, size] and log-sum-exp [queries, heads] of a sequence."""
    heads = q.shape[1]
    scores = _scores(_wide(q), _of_heads(k, heads), scale, causal=causal)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hts,shd->thd", (scores - lse[..., None]).exp(), _of_heads(v, heads))
    return out.to(q.dtype), lse.t()


def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of a sequence, given the log-sum-exp of `_attend`."""
    heads, groups = q.shape[1], k.shape[1]
    wide_q, wide_k, wide_v = _wide(q), _of_heads(k, heads), _of_heads(v, heads)
    wide_grad = _wide(grad)
    probs = (_scores(wide_q, wide_k, scale, causal=causal) - lse.t()[..., None]).exp()
    delta = (wide_grad * _wide(out)).sum(-1).t()[..., None]
    d_scores = probs * (torch.einsum("thd,shd->hts", wide_grad, wide_v) - delta) * scale
    dq = torch.einsum("hts,shd->thd", d_scores, wide_k)
    dk = torch.einsum("hts,thd->shd", d_scores, wide_q)
    dv = torch.einsum("hts,thd->shd", probs, wide_grad)

    def of_groups(value: Tensor) -> Tensor:
        return value.view(value.shape[0], groups, heads // groups, -1).sum(2)

    return dq.to(q.dtype), of_groups(dk).to(k.dtype), of_groups(dv).to(v.dtype)


Spans = list[tuple[slice, slice]]


def _spans(cu_q: Tensor, cu_kv: Tensor, padded_q: Tensor | None, padded_kv: Tensor | None) -> Spans:
    """Return the queries and keys of each packed sequence."""
    starts_q = (cu_q if padded_q is None else padded_q).tolist()
    starts_kv = (cu_kv if padded_kv is None else padded_kv).tolist()
    sizes = zip(starts_q, cu_q.diff().tolist(), starts_kv, cu_kv.diff().tolist(), strict=False)
    return [(slice(a, a + n), slice(b, b + m)) for a, n, b, m in sizes if n]


def _is_packed(layout: Any) -> bool:
    return "THD" in layout.name


def _by_sequence(value: Tensor, layout: Any) -> Tensor:
    """Return a view with the batch first."""
    return value.transpose(0, 1) if layout.name.split("_")[1].startswith("SB") else value


@op
def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    softmax_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: Any,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: Any,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    *_: Any,
) -> list[Tensor]:
    """Return the output, the log-sum-exp of the scores, and the state of a random generator."""
    causal = "CAUSAL" in attn_mask_type.name
    with torch.no_grad():
        if _is_packed(qkv_layout):
            out = q.new_zeros(*q.shape[:-1], v.shape[-1])
            lse = torch.zeros(q.shape[0], q.shape[1], 1)
            padded = cu_seqlens_q_padded, cu_seqlens_kv_padded
            for queries, keys in _spans(cu_seqlens_q, cu_seqlens_kv, *padded):
                values, stats = _attend(q[queries], k[keys], v[keys], attn_scale, causal=causal)
                out[queries], lse[queries] = values, stats[..., None]
        else:
            rows = zip(*(_by_sequence(each, qkv_layout) for each in (q, k, v)), strict=True)
            results = [_attend(*row, attn_scale, causal=causal) for row in rows]
            out = _by_sequence(torch.stack([each for each, _ in results]), qkv_layout).contiguous()
            lse = torch.stack([stats.t() for _, stats in results])[..., None]
    return [out, lse, torch.zeros(2, dtype=torch.int64)]


@op
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    softmax_format: Any,
    dsoftmax_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: Any,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    fake_dtype: Any,
    aux: Sequence[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    *_: Any,
) -> list[Any]:
    """Return the gradients of q, k and v, and of two tensors that there are not."""
    causal = "CAUSAL" in attn_mask_type.name
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    do, lse = do.view_as(o), aux[0]
    if _is_packed(qkv_layout):
        padded = cu_seqlens_q_padded, cu_seqlens_kv_padded
        for a, b in _spans(cu_seqlens_q, cu_seqlens_kv, *padded):
            row = q[a], k[b], v[b], o[a], do[a], lse[a, :, 0]
            dq[a], dk[b], dv[b] = _attend_backward(*row, attn_scale, causal=causal)
        return [dq, dk, dv, None, None]
    of_rows = [_by_sequence(each, qkv_layout) for each in (q, k, v, o, do)]
    grads = [_by_sequence(each, qkv_layout) for each in (dq, dk, dv)]
    for number, stats in enumerate(lse):
        row = [each[number] for each in of_rows]
        result = _attend_backward(*row, stats[..., 0].t(), attn_scale, causal=causal)
        for target, value in zip(grads, result, strict=True):
            target[number] = value
    return [dq, dk, dv, None, None]


# ------------------------------------------------------------------- context parallelism
# Each rank has two chunks of every sequence, `half` 0 and 1.


def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Return the places of the first or second halves of all sequences."""

    def places() -> Iterator[Tensor]:
        for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
            middle = (start + stop) // 2
            yield torch.arange(middle, stop) if half else torch.arange(start, middle)

    return torch.cat(list(places()))


@op
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Return one half of every sequence; of two stacked tensors (k and v), of both."""
    dim = 0 if tensor.dim() == 3 else 1
    return tensor.index_select(dim, _half(cu_seqlens, half_idx)).contiguous()


@op
def thd_second_half_lse_correction(
    lse: Tensor, step: Tensor, cu_seqlens: Tensor, lse_packed: bool
) -> None:
    """Add a step's log-sum-exp [heads, tokens] to those of the second halves."""
    assert lse_packed
    at = _half(cu_seqlens, 1)
    lse[:, at] = torch.logaddexp(lse[:, at], step[:, : len(at)])


@op
def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> Tensor:
    """Return the log-sum-exp of the second halves."""
    assert lse_packed
    at = _half(cu_seqlens, 1)
    out = lse.new_zeros(lse.shape[0], second_half_lse_seqlen)
    out[:, : len(at)] = lse[:, at]
    return out


@op
def thd_out_correction(
    out: Tensor,
    step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    step_lse: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Weigh the output so far and that of a step by their shares of the sum."""
    assert lse_packed
    at = _half(cu_seqlens, 1) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    number = len(at)
    before = (old_lse[:, at] - lse[:, at]).exp().t()[..., None]
    share = (step_lse[:, :number] - lse[:, at]).exp().t()[..., None]
    values = _wide(step).view(-1, *out.shape[1:])[:number]
    out[at] = (_wide(out[at]) * before + values * share).to(out.dtype)


@op
def thd_grad_correction(
    grad: Tensor, step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Add or copy the gradients of a step to the halves: "add", "copy", "zero" or "none" each."""
    dim = 0 if grad.dim() == 3 else 1
    halves = {half: how for half, how in enumerate((first_half, second_half)) if how != "none"}
    for half, how in halves.items():
        at = _half(cu_seqlens, half)
        values = step.index_select(dim, at) if len(halves) == 2 else step.narrow(dim, 0, len(at))
        if how == "copy":
            grad.index_copy_(dim, at, values)
        elif how == "add":
            grad.index_add_(dim, at, values)
        else:
            grad.index_fill_(dim, at, 0)
