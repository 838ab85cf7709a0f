"""The process of a check, with policy and engines as in a run. Timers and memory readings.

Shape letters: T tokens of a batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.cluster.launch import free_port
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.cluster.scratch import prepare_scratch
from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.engine.messages import GroupRequest, Sampling
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import Machine, check
from dapo_megatron.policy.device import backend, claim
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.types import (
    Completion,
    EnginesLost,
    LossOutput,
    MicroTokens,
    Prompt,
    TokenBatch,
)
from gpu_checks.shapes import model_folder

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "model_configs" / "tiny_cpu.yaml"
GIB = 2**30
PROMPT_TOKENS = 16
ALONE = ("run.processes=1", "policy.tensor_parallel=1", "policy.sequence_parallel=false")
"""Overrides for one process, with policy and engine on one GPU."""


@dataclass(frozen=True)
class Setting:
    """Folder and scale of a check."""

    workspace: Path
    tiny: bool = False

    def model(self, name: str) -> Path:
        """Return the folder of a model of this shape, or of the corresponding tiny shape."""
        if self.tiny:
            kind = "_sharp" if name.endswith("_sharp") else ""
            name = f"tiny_{name}" if name.startswith("moe") else f"tiny{kind}"
        return model_folder(name, self.workspace)

    def pick(self, real: Any, tiny: Any) -> Any:
        """Return the value for this scale."""
        return tiny if self.tiny else real


def has_gpu() -> bool:
    return bool(torch.cuda.is_available())


def has_te() -> bool:
    """Return whether Transformer Engine's layers can run here in bfloat16."""
    installed = find_spec("transformer_engine") is not None
    return installed and has_gpu() and torch.cuda.get_device_capability() >= (8, 0)


def is_judged() -> bool:
    """Return whether the targets are stated for this GPU: an H200, or an H100, whose matmuls are as
    fast."""
    words = set(torch.cuda.get_device_name().split()) if has_gpu() else set()
    return bool(words & {"H100", "H200"}) and "PCIe" not in words


def memory_gib() -> float:
    """Return the size of the GPU's memory."""
    return torch.cuda.get_device_properties(0).total_memory / GIB


def used_gib() -> float:
    """Return how much of the GPU's memory is used, by all processes. Without a GPU it is 0."""
    if not has_gpu():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def join_alone() -> Ranks:
    """Join a world of only this process."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in alone.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    prepare_scratch()
    claim(0)
    return join(backend())


def make_config(setting: Setting, model: str, *overrides: str, row_tokens: int = 4096) -> Config:
    """Return a complete config for this model and one process. `row_tokens` is the size of a packed
    row and the maximum length of a sequence."""
    row_tokens = setting.pick(row_tokens, 256)
    precision = "bfloat16" if has_gpu() else "float32"
    texts = [
        f"model.path={setting.model(model)}",
        "run.name=gpu_check",
        f"run.directory={setting.workspace}",
        *ALONE,
        f"policy.precision={precision}",
        f"rollout.max_prompt_tokens={PROMPT_TOKENS}",
        f"rollout.max_response_tokens={row_tokens - PROMPT_TOKENS}",
        f"train.max_tokens_per_microbatch={row_tokens}",
        "rollout.deterministic=false",
        "engine.max_sequences=64",
        "engine.memory_fraction=0.3",
        "engine.kv_cache_gib=0.0625",
        # Gaps are reported as figures.
        "sync.max_gap=100.0",
        "tracking.mlflow=false",
    ]
    return load_config(BASE, [*texts, *overrides])


def make_policy(config: Config, ranks: Ranks) -> Any:
    """Return a policy without an engine."""
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    check(config, read_architecture(config), Machine.here(), has_engine=False)
    return MegatronPolicy(config, ranks, planner(config.policy, config.train))


def random_batch(lengths: Sequence[int], vocab: int, *, prompt: int = 1) -> TokenBatch:
    """Return sequences of random tokens, the same in every process. The tokens after `prompt` are
    in the loss."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(lengths)
    mask_T = torch.cat([torch.arange(length) >= prompt for length in lengths])
    zeros_T = torch.zeros(num_tokens)
    return TokenBatch(
        lengths=torch.tensor(lengths),
        loss_tokens=(torch.tensor(lengths) - prompt).clamp(min=0),
        group_ids=torch.arange(len(lengths)),
        tokens=torch.randint(4, vocab, (num_tokens,), generator=generator).int(),
        loss_mask=mask_T,
        advantages=torch.where(mask_T, 1.0, 0.0),
        weights=torch.ones(num_tokens),
        engine_logprobs=zeros_T,
        old_logprobs=zeros_T,
    )


def likelihood(logp: Tensor, inputs: MicroTokens) -> LossOutput:
    """Return the negative log-likelihood as a loss. On one batch it falls at every step."""
    return LossOutput(total=-(logp * inputs.mask).sum(), sums={})


def seconds_of(work: Callable[[], Any], repeats: int = 3, warm_ups: int = 1) -> float:
    """Return the median duration of a call. The first calls are not counted."""
    times = []
    for number in range(warm_ups + repeats):
        wait()
        started = time.perf_counter()
        work()
        wait()
        if number >= warm_ups:
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def wait() -> None:
    """Wait until the GPU has finished its work."""
    if has_gpu():
        torch.cuda.synchronize()


def generate(
    engines: Engines, num_sequences: int, num_tokens: int, vocab: int
) -> tuple[float, list[tuple[Prompt, Completion]]]:
    """Sample completions that are all in flight at once, on the first engine. Return the duration
    in seconds, and prompts and completions. Collective."""
    generator = torch.Generator().manual_seed(2)
    prompts = [
        Prompt(
            source="chain_sum",  # of tiny_cpu.yaml
            index=index,
            tokens=tuple(torch.randint(4, vocab, (PROMPT_TOKENS,), generator=generator).tolist()),
            text="",
            truth="0",
        )
        for index in range(num_sequences)
    ]
    started = time.perf_counter()
    done = engines.run(partial(_sampled, prompts, num_tokens), dict[int, Completion])
    seconds = time.perf_counter() - started
    return seconds, [(prompt, done[prompt.index]) for prompt in prompts]


def _sampled(prompts: Sequence[Prompt], num_tokens: int, pool: Pool) -> dict[int, Completion]:
    """Return the completion of each prompt, by its index."""
    requests: list[list[GroupRequest]] = [[] for _ in range(pool.num_replicas)]
    requests[0] = [GroupRequest(prompt.index, prompt, ((0, None),)) for prompt in prompts]
    nothing: list[list[GroupRequest]] = [[] for _ in range(pool.num_replicas)]
    pool.start(Sampling("gpu_check", num_tokens, 1.0, 1.0, is_seeded=True))
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
        if not pool.present:
            raise EnginesLost("the engine was lost while it sampled")
        for _, report in pool.advance(requests):
            done |= {ticket: completion for ticket, completion, _ in report.returned}
        requests = nothing
    pool.interrupt()
    return done


def gaps(policy: Any, sampled: Iterable[tuple[Prompt, Completion]], vocab: int) -> Tensor:
    """Return |engine - policy| of each sampled token's log-prob."""
    pairs = list(sampled)
    sequences = [(*prompt.tokens, *completion.tokens) for prompt, completion in pairs]
    batch = random_batch([len(tokens) for tokens in sequences], vocab, prompt=PROMPT_TOKENS)
    batch = replace(batch, tokens=torch.tensor([*chain.from_iterable(sequences)]))
    before = [0.0] * PROMPT_TOKENS
    engine = [value for _, completion in pairs for value in (*before, *completion.logprobs)]
    policy_T = policy.logprobs(batch, temperature=1.0).logprobs
    return (policy_T - torch.tensor(engine))[batch.loss_mask].abs()
