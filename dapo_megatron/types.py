"""The records that flow through a run, in the order of the diagram in docs/architecture.md.

All records are frozen. A later stage makes a new record (`dataclasses.replace`) instead of editing
one, so that recorder, checkpoint and training use the same values.

Shapes: S is the number of sequences of a batch, H the number of those whose tokens this rank holds,
and T the number of these tokens, concatenated.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any

from dapo_megatron.segments import Segment, branches, is_sampled, num_sampled

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    Int32s = array[int]
    Float32s = array[float]
    Experts = array[int]
else:
    Int32s = Float32s = Experts = array


def packed(values: NDArray[Any]) -> array[Any]:
    """Return a numpy array as an array of the same type, without a Python object per number."""
    return array(values.dtype.char, values.tobytes())


class Phase(StrEnum):
    """Phases of a run, in the order of a rollout step. Each is a key of config.watchdog."""

    START = "start"
    GENERATE = "generate"
    LOGPROBS = "logprobs"
    UPDATE = "update"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    OTHER = "other"
    """Time between the other phases."""


STEP_PHASES = tuple(phase for phase in Phase if phase not in (Phase.START, Phase.OTHER))
"""Phases that are measured in every step, as time/<phase> and memory/<phase>_gib."""


class Verdict(StrEnum):
    """Result of dynamic sampling for a group (arXiv 2503.14476, eq. 11). Only MIXED groups pass."""

    MIXED = "mixed"
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"


class Outcome(StrEnum):
    """Why a group is closed: trained on, or dropped for one of these reasons."""

    TRAINED = "trained"
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    OVERLONG = "overlong"
    """overlong.filter leaves too few completions to compare."""
    ABSTAINED = "abstained"
    """A completion could not be graded: its grader hung, died or raised."""
    EXPIRED = "expired"
    """The group finished, but its oldest token is more than rollout.max_age versions old, or the
    step did not need the group (rollout.on_policy)."""


class Finish(StrEnum):
    """Why a completion ended. All but STOP, LENGTH and UNFINISHED occur only with an
    environment."""

    STOP = "stop"
    """An end-of-sequence token, in a turn that calls no tool."""
    LENGTH = "length"
    """rollout.max_response_tokens: reached, or the next observation does not fit."""
    TURN_LENGTH = "turn_length"
    """rollout.turns.max_turn_tokens."""
    TURNS = "turns"
    """rollout.turns.max_turns."""
    CALLS = "calls"
    """rollout.turns.max_calls."""
    DONE = "done"
    """Its environment ended it."""
    UNFINISHED = "unfinished"
    """Not ended: interrupted by the end of a step. It continues in the next one."""

    @property
    def is_cut(self) -> bool:
        """Whether the last turn was cut off, so that overlong.filter applies."""
        return self in (Finish.LENGTH, Finish.TURN_LENGTH)


AGENT = "agent:"
"""Begins the name of an environment that is an agent, and goes on with module:function."""
VERIFIERS = "verifiers:"
"""Begins the name of an environment of the package verifiers, and goes on with its name, a colon
and its arguments as JSON. It is an agent, too."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, tokenized for the engine.

    Example: `Prompt(source="chain_sum", index=17, tokens=(12, 9, 3), text="4 + 3 =",
    truth="7", extra={})`. `index` is the row in its source. `extra` holds other values that a
    grader may need (plain JSON values). `environment` names the one that completions talk to; empty
    without one.
    """

    source: str
    index: int
    tokens: tuple[int, ...]
    text: str
    truth: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""


@dataclass(frozen=True, slots=True)
class Grade:
    """Result of grading a completion: raw score (usually +1 / -1), correctness, extracted answer.
    `parsed` is False if the completion contains no answer; these are counted per data set."""

    score: float
    correct: bool
    pred: str
    parsed: bool = True


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    `tokens` holds only the response, including its end-of-sequence token. `logprobs` are the
    engine's log-probs of these tokens under the sampling distribution, temperature included. `text`
    is the model's last turn.
    `segments` lists, in token order, which weight version sampled how many tokens, and how many
    were observed. `grade` is None until the completion is
    graded. It stays None if the grader hung, died or raised; the group then abstains. `routes` are
    the experts of the tokens of prompt and response, except the last one, flattened [tokens,
    layers, k], each under the weights that sampled its segment; None without router replay.

    Tokens and log-probs are packed: 4 bytes per number, where a Python number takes about 32. Numpy
    and torch view them without a copy. Other sequences are packed by the constructor. Routes are
    packed as uint8 ("B") or int16 ("h").

    Example: `Completion(sample=3, tokens=(9, 2), logprobs=(-.1, -.7), text="7",
    finish=Finish.STOP, segments=(Segment(12, 2),), grade=Grade(1.0, True, "7"))`.
    """

    sample: int
    tokens: Int32s
    logprobs: Float32s
    text: str
    finish: Finish
    segments: tuple[Segment, ...]
    grade: Grade | None = None
    routes: Experts | None = None

    def __post_init__(self) -> None:
        for name, typecode in (("tokens", "i"), ("logprobs", "f")):
            values = getattr(self, name)
            if getattr(values, "typecode", "") != typecode:
                object.__setattr__(self, name, array(typecode, values))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the response."""
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        """Number of tokens of the response that were sampled."""
        return num_sampled(self.segments)

    @property
    def start(self) -> int:
        """First token of the last branch, which the engine continues."""
        return branches(self.segments)[-1][0]

    @property
    def longest_branch(self) -> int:
        """Number of tokens of the longest branch."""
        return max(sum(part.num_tokens for part in parts) for _, parts in branches(self.segments))

    @property
    def oldest_version(self) -> int:
        """Oldest version of weights that a token was sampled with."""
        return self.segments[0].version

    @property
    def logprob_mean(self) -> float | None:
        """Mean of the engine's log-probs of sampled tokens; None without tokens."""
        import numpy as np

        with np.errstate(invalid="ignore"):  # infinities of both signs
            return float(self._logprobs().mean(dtype="float64")) if self.logprobs else None

    @property
    def logprob_min(self) -> float | None:
        """Lowest of the engine's log-probs of sampled tokens; None without tokens."""
        return float(self._logprobs().min()) if self.logprobs else None

    def _logprobs(self) -> NDArray[np.float32]:
        import numpy as np

        logprobs = np.frombuffer(self.logprobs, np.float32)
        if not any(segment.is_observed for segment in self.segments):
            return logprobs
        return logprobs[is_sampled(self.segments)]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """Description of a sequence that a step trains on: a prompt and a branch of its completion.
    Every rank knows all sequences; the tokens are only on ranks that train on them.

    `segments` add up to `response_tokens`. `start` is the first token of the branch.
    `in_loss` is False for a truncated response that overlong.filter excludes from the loss.
    `reward` includes the length penalty.
    """

    ticket: int
    sample: int
    prompt_tokens: int
    response_tokens: int
    segments: tuple[Segment, ...]
    advantage: float
    in_loss: bool
    reward: float
    start: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that enter the loss."""
        return num_sampled(self.segments) if self.in_loss else 0

    def __str__(self) -> str:
        branch = f", branch at token {self.start}" if self.start else ""
        return f"ticket {self.ticket}, sample {self.sample}{branch}"


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """Tokens of one training sequence. `logprobs` are the engine's, one per response token;
    `routes` see `Completion`."""

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    routes: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to an engine: sample a new completion, or continue an interrupted one.

    `so_far` is the interrupted completion (at least one token), or None. `max_tokens` limits the
    whole response, and `max_new_tokens` what is sampled now. Texts in `stop` end it, too. `seed`
    depends only on the run, ticket, sample and number of tokens so far. If
    it is None, the engine uses its own random numbers, which takes less time.
    """

    ticket: int
    sample: int
    prompt: Prompt
    seed: int | None
    max_tokens: int
    temperature: float
    top_p: float
    so_far: Completion | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt. `ticket` is its serial number over the whole run."""

    ticket: int
    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups that a rollout step trains on, and statistics of collecting them."""

    train: list[Group]
    ended: list[tuple[Group, Outcome]]
    """Groups that ended in this step, sorted by ticket. Each ticket ends once in a run."""
    decided: list[Group]
    """Groups whose last completion was graded in this step, before filtering, for statistics."""
    version: int
    counts: dict[str, int]
    """The ledger's counts of this step."""
    gradings: Counter[tuple[str, str]]
    """Gradings of this step by (data set, outcome): graded, unparsed (graded, but no answer was
    found in the text), timeout, crash, memory, error."""
    keep_rate: float
    """Forecast of the share of mixed groups."""
    interrupted: int
    """Completions that continue in the next step."""
    grade_seconds: float
    """Seconds that the engine was idle because graders were still running."""
    turn_counts: Mapping[str, float] = field(default_factory=dict)
    """Calls of tools, failures of environments, and seconds that completions waited for them."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts that a step trains on: the same sequences and metrics on every rank, and the tokens
    of those that this rank trains on, by their index. The step starts from weights `version`. It
    clears `tokens` and adds its own values to `metrics`."""

    version: int
    sequences: list[TrainingSequence]
    tokens: dict[int, SequenceTokens]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The sequences of a step or mini-batch, with the per-token inputs of the loss.

    Fields [S] describe all sequences, on every rank. Fields [T] hold the tokens of some sequences
    only, concatenated in order: those that this rank trains on. All ranks of a data-parallel index
    hold the same ones.

    The log-prob at position t belongs to `tokens[t]`, given the preceding tokens of its sequence.

    lengths         int64 [S]    tokens of each sequence
    loss_tokens     int64 [S]    tokens of each sequence that enter the loss
    group_ids       int64 [S]    ticket of the group that each sequence belongs to
    sequence_names  S strings    "ticket 12, sample 3", to name a token in an error
    tokens          int32 [T]    prompt and response
    loss_mask       bool  [T]    sampled tokens that enter the loss
    advantages      float [T]    group advantage, 0 where no token was sampled
    weights         float [T]    factor of each token's loss: of corrections for mismatch, and of
                                 aggregations other than the token mean
    engine_logprobs float [T]    the engine's log-probs, 0 where no token was sampled
    old_logprobs    float [T]    the policy's log-probs before the step's first update; None if they
                                 are not computed yet, or only by the update
    reference_logprobs  float [T]  log-probs of the reference of loss.kl; None without one
    teacher_logprobs    float [T]  log-probs of the teacher of loss.distill; None without one
    top_ids             int32 [T, k]  with loss.distill.top_k: the teacher's most likely tokens at
                                 this place; None otherwise
    teacher_top_logprobs  float [T, k]  their log-probs by the teacher
    routes          integer [T, layers * k]  experts that each token uses in the model's layers
                                 with experts; uint8, or int16 with -1 where the router chooses;
                                 None if it always chooses. The last token of a sequence is ignored
    owners          int64 [S]    data-parallel index that trains on each sequence; None if every
                                 rank holds all sequences
    held            int64 [H]    sequences that this rank holds, ascending; None: all of them
    """

    lengths: Tensor
    loss_tokens: Tensor
    group_ids: Tensor
    tokens: Tensor
    loss_mask: Tensor
    advantages: Tensor
    weights: Tensor
    engine_logprobs: Tensor
    old_logprobs: Tensor | None = None
    routes: Tensor | None = None
    sequence_names: tuple[str, ...] = ()
    owners: Tensor | None = None
    held: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S."""
        return int(self.lengths.numel())

    @property
    def num_loss_tokens(self) -> int:
        """Tokens of all sequences that enter the loss. The loss of a mini-batch is divided by this
        number only."""
        return int(self.loss_tokens.sum())

    @property
    def held_lengths(self) -> Tensor:
        """Tokens of each sequence that this rank holds, int64 [H]."""
        return self.lengths if self.held is None else self.lengths[self.held]

    @property
    def starts(self) -> Tensor:
        """Index of each sequence's first token in the fields [T], int64 [S]; -1 for a sequence that
        this rank does not hold."""
        held_lengths = self.held_lengths
        held_starts = held_lengths.cumsum(0) - held_lengths
        if self.held is None:
            return held_starts
        starts = self.lengths.new_full(self.lengths.shape, -1)
        starts[self.held] = held_starts
        return starts

    def sequence_name(self, index: int) -> str:
        """Return the name of a sequence for an error; its index if the batch has no names."""
        return self.sequence_names[index] if self.sequence_names else f"sequence {index}"


def _sum_of_all(values: Tensor) -> Tensor:
    return values.sum().expand_as(values)


@dataclass(frozen=True, slots=True)
class MicroTokens:
    """Per-token inputs of the loss for one micro-batch. All tensors have the same shape, except for
    those of `top_k`.

    `sequence_sum(values)` returns, for each token, the sum of `values` over the tokens of its
    sequence, with gradient. The policy provides it. The sum includes tokens of the sequence that
    other context-parallel ranks hold, so every rank must call it equally often. Without a policy,
    all tokens form one sequence.

    `reference_logprobs` are those of the reference of loss.kl, and `teacher_logprobs` those of the
    teacher of loss.distill; None without one. `entropy` is that of the policy being trained. It has
    a gradient only with loss.entropy_coefficient. With loss.distill.top_k, `teacher_top_logprobs`
    [n, k] are those of the teacher's most likely tokens, and `top_logprobs` those of the same
    tokens by the policy being trained, with gradient; otherwise the policy gives [n, 0].
    """

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    engine_logprobs: Tensor
    mask: Tensor
    sequence_sum: Callable[[Tensor], Tensor] = _sum_of_all
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    top_logprobs: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of one micro-batch: a sum over its masked tokens, never a mean. `sums` are
    statistics, scalar sums over the same tokens. The caller divides both by the mini-batch's number
    of loss tokens to get token means."""

    total: Tensor
    sums: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-prob and entropy (nats) of each token given the preceding tokens of its sequence; 0 for
    first tokens. Both are float32 [T], or float64 for a float64 policy.

    `routes` are the experts that each token used (see TokenBatch), if policy.router_replay asks
    for them. `top_ids` int32 [T, k] and `top_logprobs` [T, k] are the most likely tokens at each
    place, of a teacher with loss.distill.top_k.
    """

    logprobs: Tensor
    entropy: Tensor
    routes: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SequenceDiagnostics:
    """The policy's log-probs of one training sequence, before the step's first update. `gap_mean`
    and `gap_max` include all response tokens, also those that older weights sampled.

    logprobs, entropy   float [number of response tokens]
    """

    ticket: int
    sample: int
    advantage: float
    gap_mean: float
    gap_max: float
    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one optimizer update: mean loss, gradient norm before clipping, learning rate,
    and token means of the loss function's statistics. `router` has the statistics of router replay,
    if any token's experts were given."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    means: Mapping[str, float]
    router: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside a tensor: its start and its size in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return "[" + ", ".join(f"{part.start}:{part.stop}" for part in self.slices) + "]"

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True)
        )

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """Return the intersection of two boxes, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        stop = tuple(min(a + size_a, b + size_b) for a, size_a, b, size_b in ends)
        shape = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return Region(start, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Region) -> Region:
        """Return this box relative to the start of `outer`, which contains it."""
        start = tuple(a - b for a, b in zip(self.start, outer.start, strict=True))
        return Region(start, self.shape)


def whole(shape: Iterable[int]) -> Region:
    """Return the region that covers a whole tensor of `shape`."""
    shape = tuple(shape)
    return Region((0,) * len(shape), shape)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype named `name`, such as bfloat16. Raises ValueError for an unknown name."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in configs and checkpoints, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Return the indices of two regions that share an element, or None."""
    order = sorted(range(len(regions)), key=lambda index: regions[index].start)
    for position, index in enumerate(order):
        region = regions[index]
        for other in order[position + 1 :]:
            if region.start and regions[other].start[0] >= region.start[0] + region.shape[0]:
                break
            if region.intersect(regions[other]) is not None:
                return index, other
    return None


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A region of the HF tensor `name` that a rank holds or needs. Several ranks may hold the same
    region; their copies are bitwise equal."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region

    @property
    def nbytes(self) -> int:
        """Size of the region in bytes."""
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor slice in memory. `view` aliases the local parameter. It has the elements of the
    slice's region in the same order, but its shape may differ."""

    tensor_slice: TensorSlice
    view: Tensor

    def read(self) -> Tensor:
        """Return the region's values, shaped as in the HF tensor."""
        return self.view.detach().reshape(self.tensor_slice.region.shape)

    def write(self, value: Tensor) -> None:
        """Overwrite the region with `value`, which is shaped as in the HF tensor."""
        self.view.detach().copy_(value.detach().reshape(self.view.shape))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Statistics of one sync of policy weights into the engines, and of its verification."""

    version: int
    num_tensors: int
    num_bytes: int
    """Bytes received by the rank that received most, without data that it already holds."""
    seconds: float
    """Seconds to transfer and load the weights."""
    verify_seconds: float
    turn_seconds: float
    """Seconds to hand over the accelerator: reload and offload the policy, wake the engine."""
    fingerprinted: bool
    """Whether the fingerprints of all tensors were compared."""
    unread_tensors: int
    """Tensors that cannot be read back from the first engine (quantized or reordered)."""


class DapoError(Exception):
    """Base class of errors that end a run with a message for the user and no traceback."""

    def __init__(self, message: str = "", engines: Iterable[int] = ()) -> None:
        """Take also the engines that caused the error, if they are known."""
        super().__init__(message)
        self.engines = frozenset(engines)


class ConfigError(DapoError):
    """The configuration is invalid. The message names the dotted key and how to fix it."""


class DataError(DapoError):
    """A prompt source is invalid. The message names file and row."""


class SyncError(DapoError):
    """Policy and engine differ in a weight or a log-prob. The message names the tensor or token."""


class CheckpointError(DapoError):
    """A checkpoint cannot be used. The message names the file and what to do."""


class StarvedError(DapoError):
    """Dynamic sampling cannot fill a step. The message names the data sets and what to change.
    Raised on all ranks while the coordinator's state is consistent and can be saved."""


class EnginesLost(DapoError):
    """No engine is left that could sample. Raised on all ranks; after another sync, sampling can go
    on."""


class TooFewEnginesError(DapoError):
    """Fewer engines than engine.min_replicas are left. Raised on all ranks while the run's state
    can be saved."""


class Stopped(DapoError):
    """A signal asked the run to stop. Raised on all ranks while the run's state can be saved."""


class Diverged(DapoError):
    """The loss or the gradient is not finite. Raised before the optimizer step."""


class RankError(DapoError):
    """Another rank does not know the run's secret, or its message is invalid or lost. Names it."""
