"""Which tensors each sync compares: all, or a rotating tenth."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dapo_megatron.bridge import schedule
from dapo_megatron.bridge.schedule import NUM_PARTS, SMALL_MODEL, FingerprintSchedule
from dapo_megatron.cluster.ranks import Ranks

NAMES = [f"model.layers.{number}.weight" for number in range(47)]
BIG = SMALL_MODEL + 1


def make(
    size: int = BIG, every: int | None = None, names: list[str] = NAMES
) -> FingerprintSchedule:
    return FingerprintSchedule(names, size, every, Ranks(0, 1, 0))


def run(fingerprints: FingerprintSchedule, num_syncs: int, seconds: float = 1.0) -> list[set[str]]:
    """Return what each of several syncs of a second compares, if all takes `seconds`."""
    compared = []
    for _ in range(num_syncs):
        names = fingerprints.next()
        compared.append(set(names))
        fingerprints.record(names, 1.0, seconds * fingerprints.share(names))
    return compared


def test_every_sync_of_a_small_model_compares_all_tensors() -> None:
    fingerprints = make(SMALL_MODEL)
    assert run(fingerprints, 5, seconds=1e6) == [set(NAMES)] * 5
    assert fingerprints.share(NAMES) == 1.0


@pytest.mark.parametrize("every", [None, 7, 100])
def test_ten_syncs_in_a_row_compare_every_tensor(every: int | None) -> None:
    syncs = run(make(every=every), 40, seconds=1e6)
    assert syncs[0] == set(NAMES)
    for first in range(30):
        assert set.union(*syncs[first : first + NUM_PARTS]) == set(NAMES)
    sizes = {len(names) for number, names in enumerate(syncs) if number % (every or 100)}
    assert sizes == {4, 5}


def test_all_tensors_are_compared_at_the_period_of_the_config() -> None:
    fingerprints = make(every=3)
    full = [names == set(NAMES) for names in run(fingerprints, 9, seconds=1e6)]
    assert full == [True, False, False] * 3


def test_ranks_choose_the_same_tensors_whatever_the_order_of_names() -> None:
    assert run(make(every=4), 20) == run(make(every=4, names=NAMES[::-1]), 20)


def test_full_comparisons_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: clock[0])
    fingerprints = make()

    def period(seconds: float, step_seconds: float) -> list[int]:
        full = []
        for number in range(41):
            clock[0] += step_seconds
            names = fingerprints.next()
            if len(names) == len(NAMES):
                full.append(number)
            fingerprints.record(names, 1.0, seconds)
        return [after - before for before, after in pairwise(full)]

    assert set(period(seconds=0.45, step_seconds=2.0)) == {10}  # 5% of syncs of 1 s: 9 and this one
    assert set(period(seconds=2.0, step_seconds=100.0)) == {4}  # 0.5% of steps of 100 s
    assert set(period(seconds=2.0, step_seconds=500.0)) == {1}


def test_few_tensors_leave_some_syncs_without_a_comparison() -> None:
    sizes = [len(names) for names in run(make(every=100, names=NAMES[:3]), 20, seconds=1e6)]
    assert sizes == [3, 1, 1] + [0] * 7 + [1] * 3 + [0] * 7
