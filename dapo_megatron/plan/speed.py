"""Seconds of a rollout step by phase, from stated assumptions: an estimate to compare layouts by,
and to know whether a run takes hours or weeks.

Training: operations of the model over the peak of the devices times an assumed share of it.
Generation: each engine step reads its weights and the cache of its sequences, or computes,
whichever takes longer; there are as many steps as the longest response has tokens, or more where
the sequences do not all fit at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from dapo_megatron.model.flops import head_flops, model_flops, pair_flops, peak_flops, token_flops
from dapo_megatron.plan.estimate import MemoryEstimate
from dapo_megatron.plan.layout import data_parallel
from dapo_megatron.plan.stage import offloaded_bytes
from dapo_megatron.types import ConfigError

MEMORY_BANDWIDTH = {
    "H100": 3.35e12,
    "H200": 4.8e12,
    "H800": 3.35e12,
    "H20": 4.0e12,
    "A100": 2.04e12,
    "A800": 2.04e12,
}
"""Bytes a second, by NVIDIA's data sheets (SXM, 80 GB and more)."""
PROMPT_SHARE = 0.1
"""Mean prompt as a share of rollout.max_prompt_tokens: those of DAPO-Math-17k have about 200 of
2,048 tokens."""
RESPONSE_SHARE = 0.15
"""Mean response as a share of rollout.max_response_tokens: 2,900 of 20,480 tokens over the paper's
run (figure 7a; from 700 at its start to 4,700 at its end)."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the estimate; docs/plan.md has the sources."""

    gpu: str = "H100"
    mfu: float = 0.40
    """Share of the dense bfloat16 peak in logprobs and update; a target of this project is 0.45 on
    a 4B model, and long-context runs of Megatron-LM publish 0.35 to 0.45."""
    bandwidth_share: float = 0.6
    """Share of the memory bandwidth that an engine step reaches."""
    step_overhead_seconds: float = 0.010
    """Overhead of an engine step: scheduling, sampling, launches."""
    eager_overhead_seconds: float = 0.020
    """Additional overhead with engine.enforce_eager: launches from Python."""
    link_bytes_per_second: float = 20e9
    """Into one GPU from others in a sync; a 400 Gb/s port carries 50e9."""
    host_bytes_per_second: float = 25e9
    """Between a GPU and pinned memory of its host: PCIe 5 x16 carries 64e9, half of it at best
    where pairs of GPUs share a switch."""
    response_tokens: float | None = None
    """On the mean; None: RESPONSE_SHARE of rollout.max_response_tokens."""

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values as text."""
        return [(field.name, f"{getattr(self, field.name)}") for field in fields(self)]


@dataclass(frozen=True)
class Speed:
    """Seconds of a rollout step by phase; what the numbers rest on."""

    seconds: dict[str, float]
    prompts: float
    """Issued in a step: config.rollout.expected_keep_rate of them are mixed."""
    response_tokens: float
    tokens: int
    """Trained on in a step."""
    assumptions: Assumptions

    @property
    def step_seconds(self) -> float:
        """Seconds of a whole step."""
        return sum(self.seconds.values())


def estimate_speed(estimate: MemoryEstimate, assumptions: Assumptions | None = None) -> Speed:
    """Estimate seconds of a step on the GPUs of a memory estimate. Raises ConfigError on an unknown
    GPU."""
    given = assumptions or Assumptions()
    config, arch = estimate.config, estimate.arch
    peak = peak_flops(given.gpu)
    if peak is None or given.gpu not in MEMORY_BANDWIDTH:
        raise ConfigError(f"--gpu: {given.gpu} is not known; use {', '.join(MEMORY_BANDWIDTH)}")
    response = given.response_tokens or RESPONSE_SHARE * config.rollout.max_response_tokens
    prompt = max(PROMPT_SHARE * config.rollout.max_prompt_tokens, 1.0)
    length = ceil(prompt + response)
    sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    scored = ceil(response) * sequences
    devices = estimate.num_processes * peak * given.mfu

    def train(*, backward: bool) -> float:
        counted = model_flops(arch, [length] * sequences, backward=backward, num_scored=scored)
        return counted / devices

    again = {"none": 0.0, "selective": 0.1, "full": 1.0}[config.policy.recompute]
    update = train(backward=True) + again * train(backward=False)
    minis = config.train.updates_per_step
    keep = config.rollout.expected_keep_rate if config.rollout.dynamic_sampling else 1.0
    prompts = config.rollout.prompts_per_step / keep
    return Speed(
        seconds={
            "generate": _generate(estimate, given, peak, prompts, prompt, response),
            "logprobs": train(backward=False) * _unfilled(estimate, length, sequences, 1),
            "update": update * _unfilled(estimate, length, sequences, minis),
            "sync": _sync(estimate, given),
        },
        prompts=prompts,
        response_tokens=response,
        tokens=length * sequences,
        assumptions=given,
    )


def _unfilled(estimate: MemoryEstimate, length: int, sequences: int, minis: int) -> float:
    """Factor by which a pass takes longer because pipeline stages wait for the first and the last
    micro-batch."""
    policy = estimate.config.policy
    bound = estimate.config.train.max_tokens_per_microbatch * policy.context_parallel
    rows = sequences * length / minis / data_parallel(policy, estimate.num_processes) / bound
    num_micro = max(ceil(rows), 1)
    chunks = policy.virtual_pipeline_parallel or 1
    bubble = (policy.pipeline_parallel - 1) / chunks / num_micro
    # A micro-batch takes what its tokens take; that ranks differ by half a sequence is in the mfu.
    return 1.0 + bubble


def _generate(
    estimate: MemoryEstimate,
    given: Assumptions,
    peak: float,
    prompts: float,
    prompt: float,
    response: float,
) -> float:
    config, arch, engine = estimate.config, estimate.arch, estimate.engine
    size = config.engine_tensor_parallel
    replicas = estimate.num_processes / size
    sequences = prompts * config.rollout.samples_per_prompt / replicas
    context = prompt + response / 2
    at_once = max(min(config.engine.max_sequences, engine.sequences(context)), 1)
    longest = config.rollout.max_response_tokens
    steps = max(longest, sequences * response / at_once)
    batch = sequences * response / steps
    read = engine.weights.num_bytes + batch * context * engine.token_bytes
    flops = batch * (token_flops(arch) + head_flops(arch) + context * pair_flops(arch)) / size
    overhead = given.step_overhead_seconds
    overhead += given.eager_overhead_seconds if config.engine.enforce_eager else 0.0
    reading = read / (MEMORY_BANDWIDTH[given.gpu] * given.bandwidth_share)
    prefill = model_flops(arch, [ceil(prompt)], backward=False) * prompts
    seconds = steps * (overhead + max(reading, flops / (peak * given.mfu)))
    return seconds + prefill / (estimate.num_processes * peak * given.mfu)


def _sync(estimate: MemoryEstimate, given: Assumptions) -> float:
    """Seconds for engine ranks to receive weights, and to move offloaded parts both ways."""
    moved = estimate.engine.weights.num_bytes / given.link_bytes_per_second
    offloaded = max(map(offloaded_bytes, estimate.stages))
    return moved + 2 * offloaded / given.host_bytes_per_second
