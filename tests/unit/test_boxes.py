"""Boxes of whole tensors: cutting, copying in memory, writing by several ranks, and reading."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.checkpoints.formats.torch_dist.boxes import (
    METADATA,
    Box,
    Reading,
    Shape,
    StoredBox,
    read_metadata,
    write_boxes,
    write_metadata,
)
from dapo_megatron.policy import boxes as policy_boxes
from dapo_megatron.policy.boxes import HostCopies, split
from dapo_megatron.types import CheckpointError

READ_AS = {
    torch.bfloat16: (torch.bfloat16, torch.float32, torch.float64),
    torch.float32: (torch.float32, torch.float64),
    torch.float64: (torch.float64,),
    torch.uint8: (torch.uint8,),
}
"""Data types that represent all values of a stored one."""


def slices(offset: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))


def cut(shape: Shape, rng: Random) -> list[tuple[Shape, Shape]]:
    """Cut a tensor into boxes along random planes. Return (offset, sizes) of each."""
    spans = []
    for size in shape:
        inner = {rng.randrange(size + 1) for _ in range(rng.randrange(3))}
        spans.append(list(pairwise(sorted({0, size} | inner))))
    return [
        (tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
        for box in product(*spans)
    ]


def store(folder: Path, ranks: Sequence[Sequence[Box]]) -> Path:
    """Write a checkpoint of these boxes by rank."""
    stored = []
    for rank, boxes in enumerate(ranks):
        places, checksums = write_boxes(folder, rank, boxes, {f"extra.{rank}": b"x"})
        content = (folder / f"__{rank}_0.distcp").read_bytes()
        assert checksums == {f"__{rank}_0.distcp": hashlib.sha256(content).hexdigest()}
        stored += places
    write_metadata(folder, stored)
    return folder


# ---------------------------------------------------------------------------- cutting and copying


@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_the_boxes_of_a_range_cover_it_once_in_order(data: Any, shape: Shape) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))
    numbers = torch.arange(numel).view(shape)
    covered: list[int] = []
    boxes = list(split(shape, start, stop))
    for offset, sizes, first in boxes:
        inside = numbers[slices(offset, sizes)].flatten().tolist()
        assert inside == list(range(first, first + prod(sizes)))
        covered += inside
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def experts(key: str, indices: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Box]:
    values = {n: torch.rand(1, 4, 3).to(dtype) for n in indices}
    return [Box(key, (n, 0, 0), (128, 4, 3), value) for n, value in values.items()]


def test_consecutive_experts_are_copied_to_a_box_whose_memory_is_used_again() -> None:
    copies = HostCopies()
    scalar = Box("scalar", (), (), torch.tensor(3.0))
    boxes = [*experts("a", [5, 3, 4, 9]), *experts("b", [6]), scalar]
    copied = copies.copy(boxes)
    places = {(box.key, box.offset, box.sizes) for box in copied}
    assert places == {
        ("a", (3, 0, 0), (3, 4, 3)),  # 9 does not follow
        ("a", (9, 0, 0), (1, 4, 3)),
        ("b", (6, 0, 0), (1, 4, 3)),
        ("scalar", (), ()),
    }
    of_place = {(box.key, box.offset): box.values for box in copied}
    ordered = [boxes[number].values for number in (1, 2, 0)]
    assert torch.equal(of_place["a", (3, 0, 0)], torch.cat(ordered))
    for box in boxes:
        box.values.add_(1)
    assert not torch.equal(of_place["a", (3, 0, 0)], torch.cat(ordered))
    again = copies.copy(boxes)
    assert [box.values.data_ptr() for box in again] == [box.values.data_ptr() for box in copied]
    assert torch.equal(of_place["a", (3, 0, 0)], torch.cat(ordered))


def test_a_large_box_is_cut_into_boxes_that_share_chunks_of_memory() -> None:
    values = torch.rand(10, 3)
    with patch.object(policy_boxes, "BOX_BYTES", 50):  # 4 rows
        copied = HostCopies().copy([Box("a", (5, 0), (20, 6), values)])
    assert [(box.offset, box.sizes) for box in copied] == [
        ((5, 0), (4, 3)),
        ((9, 0), (4, 3)),
        ((13, 0), (2, 3)),
    ]
    assert torch.equal(torch.cat([box.values for box in copied]), values)
    assert len({box.values.untyped_storage().data_ptr() for box in copied}) == 1


# ---------------------------------------------------------------------------- writing and reading


@given(rng=st.randoms(use_true_random=False))
def test_boxes_of_several_ranks_are_read_as_other_boxes(
    tmp_path_factory: pytest.TempPathFactory, rng: Random
) -> None:
    tensors: dict[str, Tensor] = {}
    ranks: list[list[Box]] = [[] for _ in range(rng.randint(1, 3))]
    for key in "abc":
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randrange(4)))
        tensors[key] = (100 * torch.rand(shape)).to(rng.choice(list(READ_AS)))
        for offset, sizes in cut(shape, rng):
            values = tensors[key][slices(offset, sizes)]
            rng.choice(ranks).append(Box(key, offset, shape, values))
    if rng.random() < 0.5:
        with patch.object(policy_boxes, "BOX_BYTES", rng.choice([32, 2**26])):
            ranks = [HostCopies().copy(boxes) for boxes in ranks]
    folder = store(tmp_path_factory.mktemp("boxes"), ranks)
    wanted = []
    for key, tensor in tensors.items():
        dtype, shape = rng.choice(READ_AS[tensor.dtype]), tuple(tensor.shape)
        for offset, sizes in cut(shape, rng):
            memory = torch.empty([size + 1 for size in sizes], dtype=dtype)
            wanted.append(Box(key, offset, shape, memory[slices((0,) * len(sizes), sizes)]))
    Reading(folder, wanted).run()
    for box in wanted:
        expected = tensors[box.key][slices(box.offset, box.sizes)].to(box.dtype)
        assert torch.equal(box.values, expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of `a` and `bytes`, whose halves are in the files of two ranks."""
    tensors = {"a": torch.arange(12.0).view(4, 3), "bytes": torch.arange(4, dtype=torch.uint8)}
    ranks = [
        [Box(k, (rank * 2, *[0] * (v.dim() - 1)), tuple(v.shape), v[2 * rank :][:2])
         for k, v in tensors.items()]
        for rank in range(2)
    ]  # fmt: skip
    return store(tmp_path, ranks)


def wanted(key: str = "a", shape: Shape = (4, 3), dtype: torch.dtype = torch.float32) -> Box:
    return Box(key, (0,) * len(shape), shape, torch.full(shape, 7, dtype=dtype))


def test_options_of_a_box_allow_rounding_another_key_and_rows_that_pad(folder: Path) -> None:
    rounded = replace(wanted(dtype=torch.bfloat16), may_round=True)
    renamed = replace(wanted("gone"), other_key="a")
    preferred = replace(wanted(), other_key="bytes")
    padded = replace(wanted(shape=(3, 3)), may_be_padded=True)
    Reading(folder, [rounded, renamed, preferred, padded]).run()
    for box in (rounded, renamed, preferred, padded):
        rows = box.shape[0]
        assert torch.equal(box.values, torch.arange(12.0).view(4, 3)[:rows].to(box.dtype))


@pytest.mark.parametrize(
    ("box", "fault"),
    [
        (wanted("x"), "x is missing"),
        (replace(wanted("x"), other_key="y"), "y is missing"),
        (wanted("extra.0"), "extra.0 is missing"),
        (wanted(shape=(4, 2)), r"a has shape \(4, 3\), not \(4, 2\)"),
        (wanted(shape=(3, 3)), r"a has shape \(4, 3\), not \(3, 3\)"),
        (replace(wanted(shape=(5, 3)), may_be_padded=True), r"a has .*\(4, 3\), not \(5, 3\)"),
        (replace(wanted(shape=(3, 2)), may_be_padded=True), r"a has .*\(4, 3\), not \(3, 2\)"),
        (wanted(shape=(4, 3, 1)), r"a has shape \(4, 3\), not \(4, 3, 1\)"),
        (
            wanted(dtype=torch.bfloat16),
            "a was saved in float32 and would be rounded to bfloat16. "
            "Resume with the policy.precision and optimizer.moments of the run",
        ),
        (wanted(dtype=torch.uint8), "a was saved in float32 and would be rounded to uint8"),
    ],
)
def test_a_box_that_cannot_be_read_is_refused_before_any_is_read(
    folder: Path, box: Box, fault: str
) -> None:
    good = wanted()
    with pytest.raises(CheckpointError, match=f"^{folder}: {fault}"):
        Reading(folder, [good, box]).run()
    assert (good.values == 7).all()


def change_metadata(folder: Path, **changes: Any) -> None:
    metadata = read_metadata(folder)
    info = metadata.state_dict_metadata["a"]
    if "chunks" in changes:
        info.chunks = changes["chunks"]
    if "places" in changes:
        metadata.storage_data = changes["places"]
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


DAMAGES = {
    "a file is cut off": (
        lambda folder: os.truncate(folder / "__1_0.distcp", 100),
        "/__1_0.distcp: missing or cut off",
    ),
    "a file is gone": (
        lambda folder: (folder / "__1_0.distcp").unlink(),
        "/__1_0.distcp: missing or cut off",
    ),
    "elements are gone": (
        lambda folder: change_metadata(
            folder, chunks=read_metadata(folder).state_dict_metadata["a"].chunks[:1]
        ),
        ": elements of a are missing",
    ),
    "chunks are no chunks": (
        lambda folder: change_metadata(folder, chunks=[3]),
        f"/{METADATA}: cannot be read",
    ),
    "there are no places": (
        lambda folder: change_metadata(folder, places={}),
        f"/{METADATA}: cannot be read",
    ),
    "no metadata": (lambda folder: (folder / METADATA).unlink(), f"/{METADATA}: cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_before_anything_is_read(
    folder: Path, damage: str
) -> None:
    break_it, fault = DAMAGES[damage]
    break_it(folder)
    box = wanted()
    with pytest.raises(CheckpointError, match=f"^{folder}{fault}"):
        Reading(folder, [box]).run()
    assert (box.values == 7).all()


def test_a_damaged_record_is_refused_with_its_file(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match=f"^{path}: a: cannot be read"):
        Reading(folder, [wanted()]).run()


@pytest.mark.parametrize("numbers", [[0], [0, 0], [0, 1, 1], [0, 1, 2, 3]])
def test_elements_that_are_missing_or_written_twice_are_refused_by_name(
    tmp_path: Path, numbers: list[int]
) -> None:
    boxes = [StoredBox("a", (2 * n, 0), (2, 3), (4, 3), torch.float32, "f", 0, 1) for n in numbers]
    if numbers == [0, 0]:  # as many elements as there should be
        boxes[1] = replace(boxes[1], dtype=torch.float64)
    count = 6 * len(numbers)
    with pytest.raises(CheckpointError, match=f"{count} of 12 elements of a were written"):
        write_metadata(tmp_path, boxes)
    assert not (tmp_path / METADATA).exists()


# ---------------------------------------------------------------------------- large models
