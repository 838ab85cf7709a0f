"""Estimate the seconds of a rollout step by phase, to compare layouts and to know whether a run
takes hours or weeks. All assumptions are stated.

Training takes the model's FLOPs divided by the peak of the devices times the MFU. An engine step
takes the longer of reading weights and KV cache from memory and computing. Generation takes as many
engine steps as the longest response has tokens, or more if the sequences do not all fit at once.
With rollout.on_policy false, groups are carried, so no step waits for its longest response.

With engine.colocated false, each side works with its own GPUs. A step takes as long as the slower
side if engines sample while the policy trains, else the sum of both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from dapo_megatron.model import Architecture, planned_architecture, with_teacher
from dapo_megatron.model.flops import head_flops, model_flops, pair_flops, peak_flops, token_flops
from dapo_megatron.plan.estimate import MemoryEstimate
from dapo_megatron.plan.layout import data_parallel
from dapo_megatron.plan.rows import preferred_multiple
from dapo_megatron.types import ConfigError, Phase

MEMORY_BANDWIDTH = {
    "H100": 3.35e12,
    "H200": 4.8e12,
    "H800": 3.35e12,
    "H20": 4.0e12,
    "A100": 2.04e12,
    "A800": 2.04e12,
}
"""Bytes per second, from NVIDIA's data sheets (SXM, 80 GB and more)."""
PROMPT_SHARE = 0.1
"""Mean prompt length as a share of rollout.max_prompt_tokens. Prompts of DAPO-Math-17k have about
200 of 2,048 tokens."""
RESPONSE_SHARE = 0.15
"""Mean response length as a share of rollout.max_response_tokens. In the paper's run it was 2,900
of 20,480 tokens (figure 7a; from 700 at the start to 4,700 at the end)."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the estimate. docs/plan.md lists their sources."""

    gpu: str = "H100"
    mfu: float = 0.40
    """Share of the dense bfloat16 peak in logprobs and update. This project's target is 0.45 on a
    4B model; published values of Megatron-LM for long contexts are 0.35 to 0.45."""
    bandwidth_share: float = 0.6
    """Share of the memory bandwidth that an engine step reaches."""
    step_overhead_seconds: float = 0.010
    """Overhead of an engine step: scheduling, sampling, kernel launches."""
    eager_overhead_seconds: float = 0.020
    """Additional overhead with engine.enforce_eager: kernel launches from Python."""
    link_bytes_per_second: float = 20e9
    """Bandwidth into one GPU from others in a sync. A 400 Gb/s port has 50e9."""
    host_bytes_per_second: float = 25e9
    """Bandwidth between a GPU and pinned host memory. PCIe 5 x16 has 64e9, and at most half of it
    if two GPUs share a switch."""
    response_tokens: float | None = None
    """Mean tokens of a response. None: RESPONSE_SHARE of rollout.max_response_tokens."""

    def lines(self) -> list[tuple[str, str]]:
        """Return the names and values of the assumptions as text."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, f"{value}") for name, value in given if value is not None]


@dataclass(frozen=True)
class Speed:
    """Seconds of a rollout step by phase, with the quantities that they depend on."""

    seconds: dict[str, float]
    prompts: float
    """Prompts issued per step, of which rollout.expected_keep_rate give mixed groups."""
    response_tokens: float
    length: int
    """Mean tokens of a sequence, with its prompt."""
    assumptions: Assumptions
    sync_bytes: int
    """Bytes that all engine ranks together need in a sync. With engine.colocated false, all of them
    are sent."""
    overlaps: bool = False
    """Whether engines sample while the policy trains."""

    @property
    def training_seconds(self) -> float:
        """Seconds in which the policy computes."""
        return self.seconds[Phase.LOGPROBS] + self.seconds[Phase.UPDATE]

    @property
    def step_seconds(self) -> float:
        """Seconds of a whole step."""
        if not self.overlaps:
            return sum(self.seconds.values())
        return max(self.seconds[Phase.GENERATE], self.training_seconds) + self.seconds[Phase.SYNC]

    @property
    def waiting(self) -> dict[str, float]:
        """Share of a step in which each side waits for the other, if they have separate GPUs:
        {"policy": ..., "engine": ...}."""
        both = self.step_seconds - self.seconds[Phase.SYNC]
        busy = {"policy": self.training_seconds, "engine": self.seconds[Phase.GENERATE]}
        return {side: (both - seconds) / self.step_seconds for side, seconds in busy.items()}


def estimate_speed(estimate: MemoryEstimate, assumptions: Assumptions | None = None) -> Speed:
    """Estimate the seconds of a step on the GPUs of a memory estimate. Raises ConfigError for an
    unknown GPU."""
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

    def train(*, backward: bool, model: Architecture = arch) -> float:
        flops = model_flops(model, [length] * sequences, backward=backward, num_scored=scored)
        return flops / devices

    teacher = arch
    if config.loss.distill is not None:
        teacher = planned_architecture(with_teacher(config))

    recomputed = {"none": 0.0, "selective": 0.1, "full": 1.0}[config.policy.recompute]
    update = train(backward=True) + recomputed * train(backward=False)
    if config.policy.lora is not None:  # no gradients of whole weights, a third of the FLOPs
        update -= train(backward=False)
    minis = config.train.updates_per_step
    keep = config.rollout.expected_keep_rate if config.rollout.dynamic_sampling else 1.0
    prompts = config.rollout.prompts_per_step / keep
    return Speed(
        seconds={
            Phase.GENERATE: _generate(estimate, given, peak, prompts, prompt, response),
            Phase.LOGPROBS: _logprobs(
                estimate,
                given,
                train(backward=False) * _row_factor(estimate, length, sequences, 1),
                train(backward=False, model=teacher),
            ),
            Phase.UPDATE: update * _row_factor(estimate, length, sequences, minis),
            Phase.SYNC: _sync(estimate, given),
        },
        prompts=prompts,
        response_tokens=response,
        length=length,
        assumptions=given,
        sync_bytes=estimate.engine.received_bytes * estimate.engine_gpus,
        overlaps=not config.engine.colocated and config.rollout.samples_ahead,
    )


def _logprobs(
    estimate: MemoryEstimate, given: Assumptions, pass_seconds: float, teacher_seconds: float
) -> float:
    """Return the seconds of the log-prob passes: of the policy, unless the engine's or the update's
    are used, of a teacher (loss.distill), whose weights come from host memory, and of a reference
    (loss.kl). The latter exchanges the weights with those in host memory, before and after."""
    loss = estimate.config.loss
    is_made = loss.old_logprobs == "policy" and estimate.config.needs_logprob_pass
    seconds = pass_seconds if is_made else 0.0
    if loss.distill is not None:
        moved = max(stage.teacher.num_bytes for stage in estimate.stages)
        seconds += teacher_seconds + moved / given.host_bytes_per_second
    if loss.kl.is_on:
        exchanged = max(stage.reference_bytes for stage in estimate.stages)
        seconds += pass_seconds + 4 * exchanged / given.host_bytes_per_second
    return seconds


def _row_factor(estimate: MemoryEstimate, length: int, sequences: int, minis: int) -> float:
    """Return the factor by which the pipeline bubble and the padding of rows make a pass longer."""
    policy = estimate.config.policy
    bound = estimate.config.train.max_tokens_per_microbatch * policy.context_parallel
    tokens = sequences * length / minis / data_parallel(policy, estimate.num_processes)
    num_micro = max(ceil(tokens / bound), 1)
    chunks = policy.virtual_pipeline_parallel or 1
    bubble = (policy.pipeline_parallel - 1) / chunks / num_micro
    # On average half a multiple is added to a row, unless the row is full.
    row = tokens / num_micro
    padded = max(row, min(row + preferred_multiple(policy, on_gpu=True) / 2, bound))
    # The time of a micro-batch is proportional to its tokens. Imbalance between ranks, of up to
    # half a sequence, is included in the MFU.
    return (1.0 + bubble) * padded / row


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
    replicas = config.num_replicas(estimate.num_processes)
    sequences = prompts * config.rollout.samples_per_prompt / replicas
    context = prompt + response / 2
    concurrent = max(min(config.engine.max_sequences, engine.sequences(context)), 1)
    if config.rollout.on_policy:
        longest = config.rollout.max_response_tokens
        steps = max(longest, sequences * response / concurrent)
    else:  # always as many sequences run as are in flight and fit
        in_flight = max(config.rollout.lookahead * sequences, 1.0)
        steps = sequences * response / min(concurrent, in_flight)
    batch = sequences * response / steps
    read = engine.weights.num_bytes + batch * context * engine.token_bytes
    flops = batch * (token_flops(arch) + head_flops(arch) + context * pair_flops(arch)) / size
    overhead = given.step_overhead_seconds
    overhead += given.eager_overhead_seconds if config.engine.enforce_eager else 0.0
    reading = read / (MEMORY_BANDWIDTH[given.gpu] * given.bandwidth_share)
    prefill = model_flops(arch, [ceil(prompt)], backward=False) * prompts
    seconds = steps * (overhead + max(reading, flops / (peak * given.mfu)))
    return seconds + prefill / (estimate.engine_gpus * peak * given.mfu)


def _sync(estimate: MemoryEstimate, given: Assumptions) -> float:
    """Return the seconds to transfer the weights to engine ranks, and to move offloaded parts to
    the host and back."""
    moved = estimate.engine.received_bytes / given.link_bytes_per_second
    offloaded = max(stage.offloaded_bytes for stage in estimate.stages)
    return moved + 2 * offloaded / given.host_bytes_per_second
