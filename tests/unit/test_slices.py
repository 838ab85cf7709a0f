"""Proxies of whole tensors record the slices that a loader takes; slices must cover a tensor."""

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
    """A shape, and operations that a loader may apply to a tensor of this shape, in order."""
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
            # On a real tensor, `contiguous` and `reshape` may copy, which changes the strides. A
            # proxy never copies, so they are used only where no copy is needed.
            if shadow.is_contiguous():
                kinds.append(lambda tensor: tensor.reshape(-1))
        step = draw(st.sampled_from(kinds))
        if step is kinds[1] and not shadow.is_contiguous():
            continue
        shadow = step(shadow)
        steps.append(step)
    return shape, steps


@given(cuts())
def test_slices_of_a_proxy_give_the_region_of_the_same_slices_of_the_tensor(
    case: tuple[tuple[int, ...], list[Cut]],
) -> None:
    shape, steps = case
    full = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    views: list[BoxView] = []
    real: Tensor = full
    proxy: Tensor = ProxyTensor.whole(
        "w", shape, full.dtype, lambda _, view: views.append(view.locate())
    )
    for step in steps:
        real, proxy = step(real), step(proxy)
    assert proxy.shape == real.shape
    try:
        torch.empty(real.shape).copy_(proxy)
    except SyncError:
        # Correct only if the elements form no box, such as part of a row and part of the next.
        places = torch.stack(torch.unravel_index(real.flatten().long(), shape), 1)
        sides = places.amax(0) - places.amin(0) + 1
        assert int(sides.prod()) != real.numel()
        return
    [view] = views
    box = full[view.region.slices].contiguous()
    assert torch.equal(view.read(box), real)
    assert torch.equal(view.unread(real), box)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda tensor: tensor + 1,
    "in place": lambda tensor: tensor.mul_(2),
    "other dtype": lambda tensor: tensor.to(torch.bfloat16),
    "other bits": lambda tensor: tensor.view(torch.int32),
    "concatenated": lambda tensor: torch.cat([tensor, tensor]),
    "fancy index": lambda tensor: tensor[torch.tensor([2, 0])],
    "diagonal": lambda tensor: torch.empty(8).copy_(tensor.diagonal()),
    "every other row": lambda tensor: torch.empty(6, 8).copy_(tensor[::2]),
    "repeated": lambda tensor: torch.empty(2, 12, 8).copy_(tensor.expand(2, 12, 8)),
    "broadcast": lambda tensor: torch.empty(12, 8).copy_(tensor[0]),
    "filled from itself": lambda tensor: tensor.copy_(torch.zeros(12, 8)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_operations_that_are_no_slices_are_refused_by_name(kind: str) -> None:
    proxy = ProxyTensor.whole("the.weight", (12, 8), torch.float32, lambda _, view: view.locate())
    with pytest.raises(SyncError, match=r"^the\.weight: "):
        REFUSED[kind](proxy)


def test_a_view_that_is_no_box_is_not_located() -> None:
    tensor = torch.empty(4, 6)
    assert locate((4, 6), tensor.view(-1)[3:9]) is None
    assert locate((4, 6), tensor.view(-1)[6:18]) == BoxView(Region((1, 0), (2, 6)), (12,), (1,))


boxes = st.builds(
    Region,
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)


@given(st.lists(boxes, max_size=6))
def test_overlap_is_reported_iff_an_element_is_in_two_boxes(regions: list[Region]) -> None:
    count = torch.zeros(8, 8, dtype=torch.int64)
    for region in regions:
        count[region.slices] += 1
    pair = overlap(regions)
    assert (pair is not None) == bool((count > 1).any())
    if pair is not None:
        first, second = pair
        assert first != second and regions[first].intersect(regions[second]) is not None


def test_weights_that_no_rank_takes_are_reported() -> None:
    def tensor_slice(name: str, start: int, rows: int) -> TensorSlice:
        return TensorSlice(name, (4, 3), torch.float32, Region((start, 0), (rows, 3)))

    offered = dict.fromkeys(("a", "b"), ((4, 3), torch.float32))
    both = TensorSlice("b", (4, 3), torch.float32, whole((4, 3)))
    check_used(offered, [[tensor_slice("a", 0, 2), both], [tensor_slice("a", 2, 2), both]])
    for halves, message in (
        ([tensor_slice("a", 0, 2), tensor_slice("a", 2, 1)], "a: shape"),
        ([tensor_slice("a", 0, 2), tensor_slice("a", 1, 2)], "a: shape"),
    ):
        with pytest.raises(SyncError, match=message):
            check_used(offered, [[halves[0], both], [halves[1], both]])
    with pytest.raises(SyncError, match=r"^b: the engine has no such tensor"):
        check_used(offered, [[tensor_slice("a", 0, 4)], []])
