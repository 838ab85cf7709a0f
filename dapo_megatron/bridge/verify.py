"""Whether engines hold what the policy holds, from the fingerprints of both sides.

Independent of the plan that moved the weights: it compares what lies where, not what was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from dapo_megatron.bridge.fingerprint import add
from dapo_megatron.types import Piece, Region

Prints = Sequence[Sequence[tuple[Piece, int]]]
"""[rank] -> the pieces it has and their fingerprints."""
_Boxes = dict[Region, dict[int, list[int]]]
"""Region -> fingerprint -> the ranks that have it."""


def disagreements(policy: Prints, engines: Prints, ranks_per_engine: int) -> list[str]:
    """One line per tensor and fault, naming tensor and ranks; none if all is well.

    Copies of one region must be equal, on policy ranks and on engine ranks; and what an engine has
    must be what the policy has, compared on the smallest boxes that both sides' cuts share.
    """
    held, wanted = _by_tensor(policy), _by_tensor(engines)
    found: list[str] = []
    for name in sorted(held.keys() | wanted.keys()):
        trained = _boxes(held.get(name, ()))
        apart = list(_apart(name, "policy", trained))
        found += apart
        if apart:
            continue  # which of them the engine should have is anyone's guess
        engine_ranks = sorted({rank for rank, _, _ in wanted.get(name, ())})
        for first in sorted({rank - rank % ranks_per_engine for rank in engine_ranks}):
            ranks = range(first, first + ranks_per_engine)
            sampled = _boxes(entry for entry in wanted[name] if entry[0] in ranks)
            found += _differences(name, trained, sampled)
    return found


def _by_tensor(prints: Prints) -> dict[str, list[tuple[int, Region, int]]]:
    """Name -> (rank, region, fingerprint) of all ranks."""
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


def _apart(name: str, side: str, boxes: _Boxes) -> Iterator[str]:
    """Copies of one region that are not equal; the fewer ranks are named first."""
    for region, values in boxes.items():
        if len(values) > 1:
            fewest, *rest = sorted(values.values(), key=len)
            yield (
                f"{name}{_where(region)}: {side} ranks {_list(fewest)} hold other values than "
                f"ranks {_list(chain(*rest))}"
            )


def _differences(name: str, trained: _Boxes, sampled: _Boxes) -> Iterator[str]:
    """Where one engine's boxes of a tensor are not the policy's."""
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
            yield from _apart(name, "engine", {region: sampled[region] for region in theirs})
            continue
        else:
            found = add(*(next(iter(sampled[region])) for region in theirs))
            everyone = {
                rank for region in theirs for ranks in sampled[region].values() for rank in ranks
            }
            wrong = sorted(everyone) if found != expected else []
        if wrong:
            where = _where(theirs[0]) if len(theirs) == 1 else ""
            yield f"{name}{where}: engine ranks {_list(wrong)} hold other values than the policy"


def _components(trained: _Boxes, sampled: _Boxes) -> Iterator[tuple[list[Region], list[Region]]]:
    """Policy boxes and engine boxes that overlap, directly or through others."""
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


def _where(region: Region) -> str:
    ends = zip(region.start, region.shape, strict=True)
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in ends) + "]"


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
