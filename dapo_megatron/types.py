"""The records that flow through a run, in the order of the picture in docs/architecture.md.

All of them are frozen: a later stage makes a new record (`dataclasses.replace`) instead of
editing one, so that what was recorded, checkpointed and trained on is the same thing.

Shape letters: T tokens (all sequences of a batch, end to end), S sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
    """Between the others."""


STEP_PHASES = tuple(phase for phase in Phase if phase not in (Phase.START, Phase.OTHER))
"""Phases that are measured in every step, as time/<phase> and memory/<phase>_gib."""


class Verdict(StrEnum):
    """What dynamic sampling says of a group (arXiv 2503.14476, eq. 11)."""

    MIXED = "mixed"
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"


class Fate(StrEnum):
    """What became of a group."""

    TRAINED = "trained"
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    OVERLONG = "overlong"
    """overlong.filter leaves fewer completions than can be compared."""
    ABSTAINED = "abstained"
    """A completion could not be graded: its grader hung, died or raised."""
    EXPIRED = "expired"
    """Finished, and waited for more than rollout.max_age versions; or beyond what the step needed
    (on_policy)."""


class Finish(StrEnum):
    """Why a completion ended: at an end-of-sequence token, at the length limit, or not yet (it was
    interrupted by the end of a step, and goes on in the next)."""

    STOP = "stop"
    LENGTH = "length"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, ready for the engine.

    Example: `Prompt(source="chain_sum", index=17, tokens=(12, 9, 3), text="4 + 3 =",
    truth="7", extra={})`. `index` is the row in its source; `extra` is what a grader may need
    besides the truth (plain JSON values).
    """

    source: str
    index: int
    tokens: tuple[int, ...]
    text: str
    truth: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's answer: raw score (usually +1 / -1), correctness, and the answer it read.
    `parsed` is False if it found none, which is counted per data set."""

    score: float
    correct: bool
    pred: str
    parsed: bool = True


@dataclass(frozen=True, slots=True)
class Segment:
    """So many consecutive tokens of a completion, sampled by the weights of one version."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    `tokens` holds the response alone, end-of-sequence token included; `logprobs` are the
    engine's, of each sampled token under the distribution it was drawn from before top-p;
    `segments` say, first to last, which weight version sampled which tokens. `grade` is None until
    graded, and stays None if the grader hung, died or raised: its group then abstains.

    Example: `Completion(sample=3, tokens=(9, 2), logprobs=(-.1, -.7), text="7",
    finish=Finish.STOP, segments=(Segment(12, 2),), grade=Grade(1.0, True, "7"))`.
    """

    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Finish
    segments: tuple[Segment, ...]
    grade: Grade | None = None

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled its first token."""
        return self.segments[0].version


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion asked of an engine: a new one, or the rest of one that was interrupted.

    `so_far` is what earlier versions sampled of the response (at least one token), or None.
    `max_tokens` limits the whole response. `seed` depends only on run, ticket, sample and the
    number of tokens so far.
    """

    ticket: int
    sample: int
    prompt: Prompt
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    so_far: Completion | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt. `ticket` is its serial number over the whole run."""

    ticket: int
    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a rollout step trains on, and what it saw."""

    train: list[Group]
    ended: list[tuple[Group, Fate]]
    """Groups that ended in this step, by ticket; each ticket ends once in a run."""
    decided: list[Group]
    """Groups whose last grade came in this step, whatever it said: what the policy does, before
    any filtering."""
    version: int
    counts: dict[str, int]
    """The ledger's books of this step."""
    outcomes: Counter[tuple[str, str]]
    """Gradings of this step by (data set, outcome): graded, unparsed (graded, but no answer was
    found in the text), timeout, crash, memory, error."""
    keep_rate: float
    """Forecast of the share of mixed groups."""
    interrupted: int
    """Completions that go on in the next step."""
    grade_seconds: float
    """Waited for graders with an idle engine."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences laid end to end, with everything the loss needs per token.

    The log-prob at position t is that of `tokens[t]` given what precedes it in its sequence.

    tokens          int64 [T]    prompt and response
    lengths         int64 [S]    tokens of each sequence
    loss_mask       bool  [T]    response tokens that enter the loss
    advantages      float [T]    group advantage, 0 outside the response
    weights         float [T]    1 for the token-level loss; other aggregations reweigh tokens
    engine_logprobs float [T]    the engine's log-probs, 0 outside the response
    group_ids       int64 [S]    ticket of the group that each sequence belongs to
    old_logprobs    float [T]    the policy's, before the first update of the step; or None
    sequence_names  S strings    "ticket 12, sample 3", to name a token in an error
    """

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor
    advantages: Tensor
    weights: Tensor
    engine_logprobs: Tensor
    group_ids: Tensor
    old_logprobs: Tensor | None = None
    sequence_names: tuple[str, ...] = ()

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.lengths.numel())

    @property
    def num_loss_tokens(self) -> int:
        """Tokens under the loss mask: the one denominator of a mini-batch."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class MicroTokens:
    """The per-token inputs of the loss for one micro-batch; all of one shape."""

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    engine_logprobs: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of one micro-batch: a sum over its masked tokens, never a mean.

    `sums` are statistics, each a scalar sum over the same tokens; whoever divides by the
    mini-batch's token count turns both into token means.
    """

    total: Tensor
    sums: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-prob and entropy (nats) of each token given those before it in its sequence; 0 for first
    tokens. float32 [T], float64 for a float64 policy."""

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class Inspected:
    """What the policy said of one sequence it is about to be trained on, before the step's first
    update. `gap_mean` and `gap_max` are over all its response tokens, those of older weights too.

    logprobs, entropy   float [T]    of its response tokens
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
    """One update: the mean loss, the gradient norm before clipping, the learning rate, and
    token means of the loss's statistics."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    means: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside a tensor: where it starts and how far it reaches, per dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return "[" + ", ".join(f"{part.start}:{part.stop}" for part in self.slices) + "]"

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True)
        )

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """The box inside both, or None."""
        start = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        stop = tuple(min(a + size_a, b + size_b) for a, size_a, b, size_b in ends)
        shape = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Region(start, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Region) -> Region:
        """This box counted from the start of `outer`, which holds it."""
        start = tuple(a - b for a, b in zip(self.start, outer.start, strict=True))
        return Region(start, self.shape)


def whole(shape: Iterable[int]) -> Region:
    """The box that is all of a tensor of `shape`."""
    shape = tuple(shape)
    return Region((0,) * len(shape), shape)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name, such as bfloat16. Raises ValueError for any other name."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that configs and checkpoints have for a dtype, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Return the indices of two regions that share an element, or None."""
    order = sorted(range(len(regions)), key=lambda index: regions[index].start)
    for place, index in enumerate(order):
        region = regions[index]
        for other in order[place + 1 :]:
            if region.start and regions[other].start[0] >= region.start[0] + region.shape[0]:
                break
            if region.intersect(regions[other]) is not None:
                return index, other
    return None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the HF tensor `name`, held or wanted by some rank. Several ranks may hold the same
    box: replicas, equal to the last bit."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """A piece in memory: `view` aliases the local parameter; its elements, in order, are those of
    the piece's region (its shape may differ)."""

    piece: Piece
    view: Tensor

    def read(self) -> Tensor:
        """The region, shaped as in the HF tensor."""
        return self.view.detach().reshape(self.piece.region.shape)

    def write(self, value: Tensor) -> None:
        """Replace the region by `value`, shaped as in the HF tensor."""
        self.view.detach().copy_(value.detach().reshape(self.view.shape))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync of policy weights into the engines, and how it was verified."""

    version: int
    num_tensors: int
    num_bytes: int
    """Received by the rank that received most; what a rank already holds does not count."""
    seconds: float
    """Of moving and loading."""
    verify_seconds: float
    turn_seconds: float
    """Of handing over the accelerator: the policy's memory leaves and returns, the engine wakes."""
    fingerprinted: bool
    unread_tensors: int
    """Tensors whose values this rank's engine does not let be read (quantised or reordered)."""
    canary_gap: float


class DapoError(Exception):
    """Base of the errors that end a run with a message for the user, not a traceback."""


class ConfigError(DapoError):
    """The configuration is refused; the message names the dotted key and the way out."""


class DataError(DapoError):
    """A prompt source is refused; the message names file and row."""


class SyncError(DapoError):
    """Policy and engine disagree about a weight or a log-prob; names tensor or token."""


class CheckpointError(DapoError):
    """A checkpoint cannot be used; names the file and what to do."""


class StarvedError(DapoError):
    """Dynamic sampling cannot fill a step; names the data sets and what to change. Raised by all
    ranks together, with the coordinator's state whole: the run saves a checkpoint and ends."""


class Stopped(DapoError):
    """A signal asked the run to stop. Raised by all ranks together, where the run's state is whole
    and can be saved."""


class Fenced(DapoError):
    """A later attempt owns the run's folder; this one must not write into it any more."""


class Diverged(DapoError):
    """A non-finite loss or gradient, caught before the optimizer step."""


class RankError(DapoError):
    """Another rank does not know the run's secret, or sends what cannot be read; names the rank."""
