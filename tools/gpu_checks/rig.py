"""One rank with a policy, an engine or both, as a run has them; clocks and memory.

Shape letters: T tokens of a batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.cluster.launch import free_port
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.cluster.scratch import prepare_scratch
from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import check
from dapo_megatron.plan.compatibility.rule import Machine
from dapo_megatron.policy.device import backend, claim
from dapo_megatron.types import (
    Completion,
    LossOutput,
    MicroTokens,
    Prompt,
    SampleRequest,
    TokenBatch,
)
from gpu_checks.shapes import model_folder

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "model_configs" / "tiny_cpu.yaml"
GIB = 2**30
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """Where and on what scale a check runs."""

    workspace: Path
    tiny: bool = False
    quick: bool = False

    def model(self, name: str) -> Path:
        """The folder of a shape, or of the tiny one."""
        tiny = {"moe": "tiny_moe"}.get(name, "tiny_sharp" if name.endswith("_sharp") else "tiny")
        return model_folder(tiny if self.tiny else name, self.workspace)

    def pick(self, real: Any, tiny: Any) -> Any:
        """A size."""
        return tiny if self.tiny else real


def has_gpu() -> bool:
    return bool(torch.cuda.is_available())


def has_te() -> bool:
    """Whether Transformer Engine's layers can run here, in bfloat16."""
    installed = find_spec("transformer_engine") is not None
    return installed and has_gpu() and torch.cuda.get_device_capability() >= (8, 0)


def is_judged() -> bool:
    """Whether this is a GPU that the targets are stated for (an H200, or its
    sibling with the same matmuls)."""
    words = set(torch.cuda.get_device_name().split()) if has_gpu() else set()
    return bool(words & {"H100", "H200"}) and "PCIe" not in words


def memory_gib() -> float:
    """Of the GPU."""
    return torch.cuda.get_device_properties(0).total_memory / GIB


def used_gib() -> float:
    """Of the GPU's memory, by anybody; without a GPU 0."""
    if not has_gpu():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def one_rank() -> Ranks:
    """Join a world of this process alone."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in alone.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    prepare_scratch()
    claim(0)
    return join(backend())


def make_config(setting: Setting, model: str, *overrides: str, row_tokens: int = 4096) -> Config:
    """A complete config for one process and this model; `row_tokens` of a packed row, which is also
    the longest sequence of it that is allowed."""
    row_tokens = setting.pick(row_tokens, 256)
    precision = "bfloat16" if has_gpu() else "float32"
    texts = [
        f"model.path={setting.model(model)}",
        "run.name=gpu_check",
        f"run.directory={setting.workspace}",
        "run.processes=1",
        "policy.tensor_parallel=1",
        f"policy.precision={precision}",
        f"rollout.max_prompt_tokens={PROMPT_TOKENS}",
        f"rollout.max_response_tokens={row_tokens - PROMPT_TOKENS}",
        f"train.max_tokens_per_microbatch={row_tokens}",
        "rollout.deterministic=false",
        "engine.max_sequences=64",
        "engine.memory_fraction=0.3",
        "engine.kv_cache_gib=0.0625",
        # Gaps are figures here.
        "sync.max_gap=100.0",
        "tracking.mlflow=false",
    ]
    return load_config(BASE, [*texts, *overrides])


def make_policy(config: Config, ranks: Ranks) -> Any:
    """A policy alone."""
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.build import planner

    check(config, read_architecture(config), Machine.here(), has_engine=False)
    return MegatronPolicy(config, ranks, planner(config.policy, config.train))


def random_batch(lengths: Sequence[int], vocab: int, *, prompt: int = 1) -> TokenBatch:
    """Sequences of random tokens, the same in every process; all after `prompt` in the loss."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(lengths)
    mask_T = torch.cat([torch.arange(length) >= prompt for length in lengths])
    zeros_T = torch.zeros(num_tokens)
    return TokenBatch(
        tokens=torch.randint(4, vocab, (num_tokens,), generator=generator),
        lengths=torch.tensor(lengths),
        loss_mask=mask_T,
        advantages=torch.where(mask_T, 1.0, 0.0),
        weights=torch.ones(num_tokens),
        engine_logprobs=zeros_T,
        group_ids=torch.arange(len(lengths)),
        old_logprobs=zeros_T,
    )


def likelihood(logp: Tensor, inputs: MicroTokens) -> LossOutput:
    """Minus the log-likelihood: it falls at every step on one batch, so that a test can see it."""
    return LossOutput(total=-(logp * inputs.mask).sum(), sums={})


def seconds_of(work: Callable[[], Any], repeats: int = 3, warm_ups: int = 1) -> float:
    """Of one call, the median; the first calls are not counted."""
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
    """Until the GPU has done what it was asked to."""
    if has_gpu():
        torch.cuda.synchronize()


def generate(
    engine: Any, num_sequences: int, num_tokens: int, vocab: int
) -> tuple[float, list[tuple[SampleRequest, Completion]]]:
    """Seconds, and what was sampled, of requests that all are in flight at once."""
    generator = torch.Generator().manual_seed(2)
    requests = [
        SampleRequest(
            ticket=ticket,
            sample=0,
            prompt=Prompt(
                source="",
                index=ticket,
                tokens=tuple(
                    torch.randint(4, vocab, (PROMPT_TOKENS,), generator=generator).tolist()
                ),
                text="",
                truth="",
            ),
            seed=ticket,
            max_tokens=num_tokens,
            temperature=1.0,
            top_p=1.0,
        )
        for ticket in range(num_sequences)
    ]
    wait()
    started = time.perf_counter()
    engine.submit(requests)
    done: dict[int, Completion] = {}
    while engine.requests:
        done |= {request.ticket: completion for request, completion in engine.step()}
    wait()
    seconds = time.perf_counter() - started
    return seconds, [(request, done[request.ticket]) for request in requests]


def gaps(policy: Any, sampled: Iterable[tuple[SampleRequest, Completion]], vocab: int) -> Tensor:
    """|engine - policy| of each sampled token's log-prob."""
    pairs = list(sampled)
    lengths = [len(request.prompt.tokens) + len(one.tokens) for request, one in pairs]
    batch = random_batch(lengths, vocab, prompt=PROMPT_TOKENS)
    tokens = [token for request, one in pairs for token in (*request.prompt.tokens, *one.tokens)]
    engine = [value for _, one in pairs for value in (*[0.0] * PROMPT_TOKENS, *one.logprobs)]
    from dataclasses import replace

    batch = replace(batch, tokens=torch.tensor(tokens))
    ours_T = policy.logprobs(batch, temperature=1.0).logprobs
    return (ours_T - torch.tensor(engine))[batch.loss_mask].abs()
