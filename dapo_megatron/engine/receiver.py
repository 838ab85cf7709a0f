"""New weights for a running engine: what it holds, by HF name, and how they are replaced.

vLLM fuses projections, pads the vocabulary, slices for its tensor parallelism, and on CPU packs
linear layers until the parameters are empty. So the names and shapes here come from what its
modules say of themselves, and the weights go in through vLLM's own layerwise reload.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from dapo_megatron.types import SyncError, SyncReport

if TYPE_CHECKING:
    from vllm import LLM

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def expected_tensors(model: nn.Module) -> Shapes:
    """HF name -> whole shape of every tensor of a loaded vLLM model; a tied head is not named.

    To be asked before the first reload. Raises SyncError naming the parameter of a module whose
    layout is not known here.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    embeddings: set[int] = set()
    shapes: Shapes = {}
    for path, module in model.named_modules():
        held = {name for name, _ in module.named_parameters(recurse=False)}
        if not held:
            continue
        describe = _DESCRIPTIONS.get(type(module))
        if describe is None or not held <= {"weight", "bias"}:
            raise SyncError(
                f"{path}.{min(held)}: no rule for replacing the weights of a "
                f"{type(module).__name__} in a running engine"
            )
        if isinstance(module, VocabParallelEmbedding):
            tied = id(module.weight) in embeddings
            embeddings.add(id(module.weight))
            if tied:
                continue
        shapes |= describe(path, module, packed, "bias" in held)
    return shapes


def _linear(path: str, module: LinearBase, _: Mapping[str, list[str]], bias: bool) -> Shapes:
    return _matrix(path, module.output_size, module.input_size, bias)


def _merged(path: str, module: LinearBase, packed: Mapping[str, list[str]], bias: bool) -> Shapes:
    if isinstance(module, QKVParallelLinear):
        sizes = [
            module.total_num_heads * module.head_size,
            module.total_num_kv_heads * module.head_size,
            module.total_num_kv_heads * module.v_head_size,
        ]
    else:
        sizes = module.output_sizes
    parent, _, name = path.rpartition(".")
    parts = packed.get(name, [])
    if len(parts) != len(sizes):
        raise SyncError(
            f"{path}.weight: the model does not say which {len(sizes)} tensors it packs"
        )
    shapes: Shapes = {}
    for part, size in zip(parts, sizes, strict=True):
        shapes |= _matrix(f"{parent}.{part}", size, module.input_size, bias)
    return shapes


def _embedding(
    path: str, module: VocabParallelEmbedding, _: Mapping[str, list[str]], bias: bool
) -> Shapes:
    return _matrix(path, module.org_vocab_size, module.embedding_dim, bias)


def _norm(path: str, module: RMSNorm, _: Mapping[str, list[str]], bias: bool) -> Shapes:
    return {f"{path}.weight": tuple(module.weight.shape)}


def _matrix(path: str, rows: int, columns: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{path}.weight": (rows, columns)}
    return shapes | {f"{path}.bias": (rows,)} if bias else shapes


# By exact type: a subclass may lay its weights out in another way.
_DESCRIPTIONS: dict[type, Callable[..., Shapes]] = {
    ColumnParallelLinear: _linear,
    RowParallelLinear: _linear,
    ReplicatedLinear: _linear,
    MergedColumnParallelLinear: _merged,
    QKVParallelLinear: _merged,
    VocabParallelEmbedding: _embedding,
    ParallelLMHead: _embedding,
    RMSNorm: _norm,
}


def checked(
    weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, Shape], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Pass on copies of `weights` in `dtype`, each once it is known to be as `expected`.

    Copies, because vLLM keeps a tensor until its layer is complete, and the giver may reuse it at
    once. Raises SyncError at the first tensor that is extra, repeated or misshapen, without passing
    it on, and at the end for missing ones.
    """
    missing = dict(expected)
    for name, tensor in weights:
        if name not in expected:
            raise SyncError(f"{name}: the engine has no such tensor")
        if name not in missing:
            raise SyncError(f"{name}: given twice")
        if tuple(tensor.shape) != missing.pop(name):
            raise SyncError(
                f"{name}: shape {tuple(tensor.shape)}, the engine's is {expected[name]}"
            )
        yield name, tensor.detach().to(dtype, copy=True)
    if missing:
        raise SyncError(f"{', '.join(missing)}: missing from the weights given to the engine")


class WeightReceiver:
    """Replaces all weights of one engine, on each of its ranks alike."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._dtype: torch.dtype = llm.llm_engine.model_config.dtype
        (self.expected,) = llm.apply_model(expected_tensors)

    def receive(self, weights: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Load `weights` (whole tensors under HF names) and drop the cached prefixes.

        Raises SyncError as `checked` does; the engine then holds a mixture of old and new weights
        and must not be used.
        """
        start = time.perf_counter()
        stream = checked(weights, self.expected, self._dtype)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        self._llm.apply_model(_repack_tied_head)
        if not self._llm.reset_prefix_cache():
            raise SyncError("prefix cache: not dropped; requests with old weights are in flight")
        num_elements = sum(math.prod(shape) for shape in self.expected.values())
        return SyncReport(
            version=version,
            num_tensors=len(self.expected),
            num_bytes=num_elements * self._dtype.itemsize,
            seconds=time.perf_counter() - start,
        )


def _repack_tied_head(model: nn.Module) -> None:
    """Pack a tied output head again: vLLM does so for the embedding alone (CPU)."""
    head = getattr(model, "lm_head", None)
    if isinstance(head, ParallelLMHead) and head.weight is model.model.embed_tokens.weight:
        head.quant_method.process_weights_after_loading(head)
