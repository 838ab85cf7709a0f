"""MegatronPolicy: the Policy seam over one Megatron-core model with the distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from dapo_megatron.bridge.families import Architecture, architecture, shards_of
from dapo_megatron.bridge.gather import Gather
from dapo_megatron.bridge.hf import read_into
from dapo_megatron.config import Config, read_model_config
from dapo_megatron.policy import checkpoint
from dapo_megatron.policy.device import device, megatron_device
from dapo_megatron.policy.model import build_model, initialize_parallel, place
from dapo_megatron.policy.step import Runner, make_rows
from dapo_megatron.protocols import Exchange, LossFn, Planner
from dapo_megatron.types import Diverged, LogProbs, StepStats, TokenBatch


class MegatronPolicy:
    """See protocols.Policy. Needs torch.distributed; makes Megatron's process groups itself."""

    def __init__(self, config: Config, exchange: Exchange, plan: Planner) -> None:
        self._config = config
        self._exchange = exchange
        self._plan = plan
        self._device = device()
        self.architecture: Architecture = architecture(read_model_config(config))
        with megatron_device():
            initialize_parallel(config.policy, config.seed)
            model = build_model(self.architecture, config.policy)
            self._shards = shards_of(
                dict(model.named_parameters()), self.architecture, place(self.architecture)
            )
            read_into(Path(config.model.path), self._shards)
            self._model = _distribute(model)
            self._optimizer = _optimizer(config, self._model)
        # DDP moved the parameters into its own buffers: describe them where they live now.
        self._shards = shards_of(self._parameters(), self.architecture, place(self.architecture))
        self._runner = Runner(
            self._model, temperature=config.rollout.temperature, vocab=self.architecture.vocab
        )
        self._gather: Gather | None = None

    # ------------------------------------------------------------------ the seam

    def logprobs(self, batch: TokenBatch) -> LogProbs:
        """See protocols.Policy."""
        micro = self._microbatches(batch)
        whole = torch.zeros(2, batch.tokens.numel(), device=self._device)
        with megatron_device():
            self._model.eval()
            results = self._runner.logprobs(micro)
            self._model.train()
        if self._speaks():
            for place_, logp, entropy in results:
                real = place_ >= 0
                whole[0, place_[real]] = logp[real]
                whole[1, place_[real]] = entropy[real]
        # Each token is filled by exactly one rank, the others add zeros: a sum is a gather.
        dist.all_reduce(whole)
        whole = whole.cpu()
        return LogProbs(logprobs=whole[0], entropy=whole[1])

    def update(self, mini: TokenBatch, loss: LossFn, lr: float) -> StepStats:
        """See protocols.Policy."""
        num_tokens = max(mini.num_loss_tokens, 1)
        micro = self._microbatches(mini)
        with megatron_device():
            self._zero_grad()
            sums = self._runner.gradients(mini, micro, loss, num_tokens)
            means = self._means(sums, num_tokens)
            grad_norm = self._clip(means["loss"])
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step_with_ready_grads()
        return StepStats(
            loss=means.pop("loss"), grad_norm=grad_norm, lr=lr, num_tokens=num_tokens, means=means
        )

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """See protocols.Policy."""
        if self._gather is None:
            self._gather = Gather(self._shards, self._exchange)
        return iter(self._gather)

    def gradients(self, mini: TokenBatch, loss: LossFn) -> dict[str, Tensor]:
        """The whole gradient of a mini-batch by HF name, on every rank: reduced over ranks, not
        clipped, and no step is taken. For parity checks; collective."""
        num_tokens = max(mini.num_loss_tokens, 1)
        with megatron_device():
            self._zero_grad()
            self._runner.gradients(mini, self._microbatches(mini), loss, num_tokens)
        gradients = {name: p.main_grad for name, p in self._parameters(False).items()}
        self._unshard_gradients()
        shards = shards_of(gradients, self.architecture, place(self.architecture))
        return {name: tensor.clone() for name, tensor in Gather(shards, self._exchange)}

    def save(self, folder: Path) -> None:
        """See protocols.Policy."""
        checkpoint.save(folder, self._exchange, self._parameters(), self._optimizer)

    def load(self, folder: Path) -> None:
        """See protocols.Policy."""
        checkpoint.load(folder, self._exchange, self._parameters(), self._optimizer)

    def offload(self) -> None:
        """See protocols.Policy. Host memory is the only memory of a CPU run."""

    def onload(self) -> None:
        """See protocols.Policy."""

    # ------------------------------------------------------------------ inside

    def _parameters(self, detach: bool = True) -> dict[str, Any]:
        """Megatron name -> parameter, as named inside the model (without DDP's prefix)."""
        model = self._model
        while hasattr(model, "module"):
            model = model.module
        named = dict(model.named_parameters())
        return {name: p.data for name, p in named.items()} if detach else named

    def _microbatches(self, batch: TokenBatch) -> list[Any]:
        plan = self._plan(batch.lengths.tolist(), parallel_state.get_data_parallel_world_size())[
            parallel_state.get_data_parallel_rank()
        ]
        return [make_rows(batch, sequences, self._device) for sequences in plan]

    def _speaks(self) -> bool:
        """Whether this rank's outputs count: one rank per data-parallel replica."""
        return bool(
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    def _zero_grad(self) -> None:
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _means(self, sums: list[dict[str, Tensor]], num_tokens: int) -> dict[str, float]:
        """Token means of the statistics over all micro-batches and ranks."""
        # Stages before the last have no sums and do not know their names.
        everyones = self._exchange.all_gather(sorted(sums[0]) if sums else [])
        names: list[str] = next(filter(None, everyones))
        total = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        if self._speaks():
            for one in sums:
                total += torch.stack([one[name].double() for name in names])
        dist.all_reduce(total)
        return dict(zip(names, (total / num_tokens).tolist(), strict=True))

    def _clip(self, loss: float) -> float:
        """Scale the gradient to norm clip_grad at most; its norm before. Raises Diverged."""
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise Diverged(
                f"loss {loss}, gradient norm {norm}: not finite; the optimizer step was not taken. "
                "Look at the rollouts of this step in samples/, and at a smaller optimizer.lr"
            )
        for one in self._optimizer.chained_optimizers:
            parameters = one.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, self._config.optimizer.clip_grad, norm)
        return norm

    def _unshard_gradients(self) -> None:
        """Give every data-parallel rank the whole reduced gradient (the optimizer needs a part)."""
        group = parallel_state.get_data_parallel_group()
        size, rank = group.size(), group.rank()
        if size == 1:
            return
        for buffer in self._model.buffers:
            for bucket in buffer.buckets:
                part = bucket.grad_data.view(size, -1)[rank].clone()
                parts = [torch.empty_like(part) for _ in range(size)]
                dist.all_gather(parts, part, group=group)
                bucket.grad_data.copy_(torch.cat(parts))


def _distribute(model: Any) -> Any:
    return DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            average_in_collective=False,
        ),
        module=model,
    )


def _optimizer(config: Config, model: Any) -> Any:
    """AdamW over all parameters. Like the published runs, weight decay spares none (Megatron's
    default would spare biases and norms), hence the empty overrides."""
    numbers = config.optimizer
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=numbers.lr,
            weight_decay=numbers.weight_decay,
            adam_beta1=numbers.beta1,
            adam_beta2=numbers.beta2,
            adam_eps=numbers.eps,
            clip_grad=numbers.clip_grad,
            bf16=config.policy.precision == "bfloat16",
            params_dtype=getattr(torch, config.policy.precision),
            use_distributed_optimizer=True,
        ),
        [model],
        config_overrides={},
    )
