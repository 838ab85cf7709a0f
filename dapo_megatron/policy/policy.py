"""MegatronPolicy: protocols.Policy over a Megatron-core model with the distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from dapo_megatron.bridge.transfer import gather_whole
from dapo_megatron.checkpoints.folder import check_folder
from dapo_megatron.checkpoints.formats.open import open_model
from dapo_megatron.checkpoints.formats.store import read_into
from dapo_megatron.cluster.collectives import on_all_ranks
from dapo_megatron.config import Config
from dapo_megatron.model import Architecture, read_architecture
from dapo_megatron.plan.rows import preferred_multiple, row_multiple, sequence_multiple
from dapo_megatron.policy import checkpoint, fp8
from dapo_megatron.policy.boxes import HostCopies
from dapo_megatron.policy.checkpoint import PolicySnapshot
from dapo_megatron.policy.data_parallel import (
    distribute,
    finish_gathers,
    gather_on_host,
    groups_holding,
    start_gathers,
    unshard_gradients,
)
from dapo_megatron.policy.device import device, has_cuda, megatron_device
from dapo_megatron.policy.lora import PREFIX, Lora
from dapo_megatron.policy.model import (
    Decoder,
    build_model,
    destroy_parallel,
    initialize_parallel,
    place,
)
from dapo_megatron.policy.moe import start_minibatch
from dapo_megatron.policy.offload import Offload
from dapo_megatron.policy.optimizer import build_optimizer, copy_to_main
from dapo_megatron.policy.reference import Reference
from dapo_megatron.policy.routes import Recorded, RouteShape, gather, replay_statistics
from dapo_megatron.policy.rows import Microbatches, RowShape
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.policy.step import Runner, TokenValues
from dapo_megatron.policy.teacher import Teacher
from dapo_megatron.protocols import Exchange, LossFn, MicrobatchPlanner
from dapo_megatron.types import Diverged, LogProbs, Shard, StepStats, TokenBatch, torch_dtype


class MegatronPolicy:
    """Implements protocols.Policy. Needs torch.distributed initialized, and creates Megatron's
    process groups itself."""

    def __init__(self, config: Config, exchange: Exchange, plan: MicrobatchPlanner) -> None:
        self._config = config
        self._exchange = exchange
        self._plan = plan
        self._device = device()
        self.architecture = read_architecture(config)
        check_folder(Path(config.model.path), exchange)
        with megatron_device():
            initialize_parallel(config.policy, config.seed)
            chunks = build_model(self.architecture, config.policy)
            store = open_model(config.model)
            values = fp8.HighPrecisionValues()
            read_into(store, self._shards_of(chunks, values))
            values.round()
            self.lora: Lora | None = None
            if config.policy.lora is not None:
                self.lora = Lora(config.policy, self.architecture, chunks, config.seed)
            self._chunks = distribute(chunks, config.policy)
            self._optimizer = build_optimizer(config, self._chunks)
        self._memory = Offload(config.policy.offload, self._chunks, self._optimizer)
        # Reset the generator, because start-up draws a varying number of random numbers.
        torch.manual_seed(config.seed + exchange.rank)
        self._route_shape: RouteShape | None = None
        if self.architecture.num_experts:
            self._route_shape = RouteShape.of(self.architecture, map(place, self._models()))
        self._runner = Runner(
            self._chunks,
            temperature=config.rollout.temperature,
            vocab=self.architecture.vocab_size,
            head=config.policy.logprob_head,
            entropy_gradient=config.loss.entropy_coefficient > 0.0,
            route_shape=self._route_shape,
        )
        self._reference: Reference | None = None
        self._teacher: Teacher | None = None
        self._copies = HostCopies()
        self._rows = RowShape(
            packed=config.train.packing,
            sequence_multiple=sequence_multiple(config.policy),
            row_multiple=row_multiple(config.policy),
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=config.policy.context_parallel,
            preferred_multiple=preferred_multiple(config.policy, on_gpu=has_cuda()),
            max_tokens=config.train.max_tokens_per_microbatch * config.policy.context_parallel,
        )

    # ------------------------------------------------------------------ protocols.Policy

    @property
    def data_parallel_index(self) -> int:
        """See protocols.Policy."""
        return int(parallel_state.get_data_parallel_rank())

    def logprobs(self, batch: TokenBatch, temperature: float | None = None) -> LogProbs:
        """See protocols.Policy."""
        if self._config.policy.router_replay != "policy":
            return self._score(batch, temperature)
        recorded: list[Recorded] = []
        return self._with_routes(self._score(batch, temperature, recorded), batch, recorded)

    def keep_reference(self, write: Callable[[Sequence[Shard]], None] | None = None) -> None:
        """See protocols.Policy."""
        if self.lora is not None and write is None:
            return  # the base
        self._finish_update()
        self._reference = Reference(self._chunks)
        if write is not None:
            values = fp8.HighPrecisionValues()
            with megatron_device():
                write(self._shards_of(self._models(), values))
                values.round()
            self._reference.swap()

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """See protocols.Policy."""
        self._finish_update()
        if self._reference is not None:
            weights = self._reference.in_place()
        else:
            assert self.lora is not None, "call keep_reference() first"
            weights = self.lora.switched_off()
        with weights:
            # With its own experts, not the policy's.
            return self._score(replace(batch, routes=None)).logprobs

    def keep_teacher(self, arch: Architecture, write: Callable[[Sequence[Shard]], None]) -> None:
        """See protocols.Policy."""
        with megatron_device():
            vocab = self.architecture.vocab_size
            self._teacher = Teacher(arch, self._config, vocab, write)

    def teacher_logprobs(self, batch: TokenBatch) -> LogProbs:
        """See protocols.Policy."""
        assert self._teacher is not None, "call keep_teacher() first"
        with self._teacher.in_place():
            return self._score(replace(batch, routes=None), runner=self._teacher.runner)

    def update(
        self,
        mini: TokenBatch,
        loss: LossFn,
        lr: float,
        *,
        check: Callable[[LogProbs], None] | None = None,
    ) -> StepStats:
        """See protocols.Policy."""
        num_tokens = max(mini.num_loss_tokens, 1)
        with megatron_device():
            sums, values = self._accumulate(mini, loss, num_tokens)
            if check is not None:
                check(self._gather_values(mini, values))
            means = self._means(sums, num_tokens)
            grad_norm = self._clip(means["loss"])
            router: dict[str, float] = {}
            if self._route_shape is not None and self._config.policy.router_replay != "off":
                router = replay_statistics(self._models(), self._route_shape, self._device)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step_with_ready_grads()
            start_gathers(self._chunks)
            if self.lora is not None:
                finish_gathers(self._chunks)
                self.lora.merge()
        return StepStats(
            loss=means.pop("loss"),
            grad_norm=grad_norm,
            lr=lr,
            num_tokens=num_tokens,
            means=means,
            router=router,
        )

    def shards(self) -> list[Shard]:
        """See protocols.Policy. After `update` or `offload`, call `onload` before reading them."""
        return self._shards_of(self._models())

    def rewrite(self, change: Callable[[Sequence[Shard]], None]) -> None:
        """See protocols.Policy."""
        self._finish_update()
        values = fp8.HighPrecisionValues()
        with megatron_device():
            change(self._shards_of(self._models(), values))
            values.round()
            copy_to_main(self._optimizer, values)
        for adapter in self.lora or ():
            adapter.keep_base()

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield (HF name, complete tensor) of every weight on every rank, for parity checks.
        Collective."""
        self._finish_update()
        return gather_whole(self.shards(), self._exchange, self._device)

    def gradients(self, mini: TokenBatch, loss: LossFn) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss of a mini-batch and its complete gradient by HF name on every rank.

        The gradient is reduced over ranks and not clipped. No optimizer step is taken. For parity
        checks. Collective.
        """
        num_tokens = max(mini.num_loss_tokens, 1)
        with megatron_device():
            sums, _ = self._accumulate(mini, loss, num_tokens)
            value = self._means(sums, num_tokens)["loss"]
            unshard_gradients(self._chunks)
        if self.lora is None:
            shards = self._shards_of(self._models(), _gradient)
        else:
            shards = self.lora.shards(_gradient)
        whole = gather_whole(shards, self._exchange, self._device)
        return value, {name: gradient.clone() for name, gradient in whole}

    def snapshot(self) -> PolicySnapshot:
        """See protocols.Policy."""
        self._finish_update()
        return checkpoint.snapshot(
            self._exchange, self._models(), self._optimizer, self.architecture, self._copies
        )

    def load(self, folder: Path) -> None:
        """See protocols.Policy."""
        self._finish_update()
        checkpoint.load(
            folder,
            self._exchange,
            self._models(),
            self._optimizer,
            self.architecture,
            self._config.model.ignore_fields,
        )
        with megatron_device():
            fp8.quantize_from_main(self._optimizer, self._chunks)
            # With overlap, quantized weights can be used only after a gather.
            start_gathers(self._chunks)
        finish_gathers(self._chunks)
        if self.lora is not None:
            on_all_ranks(self._exchange, self.lora.check_base, folder)

    def offload(self) -> None:
        """See protocols.Policy."""
        finish_gathers(self._chunks)
        if self._config.policy.offload:
            fp8.drop_cached_weights(self._models())
        self._memory.offload()

    def onload(self) -> None:
        """See protocols.Policy."""
        self._memory.reload()
        finish_gathers(self._chunks)

    def close(self) -> None:
        """Free the model and destroy Megatron's process groups, so that another policy can be made.

        Megatron's data-parallel wrapper is referenced from the autograd graph, and its experts keep
        the last graph. Python's garbage collector cannot see this cycle, so it is cut here.
        """
        finish_gathers(self._chunks)
        for chunk in self._chunks:
            vars(chunk).clear()
        self._chunks.clear()
        destroy_parallel()

    # ------------------------------------------------------------------ private

    def _finish_update(self) -> None:
        """Assert that weights are on the device and wait for all gathers of the last update. Call
        before weights are read or written."""
        self._assert_onloaded()
        finish_gathers(self._chunks)

    def _assert_onloaded(self) -> None:
        assert not self._memory.is_offloaded, "the policy is offloaded: call onload() first"

    def _models(self) -> list[Decoder]:
        """Return this rank's chunks without Megatron's wrapper."""
        return [chunk.module for chunk in self._chunks]

    def _shards_of(
        self, models: list[Decoder], value: Callable[[Any], Tensor] = lambda parameter: parameter
    ) -> list[Shard]:
        """Return the shards of this rank's parameters, or of the tensor that `value` returns for
        each parameter."""
        return [
            shard
            for model in models
            for shard in shards_of(
                {
                    name: value(parameter)
                    for name, parameter in model.named_parameters()
                    if not name.startswith(PREFIX)
                },
                self.architecture,
                place(model),
            )
        ]

    def _share(self, batch: TokenBatch) -> list[list[int]]:
        """Return the micro-batches of this data-parallel index, if `batch` is distributed over all
        of them."""
        plans = self._plan(batch.lengths.tolist(), parallel_state.get_data_parallel_world_size())
        return self._whole_rounds(plans[self.data_parallel_index])

    def _held_plan(self, batch: TokenBatch) -> list[list[int]]:
        """Return the micro-batches of the sequences that this data-parallel index owns.

        All indices run as many micro-batches as the one that needs most, because ranks with experts
        in common exchange tokens in each.
        """
        assert batch.owners is not None
        lengths = batch.lengths.tolist()
        owned: list[list[int]] = [[] for _ in range(parallel_state.get_data_parallel_world_size())]
        for sequence, owner in enumerate(batch.owners.tolist()):
            owned[owner].append(sequence)
        plans = [self._plan([lengths[index] for index in share], 1)[0] for share in owned]
        share = owned[self.data_parallel_index]
        plan = [[share[index] for index in micro] for micro in plans[self.data_parallel_index]]
        plan += [[]] * (max(map(len, plans)) - len(plan))
        return self._whole_rounds(plan)

    def _whole_rounds(self, plan: list[list[int]]) -> list[list[int]]:
        """Append empty micro-batches: the interleaved schedule needs a multiple of the number of
        stages."""
        if not self._config.policy.virtual_pipeline_parallel:
            return plan
        return plan + [[]] * (-len(plan) % self._config.policy.pipeline_parallel)

    def _microbatches(
        self, batch: TokenBatch, plan: Sequence[Sequence[int]], *, with_loss: bool = False
    ) -> Microbatches:
        """Return the rows of micro-batches. Raises ValueError naming a sequence whose tokens this
        rank does not hold."""
        starts = batch.starts.tolist()
        for sequence in (sequence for micro in plan for sequence in micro):
            if starts[sequence] < 0:
                raise ValueError(
                    f"{batch.sequence_name(sequence)}: data-parallel index "
                    f"{self.data_parallel_index} trains on it but does not hold its tokens"
                )
        return Microbatches(batch, plan, self._rows, self._device, with_loss, self._route_shape)

    def _accumulate(
        self, mini: TokenBatch, loss: LossFn, num_tokens: int
    ) -> tuple[list[dict[str, Tensor]], list[TokenValues]]:
        """Accumulate the gradient of the mini-batch in the gradient buffers of all ranks. Return
        what Runner.gradients returns, as two lists."""
        self._assert_onloaded()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        micro = self._microbatches(mini, self._share(mini), with_loss=True)
        balance = self._config.policy.moe_aux_loss / max(mini.num_sequences, 1)
        start_minibatch(self._chunks, balance, max(1, *map(len, micro.plan)))
        results = self._runner.gradients(micro, loss, num_tokens)
        return [sums for sums, _ in results], [values for _, values in results]

    def _score(
        self,
        batch: TokenBatch,
        temperature: float | None = None,
        recorded: list[Recorded] | None = None,
        runner: Runner | None = None,
    ) -> LogProbs:
        """Run the pass of `logprobs`, or the same of another model's `runner`. Append the routes of
        this rank's tokens to `recorded`."""
        self._assert_onloaded()
        runner = runner or self._runner
        is_local = batch.owners is not None
        micro = self._microbatches(batch, (self._held_plan if is_local else self._share)(batch))
        with megatron_device():
            self._train(False)
            results = runner.logprobs(micro, temperature, recorded)
            self._train(True)
        return self._gather_values(batch, results, runner.top_k)

    def _gather_values(
        self, batch: TokenBatch, values: Sequence[TokenValues], top_k: int | None = None
    ) -> LogProbs:
        """Return the values of a batch's tokens that the ranks of this data-parallel index computed
        (of all ranks, if `batch` is distributed over all); 0 for the others. Collective."""
        exact = torch.promote_types(torch_dtype(self._config.policy.precision), torch.float32)
        whole = torch.zeros(2, batch.tokens.numel(), device=self._device, dtype=exact)
        if self._is_output_rank():
            for part in values:
                whole[0, part.indices] = part.logprobs
                whole[1, part.indices] = part.entropy
        # At most one rank fills each token, the others have zeros: the all-reduce is a gather.
        for group in groups_holding(batch):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(whole, group=group)
        result = LogProbs(*whole.cpu())
        if top_k is None:
            return result
        # In host memory, because they are k times as large.
        top_ids = torch.zeros(batch.tokens.numel(), top_k, dtype=torch.int32)
        top_logprobs = torch.zeros(top_ids.shape, dtype=exact)
        if self._is_output_rank():
            for part in values:
                assert part.top_ids is not None and part.top_logprobs is not None
                indices = part.indices.cpu()
                top_ids[indices], top_logprobs[indices] = part.top_ids, part.top_logprobs
        for tensor in (top_ids, top_logprobs):
            gather_on_host(tensor, groups_holding(batch), self._device)
        return replace(result, top_ids=top_ids, top_logprobs=top_logprobs)

    def _with_routes(
        self, logprobs: LogProbs, batch: TokenBatch, recorded: Sequence[Recorded]
    ) -> LogProbs:
        """Return `logprobs` with the routes that the ranks recorded in the same pass. `logprobs`
        is in host memory, so the device has finished the pass. Collective."""
        assert self._route_shape is not None
        num_tokens, groups = batch.tokens.numel(), groups_holding(batch)
        routes = gather(recorded, num_tokens, self._route_shape, groups, self._device)
        return replace(logprobs, routes=routes)

    def _train(self, mode: bool) -> None:
        for chunk in self._chunks:
            chunk.train(mode)

    def _is_output_rank(self) -> bool:
        """Return whether this rank's outputs are used: tensor-parallel rank 0 of the last stage."""
        return bool(
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    def _means(self, sums: list[dict[str, Tensor]], num_tokens: int) -> dict[str, float]:
        """Return token means of the statistics over all micro-batches and ranks. Collective."""
        # Stages before the last have no sums and do not know their names.
        rank_names = self._exchange.all_gather(sorted(sums[0]) if sums else [], list[str])
        names: list[str] = next(filter(None, rank_names))
        total = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        if self._is_output_rank():
            for micro_sums in sums:
                total += torch.stack([micro_sums[name].double() for name in names])
        dist.all_reduce(total)
        return dict(zip(names, (total / num_tokens).tolist(), strict=True))

    def _clip(self, loss: float) -> float:
        """Clip the gradient to norm optimizer.clip_grad. Return its norm before. Raises Diverged if
        the norm or `loss` is not finite."""
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise Diverged(
                f"loss {loss}, gradient norm {norm}: not finite. The optimizer step was not taken. "
                "Look at the rollouts of this step in samples/, and try a smaller optimizer.lr"
            )
        for part in self._optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(
                    parameters,
                    self._config.optimizer.clip_grad,
                    norm,
                    # If AdamW holds the float32 copies, gradients are in another attribute.
                    part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        return norm


def _gradient(parameter: Any) -> Tensor:
    """Return the reduced gradient of a parameter, zeros if it is not trained."""
    return parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
