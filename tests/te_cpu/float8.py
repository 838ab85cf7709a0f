"""FP8 functions of the compiled module: quantize, transpose, pad, and cast parts of weights.

Values are stored as bytes of torch's float8 types, scaled and clamped as the kernels do it
(`common/recipe/recipe_common.cuh`, `common/transpose/quantize_transpose_*_blockwise.cu`).
Transposed copies are stored only if the quantizer asks for them, because matrix products read them
as an H100 does: a copy that is out of date gives wrong products here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.te_cpu.extension import TORCH, DType, op

BLOCK = 128


def _float8(dtype: Any) -> torch.dtype:
    return TORCH[DType(int(dtype))]


def _scale_of(amax: Tensor, limit: float, pow_2: bool, epsilon: float) -> Tensor:
    """Return the factor that maps amax to the largest value of the format."""
    amax = amax.clamp(min=epsilon)
    scale = (limit / amax).clamp(max=torch.finfo(torch.float32).max)
    if pow_2:
        scale = torch.ldexp(torch.ones(()), torch.frexp(scale).exponent - 1)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)


def _bytes(scaled: Tensor, dtype: Any) -> Tensor:
    """Round to FP8. Values beyond the range become the largest value."""
    limit = torch.finfo(_float8(dtype)).max
    return scaled.clamp(-limit, limit).to(_float8(dtype)).view(torch.uint8)


def _is_blockwise(quantizer: Any) -> bool:
    return hasattr(quantizer, "block_scaling_dim")


# ----------------------------------------------------------------------- quantize


@op
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """Return a quantized tensor with the copies that the quantizer asks for, without values."""
    from transformer_engine.pytorch.tensor import float8_tensor

    # Delayed scaling does not describe its tensors in Python. They are those of current scaling.
    described: Any = float8_tensor.Float8CurrentScalingQuantizer
    kind = type(quantizer) if _is_blockwise(quantizer) else described
    parts = {
        name.removeprefix("_"): torch.zeros(size, dtype=kept)
        for name, (size, kept) in kind.inner_tensor_specs(quantizer, tuple(shape)).items()
    }
    if not _is_blockwise(quantizer):
        names = {"scale_inv": "fp8_scale_inv", "transpose": "data_transpose"}
        parts = {"data": None} | {names.get(name, name): part for name, part in parts.items()}
    else:
        directions = ("rowwise", "columnwise")
        every = [f"{name}_{part}" for name in directions for part in ("data", "scale_inv")]
        parts = dict.fromkeys(every) | parts
    metadata = kind.storage_metadata(quantizer, dtype)
    whole = {} if quantizer.internal else {"shape": tuple(shape), "dtype": dtype}
    return metadata["cls"](**whole, **parts, **metadata["nontensor_kwargs"])


@op
def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Return `output`, or a new tensor, with the values of a tensor."""
    if noop is not None and noop.item():
        return output
    values = tensor.dequantize() if hasattr(tensor, "_fp8_dtype") else tensor.detach()
    if output is None:
        output = create_empty_quantized_tensor(quantizer, values.shape, values.dtype, None, False)
    if _is_blockwise(quantizer):
        _quantize_blocks(values, quantizer, output)
    else:
        _quantize_tensor(values.float(), quantizer, output)
    return output


def _quantize_tensor(values: Tensor, quantizer: Any, output: Any) -> None:
    """Quantize with one scale."""
    amax = values.abs().amax() if values.numel() else torch.zeros(())
    if hasattr(quantizer, "amax_epsilon"):  # current scaling
        if quantizer.with_amax_reduction:
            group = quantizer._canonicalized_amax_reduction_group()
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
        limit = torch.finfo(_float8(quantizer.dtype)).max
        scale = _scale_of(amax, limit, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    else:  # delayed scaling, or a part of a weight with a given scale
        scale = quantizer.scale.clone()
        if quantizer.amax.numel():
            torch.maximum(quantizer.amax, amax, out=quantizer.amax)
    stored = _bytes(values * scale, quantizer.dtype)
    output._scale_inv.fill_(1 / scale.item())
    _set_copy(output, "_data", stored if quantizer.rowwise_usage else None)
    transposed = fp8_transpose(stored, quantizer.dtype) if quantizer.columnwise_usage else None
    _set_copy(output, "_transpose", transposed)
    output._transpose_invalid = transposed is None


def _set_copy(output: Any, name: str, value: Tensor | None) -> None:
    """Set one of the copies, in place if there is one: it may be a part of a larger buffer."""
    if value is not None and getattr(output, name) is not None:
        getattr(output, name).copy_(value.view(getattr(output, name).shape))
    else:
        setattr(output, name, value)


def _quantize_blocks(values: Tensor, quantizer: Any, output: Any) -> None:
    """Quantize with a scale per block. The transposed copy has blocks, thus values, of its own."""
    matrix = values.float().reshape(-1, values.shape[-1])
    usages = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    for name, used in usages.items():
        if not used:
            _set_copy(output, f"_{name}_data", None)
            _set_copy(output, f"_{name}_scale_inv", None)
            continue
        columnwise = name == "columnwise"
        shape = tuple(values.shape)
        stored, inverse = _blocks(matrix.t() if columnwise else matrix, quantizer)
        inverse = _padded(inverse, quantizer.get_scale_shape(shape, columnwise))
        size = quantizer.get_columnwise_shape(shape) if columnwise else shape
        _set_copy(output, f"_{name}_data", stored.reshape(tuple(size)))
        _set_copy(output, f"_{name}_scale_inv", inverse)


def _blocks(matrix: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Return the bytes of a matrix, and 1 / scale of blocks of 128 columns. The latter are [rows of
    blocks, columns of blocks] with 128 rows per block, and transposed with one row per block."""
    rows = BLOCK if quantizer.block_scaling_dim == 2 else 1
    limit = torch.finfo(_float8(quantizer.dtype)).max
    amax = _block_amax(matrix, rows)
    scale = _scale_of(amax, limit, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    stored = _bytes(matrix * _per_value(scale, rows, matrix), quantizer.dtype)
    return stored, 1 / (scale if rows == BLOCK else scale.t())


def _block_amax(matrix: Tensor, rows: int) -> Tensor:
    """Return the largest absolute value of each block of `rows` x 128."""
    height, width = -(-matrix.shape[0] // rows), -(-matrix.shape[1] // BLOCK)
    padded = _padded(matrix.abs(), (height * rows, width * BLOCK))
    return padded.view(height, rows, width, BLOCK).amax((1, 3))


def _per_value(scale: Tensor, rows: int, matrix: Tensor) -> Tensor:
    """Repeat the scale of each block for each of its values."""
    repeated = scale.repeat_interleave(rows, 0).repeat_interleave(BLOCK, 1)
    return repeated[: matrix.shape[0], : matrix.shape[1]]


def _padded(matrix: Tensor, shape: Iterable[int]) -> Tensor:
    """Add zeros at the end of both dimensions."""
    height, width = shape
    return torch.nn.functional.pad(
        matrix, (0, width - matrix.shape[1], 0, height - matrix.shape[0])
    )


@op
def split_quantize(
    tensor: Tensor,
    sizes: Sequence[int],
    quantizers: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Quantize the rows of each expert."""
    parts = tensor.reshape(-1, tensor.shape[-1]).split(list(sizes))
    return [quantize(part, each) for part, each in zip(parts, quantizers, strict=True)]


@op
def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the gradient of the bias, and the quantized gradient."""
    total = grad.reshape(-1, grad.shape[-1]).float().sum(0).to(grad.dtype)
    return total, quantize(grad, quantizer)


@op
def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """Return bytes with the last dimension first."""
    moved = data.movedim(-1, 0).contiguous()
    return moved if out is None else out.copy_(moved)


@op
def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Swap the first two dimensions."""
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


# -------------------------------------------------------- padding of experts' rows


def _copy_rows(tensor: Tensor, out: Tensor, sizes: Sequence[int], places: Sequence[int]) -> None:
    """Copy rows of each expert, as many as both have."""
    out.zero_()
    for part, place in zip(tensor.split(list(sizes)), out.split(list(places)), strict=True):
        number = min(len(part), len(place))
        place[:number] = part[:number]


@op
def fused_multi_row_padding(
    tensor: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]
) -> None:
    """Add rows of zeros to the rows of each expert."""
    _copy_rows(tensor, out, sizes, padded)


@op
def fused_multi_row_unpadding(
    tensor: Tensor, out: Tensor, padded: Sequence[int], sizes: Sequence[int]
) -> None:
    """Remove these rows."""
    _copy_rows(tensor, out, padded, sizes)


# ------------------------------------- weights kept only in FP8, from parts of float32 weights


@op
def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    """Set the largest absolute value."""
    amax.fill_(float(tensor.abs().amax()) if tensor.numel() else 0.0)


@op
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    flag: Tensor,
    tensors: Sequence[Sequence[Tensor]],
    limit: float,
    pow_2: bool,
    epsilon: float,
) -> None:
    """Set scales and their inverses from largest absolute values."""
    for amax, scale, inverse in zip(*tensors, strict=True):
        scale.copy_(_scale_of(amax, limit, pow_2, epsilon))
        inverse.copy_(1 / scale)


@op
def fp8_block_scaling_compute_partial_amax(
    part: Tensor, amax: Tensor, height: int, width: int, start: int, block: int
) -> None:
    """Set the largest absolute value of each block, of a part of a flat weight."""
    whole = torch.zeros(height * width)
    whole[start : start + part.numel()] = part.float().view(-1)
    maxima = _block_amax(whole.view(height, width), block)
    amax.zero_()
    amax[: maxima.shape[0], : maxima.shape[1]] = maxima


@op
def fp8_block_scaling_partial_cast(
    part: Tensor,
    out: Tensor,
    scale: Tensor,
    height: int,
    width: int,
    start: int,
    block: int,
    dtype: Any,
) -> None:
    """Write the bytes of a part of a flat weight."""
    factors = _per_value(scale, block, torch.empty(height, width)).reshape(-1)
    stored = _bytes(part.float().view(-1) * factors[start : start + part.numel()], dtype)
    out.copy_(stored.view(out.shape))
