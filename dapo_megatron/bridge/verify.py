"""Verification of a sync: the engines hold and compute what the policy does.

Fingerprints compare the weights of both sides where they lie, independently of the plan that moved
them. Canary sequences compare log-probs, which also catches an engine that holds the right weights
and computes with others.

A fingerprint has 64 bits and does not depend on who holds which part. The bits of each element, as
an integer, are multiplied by a weight of its place in the whole tensor and summed modulo 2^64. Sums
of parts add up to the sum of the whole, in any order. The weights are odd, so one flipped bit
always changes the sum: 2^k times an odd number is never 0 modulo 2^64. They look random and belong
to rows and columns, so swapped, shifted or repeated elements show as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from dapo_megatron.cluster.collectives import NAMED
from dapo_megatron.protocols import Exchange, Policy, RolloutEngine
from dapo_megatron.types import Piece, Region, Shard, SyncError, TokenBatch

NUM_SEQUENCES = 4
SEED = 20250318  # any fixed number: the same sequences in every run

_CHUNK = 2**22
"""Elements converted to integers at once: 32 MiB."""
_MASK = 2**64 - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
_STEP, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15

Fingerprints = Sequence[Sequence[tuple[Piece, int]]]
"""[rank] -> the pieces it has and their fingerprints."""
_Boxes = dict[Region, dict[int, list[int]]]
"""Region -> fingerprint -> the ranks that have it."""


class SyncVerifier:
    """Compares the policy of all ranks with their engines. Methods are collective."""

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        exchange: Exchange,
        shards: Sequence[Shard],
        held: Sequence[Sequence[Piece]],
        *,
        max_gap: float,
        vocab: int,
        num_tokens: int,
    ) -> None:
        """`shards` are this rank's, `held` are those of all ranks, and `num_tokens` is the length
        of a canary sequence."""
        self._policy = policy
        self._engine = engine
        self._exchange = exchange
        self._shards = shards
        self._held = held
        self._max_gap = max_gap
        self._ranks_per_engine = exchange.world_size // engine.num_replicas
        self._sequences = canary_sequences(vocab, num_tokens)
        self.num_unread = 0
        """Tensors that this rank's engine did not let be read at the last check."""

    def check_fingerprints(self, version: int) -> None:
        """Raise SyncError naming tensors and ranks if an engine holds other weights."""
        ours = [fingerprint(shard.read(), shard.piece.region) for shard in self._shards]
        pieces, theirs, unread = [], [], []
        for piece, value in self._engine.held():
            if value is None:
                unread.append(piece.name)
            else:
                pieces.append(piece)
                theirs.append(fingerprint(value, piece.region))
        everyone = self._exchange.all_gather(
            (ours, pieces, theirs), tuple[list[int], list[Piece], list[int]]
        )
        policy = [
            list(zip(held, prints, strict=True))
            for held, (prints, _, _) in zip(self._held, everyone, strict=True)
        ]
        engines = [list(zip(pieces, prints, strict=True)) for _, pieces, prints in everyone]
        if lines := disagreements(policy, engines, self._ranks_per_engine):
            more = f"\n... and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
            raise SyncError(
                f"weights {version}: fingerprints differ after the sync\n"
                + "\n".join(lines[:NAMED])
                + more
            )
        self.num_unread = len(unread)

    def canary_logprobs(self) -> Tensor:
        """Return the policy's log-probs of the canary sequences."""
        return self._policy.logprobs(canary_batch(self._sequences), temperature=1.0).logprobs

    def check_canary(self, version: int, ours: Tensor, *, fingerprinted: bool) -> float:
        """Return the largest gap of any engine to `ours`, the policy's log-probs.

        Raises SyncError if it is above sync.max_gap. Unless this sync was `fingerprinted`, the
        fingerprints are checked first: they name the tensor.
        """
        worst = largest_gap(ours, self._engine.score(self._sequences))
        gaps = self._exchange.all_gather(worst, tuple[float, int, int])
        gap, sequence, token = max(gaps)
        if gap <= self._max_gap:
            return gap
        if not fingerprinted:
            self._policy.onload()
            self.check_fingerprints(version)
        unread = f" ({self.num_unread} tensors cannot be read back)" if self.num_unread else ""
        ranks = ", ".join(str(rank) for rank, one in enumerate(gaps) if one[0] > self._max_gap)
        raise SyncError(
            f"weights {version}: on fixed sequences policy and engine disagree by {gap:.3g} "
            f"(sequence {sequence}, token {token}), engine ranks {ranks}; sync.max_gap is "
            f"{self._max_gap:g}. The weights' fingerprints agree{unread}: what the engine makes of "
            "them (packing, quantising, kernels) or how the two compute differs"
        )


# ------------------------------------------------------------------ canary sequences


def canary_sequences(vocab: int, num_tokens: int) -> list[list[int]]:
    """Return fixed sequences of `num_tokens` tokens below `vocab`."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(vocab, (NUM_SEQUENCES, num_tokens), generator=generator)
    return [list(map(int, row)) for row in drawn]


def canary_batch(sequences: list[list[int]]) -> TokenBatch:
    """Return the sequences as a batch for Policy.logprobs, with nothing to train on."""
    num_tokens = sum(map(len, sequences))
    zeros = torch.zeros(num_tokens)
    return TokenBatch(
        tokens=torch.tensor([token for sequence in sequences for token in sequence]),
        lengths=torch.tensor([len(sequence) for sequence in sequences]),
        loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
        advantages=zeros,
        weights=zeros,
        engine_logprobs=zeros,
        group_ids=torch.arange(len(sequences)),
    )


def largest_gap(policy: Tensor, engine: list[list[float]]) -> tuple[float, int, int]:
    """Return the largest |log-prob by engine - by policy|, with its sequence and token.

    `policy` has every token of all sequences, end to end. `engine` lacks each first one.
    """
    num_tokens = len(engine[0]) + 1
    ours = policy.view(-1, num_tokens)[:, 1:].double()
    gaps = (torch.tensor(engine, dtype=torch.float64) - ours).abs()
    gaps = torch.where(gaps.isnan(), torch.inf, gaps)  # NaN is the worst there is
    where = int(gaps.argmax())
    return float(gaps.max()), where // (num_tokens - 1), where % (num_tokens - 1) + 1


# ------------------------------------------------------------------ fingerprints


@torch.no_grad()
def fingerprint(value: Tensor, region: Region) -> int:
    """Return the part of a tensor's fingerprint that lies in `region`. `value` has the region's
    shape and elements of at most 4 bytes.

    Subnormal numbers (below 1e-38 in bfloat16 and float32) and -0.0 count as 0, because kernels
    through which weights are read back flush them to 0. Waits for the device.
    """
    dims = len(region.shape)
    weights = [
        _weights(dim, region.start[dim], region.shape[dim], value.device) for dim in range(dims)
    ]
    rows = value.reshape(region.shape[0], -1) if dims else value.reshape(1, 1)
    step = max(1, _CHUNK // max(rows.shape[1], 1))
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        if part.element_size() > 1:
            part = torch.where(part.abs() < torch.finfo(part.dtype).tiny, 0.0, part)
        sums = part.contiguous().view(_BITS[value.element_size()]).to(torch.int64)
        sums = sums.view(-1, *region.shape[1:])
        for dim in reversed(range(1, dims)):
            sums = (sums * weights[dim]).sum(-1)
        if dims:
            sums = sums * weights[0][first : first + step]
        total += sums.sum()
    return int(total) & _MASK


def add(*parts: int) -> int:
    """Return the fingerprint of disjoint parts together."""
    return sum(parts) & _MASK


def _weights(dim: int, first: int, size: int, device: torch.device) -> Tensor:
    """Return odd 64-bit weights of the places first, first + 1, ... along a dimension."""
    mixed = torch.arange(first + 1, first + 1 + size, dtype=torch.int64, device=device)
    mixed = (mixed + (dim << 40)) * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _MIX_1
    mixed = (mixed ^ (mixed >> 27)) * _MIX_2
    return (mixed ^ (mixed >> 31)) | 1


# ------------------------------------------------------------------ both sides


def disagreements(policy: Fingerprints, engines: Fingerprints, ranks_per_engine: int) -> list[str]:
    """Return one line per tensor and fault, naming tensor and ranks.

    Copies of one region must be equal, on policy ranks and on engine ranks. The engine's weights
    are compared with the policy's on the smallest boxes that the shards of both sides share.
    """
    held, wanted = _by_tensor(policy), _by_tensor(engines)
    lines: list[str] = []
    for name in sorted(held.keys() | wanted.keys()):
        trained = _boxes(held.get(name, ()))
        unequal = list(_unequal_copies(name, "policy", trained))
        lines += unequal
        if unequal:
            continue  # unknown which copy the engine should hold
        engine_ranks = sorted({rank for rank, _, _ in wanted.get(name, ())})
        for first in sorted({rank - rank % ranks_per_engine for rank in engine_ranks}):
            ranks = range(first, first + ranks_per_engine)
            sampled = _boxes(entry for entry in wanted[name] if entry[0] in ranks)
            lines += _differences(name, trained, sampled)
    return lines


def _by_tensor(prints: Fingerprints) -> dict[str, list[tuple[int, Region, int]]]:
    """Return (rank, region, fingerprint) of all ranks, by name."""
    tensors: dict[str, list[tuple[int, Region, int]]] = defaultdict(list)
    for rank, pieces in enumerate(prints):
        for piece, value in pieces:
            tensors[piece.name].append((rank, piece.region, value))
    return tensors


def _boxes(entries: Iterable[tuple[int, Region, int]]) -> _Boxes:
    boxes: _Boxes = {}
    for rank, region, value in entries:
        ranks = boxes.setdefault(region, {}).setdefault(value, [])
        if rank not in ranks:
            ranks.append(rank)
    return boxes


def _unequal_copies(name: str, side: str, boxes: _Boxes) -> Iterator[str]:
    """Yield a line per region whose copies differ, naming the smallest group of ranks first."""
    for region, values in boxes.items():
        if len(values) > 1:
            fewest, *rest = sorted(values.values(), key=len)
            yield (
                f"{name}{region}: {side} ranks {_list(fewest)} hold other values than "
                f"ranks {_list(chain(*rest))}"
            )


def _differences(name: str, trained: _Boxes, sampled: _Boxes) -> Iterator[str]:
    """Yield a line per box where one engine's weights are not the policy's."""
    for ours, theirs in _components(trained, sampled):
        expected = add(*(next(iter(trained[region])) for region in ours))
        if len(theirs) == 1:  # each rank's copy by itself
            [region] = theirs
            wrong = [
                rank
                for value, ranks in sampled[region].items()
                if value != expected
                for rank in ranks
            ]
        elif any(len(sampled[region]) > 1 for region in theirs):
            yield from _unequal_copies(
                name, "engine", {region: sampled[region] for region in theirs}
            )
            continue
        else:
            actual = add(*(next(iter(sampled[region])) for region in theirs))
            everyone = {
                rank for region in theirs for ranks in sampled[region].values() for rank in ranks
            }
            wrong = sorted(everyone) if actual != expected else []
        if wrong:
            where = theirs[0] if len(theirs) == 1 else ""
            yield f"{name}{where}: engine ranks {_list(wrong)} hold other values than the policy"


def _components(trained: _Boxes, sampled: _Boxes) -> Iterator[tuple[list[Region], list[Region]]]:
    """Yield policy boxes and engine boxes that overlap, directly or through others."""
    left = list(trained)
    while left:
        ours, theirs = [left.pop()], []
        unseen = set(sampled)
        grew = True
        while grew:
            more_theirs = [box for box in unseen if any(box.intersect(one) for one in ours)]
            unseen -= set(more_theirs)
            theirs += more_theirs
            more_ours = [box for box in left if any(box.intersect(one) for one in theirs)]
            left = [box for box in left if box not in more_ours]
            ours += more_ours
            grew = bool(more_theirs or more_ours)
        if theirs:  # an engine with expert parallelism has only some
            yield ours, sorted(theirs, key=lambda region: region.start)


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
