"""Measure the GPU memory of a policy without a GPU: a rank's real step, on tensors without values.

The policy, Megatron-core and Transformer Engine's Python run as on a GPU, in a world of the run's
size whose other ranks do not exist. torch's FakeTensorMode computes the shapes of all tensors, and
PeakMemory counts their storages. Kernels of Transformer Engine are those of extension.py, or
functions that only return shapes. Memory inside a kernel is not counted.

`python -m tests.te_cpu.memory NAME [key.path=value ...]` prints what model_configs/NAME.yaml takes.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.plan.estimate import ENGINE_RANKS, estimate_memory
from dapo_megatron.plan.layout import data_parallel, policy_ranks
from dapo_megatron.plan.rows import row_multiple, sequence_multiple
from dapo_megatron.types import TokenBatch
from tests.helpers.batches import random_batch
from tests.helpers.configs import REPOSITORY
from tests.helpers.losses import loss_with
from tests.helpers.peak import PeakMemory
from tests.helpers.published import PUBLISHED
from tests.te_cpu import extension, permutation, stand_in

DEPTHS = (3, 4)
"""Layers of the models that are measured. From these two the whole model is extrapolated, since
memory grows by the same bytes with each layer."""
Bytes = dict[str, int]
"""Moment -> bytes of a rank."""
MOMENTS = {
    "states": "weights, gradients, optimizer, Transformer Engine's buffers",
    "head": "update, at the output head",
    "layer": "update, at the layers",
    "step": "update, the optimizer's step",
    "logprobs head": "log-probs, at the output head",
    "logprobs layer": "log-probs, at the layers",
    "offloaded": "policy offloaded",
}


class Memory(PeakMemory):
    """Counts storages, but not those inside a kernel. Where the host reads a value, it is 1."""

    is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing."""
        self.is_paused = True
        yield
        self.is_paused = False

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as one operation, of which only the results are counted."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return function(*args, **kwargs)

        return lambda *args, **kwargs: self.call(inside, args, kwargs)

    def take(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak


# ------------------------------------------------------------------ kernels, only their shapes


def fused_attn_fwd(*args: Any, **_: Any) -> list[Tensor]:
    q, v = args[16], args[18]
    lse = torch.empty(q.shape[0], q.shape[1], 1)
    return [q.new_empty(*q.shape[:-1], v.shape[-1]), lse, torch.empty(2, dtype=torch.int64)]


def fused_attn_bwd(*args: Any, **_: Any) -> list[Any]:
    return [*map(torch.empty_like, args[19:22]), None, None]


def te_general_grouped_gemm(*args: Any, **_: Any) -> Any:
    return args[7]


def thd_read_half_tensor(tensor: Tensor, *_: Any) -> Tensor:
    dim = 0 if tensor.dim() == 3 else 1
    return tensor.narrow(dim, 0, tensor.shape[dim] // 2).clone()


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    return lse.new_empty(lse.shape[0], length)


def nothing(*_: Any, **__: Any) -> None:
    pass


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    return torch.empty(num_tokens, 2 * num_experts + 1, dtype=torch.int32)


def permute_with_mask_map(inp, row_map, probs, scale, offsets, tokens, experts, out, hidden, dim):
    return inp.new_empty(out, hidden), None, None if probs is None else probs.new_empty(out)


def unpermute_with_mask_map(inp, row_map, merging, permuted, offsets, tokens, experts, hidden):
    probs = None if permuted is None else permuted.new_empty(tokens, experts)
    return inp.new_empty(tokens, hidden), probs


def make_chunk_sort_map(sizes: Tensor, indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    return torch.empty(num_tokens, dtype=torch.int32)


def sort_chunks_by_map(inp, row_map, probs, num_tokens, hidden, is_forward):
    return torch.empty_like(inp), None if probs is None else torch.empty_like(probs)


def install(memory: Memory) -> None:
    """Put Transformer Engine into this process, with kernels that need no values."""
    own = (
        te_general_grouped_gemm,
        fused_attn_fwd,
        fused_attn_bwd,
        thd_read_half_tensor,
        thd_read_second_half_lse,
    )
    extension._functions.update({function.__name__: function for function in own})
    names = (
        "thd_second_half_lse_correction",
        "thd_out_correction",
        "thd_grad_correction",
        "multi_tensor_adam",
    )
    extension._functions.update(dict.fromkeys(names, nothing))
    for name, function in extension._functions.items():
        extension._functions[name] = memory.kernel(function)
    for function in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        make_chunk_sort_map,
        sort_chunks_by_map,
    ):
        setattr(permutation, function.__name__, memory.kernel(function))
    warnings.simplefilter("ignore")
    stand_in.install()
    stand_in.complete_device()
    vocab_parallel: Any = importlib.import_module("dapo_megatron.policy.vocab_parallel")
    vocab_parallel.torch = torch  # its products without values need no stand-in
    from megatron.core import utils as megatron_utils
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    # On a GPU these are kernels of Transformer Engine, too.
    megatron_utils.local_multi_tensor_l2_norm = lambda *_: (torch.ones(1), None)
    megatron_utils.local_multi_tensor_scale = nothing
    gc.freeze()
    choose = utils.get_attention_backend
    # It would choose unfused attention for FakeTensor.
    utils.get_attention_backend = lambda params: choose(replace(params, qkv_type=Tensor))


def balanced(self: Any, routing_map: Tensor) -> Any:
    """Stand in for the dispatcher's `preprocess`: every expert gets the same number of tokens."""
    self.num_out_tokens = len(routing_map) * self.config.moe_router_topk
    self.input_splits = self.output_splits = [self.num_out_tokens // self.ep_size] * self.ep_size
    per_expert = self.num_out_tokens // self.num_experts
    self.num_global_tokens_per_local_expert = torch.empty(self.ep_size, self.num_local_experts)
    # Transformer Engine reads it, so it needs values.
    with unset_fake_temporarily():
        counts = torch.full((self.num_local_experts,), per_expert * self.ep_size)
    return Mock(tolist=lambda: counts)


def distinct(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Stand in for `distinct_storages`, which compares addresses."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages if storage.nbytes()}


def all_gather_object(objects: list[Any], value: Any, *_: Any, **__: Any) -> None:
    objects[:] = [value] * len(objects)


def set_rope(model: Any, arch: Any) -> None:
    """Stand in for `_to_device`: Module._apply cannot replace parameters without values."""
    from dapo_megatron.policy import rope

    model.rope_frequencies = rope.frequencies(arch)
    model.rope_scaling = arch.rope.attention_scaling


# ------------------------------------------------------------------ a policy


def measure(memory: Memory, config: Config) -> Bytes:
    """Return the bytes of rank 0 at each of MOMENTS, all in the fullest micro-batches."""
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module import base

    from dapo_megatron.policy import model, offload, optimizer, policy, rows, step

    world = policy_ranks(config, config.run.processes)
    limit = config.train.max_tokens_per_microbatch * config.policy.context_parallel
    plan = partial(
        plan_microbatches,
        max_tokens=limit,
        packed=True,
        sequence_multiple=sequence_multiple(config.policy),
        row_multiple=row_multiple(config.policy),
    )
    base._dummy_wgrads.clear()
    gemm.get_cublas_workspace.cache_clear()
    gc.collect()
    before, bytes_of = memory.live_bytes, dict[str, int]()

    def batch_of(length: int) -> TokenBatch:
        """Return a batch of which every rank gets a micro-batch of this many tokens."""
        with unset_fake_temporarily(), memory.paused():
            sequences = 2 * data_parallel(config.policy, world)
            batch = random_batch([length // 2] * sequences, vocab=1000)
            if made._route_shape is None:
                return batch
            shape = made._route_shape
            routes = torch.arange(shape.topk, dtype=torch.int16).repeat(len(shape.layers))
            return replace(batch, routes=routes.expand(len(batch.tokens), -1))

    def note(name: str, num_bytes: int | None = None) -> None:
        num_bytes = memory.take() if num_bytes is None else num_bytes
        bytes_of[name] = max(bytes_of.get(name, 0), num_bytes - before)

    def with_values(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return make_rows(*args, **kwargs)

    def at_head(self: Any, hidden: Tensor, *args: Any) -> Any:
        if hidden.requires_grad:
            note("layer")
            hidden.register_hook(lambda _: note("head"))
            return head(self, hidden, *args)
        note("logprobs layer")
        result = head(self, hidden, *args)
        note("logprobs head")
        return result

    def accumulated(self: Any, *args: Any) -> Any:
        result = accumulate(self, *args)
        note("layer")
        return result

    head, accumulate = step.Runner._head, policy.MegatronPolicy._accumulate
    make_rows = rows.make_rows
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    with ExitStack() as stack:
        for owner, name, value in (
            (rows, "make_rows", with_values),
            (policy.MegatronPolicy, "_accumulate", accumulated),
            (step.Runner, "_head", at_head),
            (policy, "check_folder", nothing),
            (policy, "open_model", nothing),
            (policy, "read_into", nothing),
            (model, "_to_device", set_rope),
            (offload, "distinct_storages", distinct),
            (offload.HostMemory, "save", nothing),
            (offload.HostMemory, "load", nothing),
            (optimizer, "kernels", lambda _: "transformer_engine"),
            (dist, "all_gather_object", all_gather_object),
            (param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: nullcontext(Mock())),
            (MoEAlltoAllTokenDispatcher, "preprocess", balanced),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(memory)
        torch.set_default_dtype(torch.bfloat16)  # also of weights that `_to_device` would cast
        made = policy.MegatronPolicy(config, Ranks(0, 1, 0), plan)
        torch.set_default_dtype(torch.float32)
        # The optimizer makes its state, and Transformer Engine its buffers.
        made.update(batch_of(256), loss_with(), 1e-6)
        bytes_of.clear()
        gc.collect()
        memory.take()
        note("states", memory.live_bytes)
        made.update(batch_of(limit), loss_with(), 1e-6)
        note("step")
        gc.collect()
        memory.take()
        made.logprobs(batch_of(limit))
        gc.collect()
        made.offload()
        away = (*made._memory._copied, *made._memory._dropped)
        note("offloaded", memory.live_bytes - sum(num_bytes for _, num_bytes in away))
        made.close()
    dist.destroy_process_group()
    return bytes_of


def config_of(case: str, overrides: Sequence[str] = ()) -> Config:
    """Return a config of model_configs with Transformer Engine's kernels. After a comma, `case`
    may have a comment."""
    file = REPOSITORY / "model_configs" / f"{case.split(',')[0]}.yaml"
    return load_config(file, ["policy.kernels=transformer_engine", *overrides])


def measure_all(cases: Mapping[str, Sequence[str]]) -> dict[str, Bytes]:
    """Return the bytes of each case: a name as in `config_of`, and overrides."""
    memory = Memory()
    install(memory)
    measured = {}
    for case, overrides in cases.items():
        hf = PUBLISHED[Path(config_of(case, overrides).model.path).name][1]
        by_depth = []
        for depth in DEPTHS:
            with TemporaryDirectory() as folder:
                cut = hf | {"num_hidden_layers": depth}
                if "layer_types" in hf:
                    cut["layer_types"] = hf["layer_types"][:depth]
                (Path(folder) / "config.json").write_text(json.dumps(cut), encoding="utf-8")
                config = config_of(case, [*overrides, f"model.path={folder}"])
                by_depth.append(measure(memory, config))
        first, second = by_depth
        more = hf["num_hidden_layers"] - DEPTHS[0]
        measured[case] = {
            name: first[name] + more * (second[name] - first[name]) for name in MOMENTS
        }
    return measured


def planned(config: Config) -> Bytes:
    """Return the estimate for each of MOMENTS, without CUDA, NCCL and engines."""
    estimate = estimate_memory(config, policy_ranks(config, config.run.processes))
    [phases] = [phases for kind, phases in estimate.kinds.items() if kind != ENGINE_RANKS]
    stage = estimate.stages[0]
    of_states = {stage.weights.name, stage.gradients.name, stage.optimizer.name, stage.buffers.name}

    def total(phase: str, name: str, only: Set[str] | None = None) -> int:
        [moment] = [moment for moment in phases[phase] if moment.name == name]
        others = ("CUDA", "engine", "KV")
        return sum(
            part.num_bytes
            for part in moment.parts
            if (part.name in only if only else not part.name.startswith(others))
        )

    return {
        "states": total("update", "layer", of_states),
        "head": total("update", "head"),
        "layer": total("update", "layer"),
        "step": total("update", "layer", of_states),
        "logprobs head": total("logprobs", "head"),
        "logprobs layer": total("logprobs", "layer"),
        "offloaded": total("generate", phases["generate"][0].name),
    }


def main(case: str, *overrides: str) -> None:
    """Print the measured and the estimated memory of a config in GiB."""
    measured, estimate = measure_all({case: overrides})[case], planned(config_of(case, overrides))
    print(f"{case}: GiB of a rank, measured, and by the plan")
    for name, what in MOMENTS.items():
        actual, expected = measured[name] / 2**30, estimate[name] / 2**30
        print(f"{what:62} {actual:8.3f} {expected:8.3f} {expected / actual:6.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
