"""Proxies for whole tensors, and whether slices make up a tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.engine.slices import BoxView, ProxyTensor, check_used, locate
from dapo_megatron.types import Region, SyncError, TensorSlice, overlap, whole

Cut = Callable[[Tensor], Tensor]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Cut]]:
    """A shape, and what a loader may do to a tensor of it, one after the other."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    steps: list[Cut] = []
    shadow = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, max(shadow.dim() - 1, 0)))
        kinds: list[Cut] = [lambda tensor: tensor.unsqueeze(0), lambda tensor: tensor.contiguous()]
        if shadow.dim():
            first = draw(st.integers(0, shadow.shape[dim] - 1))
            size = draw(st.integers(1, shadow.shape[dim] - first))
            kinds += [
                lambda tensor, dim=dim, first=first, size=size: tensor.narrow(dim, first, size),
                lambda tensor, dim=dim, first=first: tensor.select(dim, first),
                lambda tensor, dim=dim: tensor.transpose(0, dim),
                lambda tensor, dim=dim: tensor.unbind(dim)[-1],
                lambda tensor, dim=dim: tensor.chunk(2, dim)[0],
                lambda tensor: tensor[..., :1],
            ]
            # A copy that `contiguous` made has other strides; the proxy has none, and would say
            # so. On a whole, or a run of rows, it makes no copy.
            if shadow.is_contiguous():
                kinds.append(lambda tensor: tensor.reshape(-1))
        step = draw(st.sampled_from(kinds))
        if step is kinds[1] and not shadow.is_contiguous():
            continue
        shadow = step(shadow)
        steps.append(step)
    return shape, steps


@given(cuts())
def test_a_proxy_shows_what_the_same_cuts_of_the_tensor_show(
    case: tuple[tuple[int, ...], list[Cut]],
) -> None:
    shape, steps = case
    full = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    got: list[BoxView] = []
    real: Tensor = full
    proxy: Tensor = ProxyTensor.whole(
        "w", shape, full.dtype, lambda _, one: got.append(one.locate())
    )
    for step in steps:
        real, proxy = step(real), step(proxy)
    assert proxy.shape == real.shape
    try:
        torch.empty(real.shape).copy_(proxy)
    except SyncError:
        # Only of elements that are not one box: part of a row and part of the next.
        places = torch.stack(torch.unravel_index(real.flatten().long(), shape), 1)
        sides = places.amax(0) - places.amin(0) + 1
        assert int(sides.prod()) != real.numel()
        return
    [view] = got
    box = full[view.region.slices].contiguous()
    assert torch.equal(view.read(box), real)
    assert torch.equal(view.unread(real), box)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda one: one + 1,
    "in place": lambda one: one.mul_(2),
    "other dtype": lambda one: one.to(torch.bfloat16),
    "other bits": lambda one: one.view(torch.int32),
    "concatenated": lambda one: torch.cat([one, one]),
    "fancy index": lambda one: one[torch.tensor([2, 0])],
    "diagonal": lambda one: torch.empty(8).copy_(one.diagonal()),
    "every other row": lambda one: torch.empty(6, 8).copy_(one[::2]),
    "repeated": lambda one: torch.empty(2, 12, 8).copy_(one.expand(2, 12, 8)),
    "broadcast": lambda one: torch.empty(12, 8).copy_(one[0]),
    "filled from itself": lambda one: one.copy_(torch.zeros(12, 8)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_slice_cannot_stand_for_is_refused_by_name(kind: str) -> None:
    proxy = ProxyTensor.whole("the.weight", (12, 8), torch.float32, lambda _, one: one.locate())
    with pytest.raises(SyncError, match=r"^the\.weight: "):
        REFUSED[kind](proxy)


def test_a_view_of_two_boxes_is_not_located() -> None:
    tensor = torch.empty(4, 6)
    assert locate((4, 6), tensor.view(-1)[3:9]) is None
    assert locate((4, 6), tensor.view(-1)[6:18]) == BoxView(Region((1, 0), (2, 6)), (12,), (1,))


boxes = st.builds(
    Region,
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)


@given(st.lists(boxes, max_size=6))
def test_overlap_is_found_where_an_element_is_in_two_boxes(regions: list[Region]) -> None:
    count = torch.zeros(8, 8, dtype=torch.int64)
    for region in regions:
        count[region.slices] += 1
    found = overlap(regions)
    assert (found is not None) == bool((count > 1).any())
    if found is not None:
        first, second = found
        assert first != second and regions[first].intersect(regions[second]) is not None


def test_what_no_rank_takes_of_an_offer_is_named() -> None:
    def tensor_slice(name: str, start: int, rows: int) -> TensorSlice:
        return TensorSlice(name, (4, 3), torch.float32, Region((start, 0), (rows, 3)))

    offered = dict.fromkeys(("a", "b"), ((4, 3), torch.float32))
    both = TensorSlice("b", (4, 3), torch.float32, whole((4, 3)))
    check_used(offered, [[tensor_slice("a", 0, 2), both], [tensor_slice("a", 2, 2), both]])
    for halves, said in (
        ([tensor_slice("a", 0, 2), tensor_slice("a", 2, 1)], "a: shape"),
        ([tensor_slice("a", 0, 2), tensor_slice("a", 1, 2)], "a: shape"),
    ):
        with pytest.raises(SyncError, match=said):
            check_used(offered, [[halves[0], both], [halves[1], both]])
    with pytest.raises(SyncError, match=r"^b: the engine has no such tensor"):
        check_used(offered, [[tensor_slice("a", 0, 4)], []])
