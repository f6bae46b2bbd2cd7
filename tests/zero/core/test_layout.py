import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.layouts import SHAPES, named, require_one_owner, require_whole_numbers
from zeroshard.zero.core.layout import ALIGNMENT, LEAST_ALIGNED, FlatLayout


def _layout(shapes, world_size):
    return FlatLayout.of(named(shapes), world_size)


def _aligned(shapes, world_size):
    return FlatLayout.of(named(shapes), world_size, ALIGNMENT)


@pytest.mark.parametrize("make", [_layout, _aligned])
@given(SHAPES, st.integers(1, 9))
def test_ranks_own_every_element_exactly_once(make, shapes, world_size):
    """`require_one_owner` asserts it."""
    require_one_owner(make(shapes, world_size))


@given(SHAPES, st.integers(1, 9))
def test_shards_are_equal_and_padding_is_less_than_one_element_a_rank(shapes, world_size):
    layout = _layout(shapes, world_size)
    assert layout.padded_numel == layout.shard_numel * world_size
    assert 0 <= layout.padded_numel - sum(slot.numel for slot in layout.slots) < world_size
    assert [layout.interval(rank) for rank in range(world_size)] == [
        (rank * layout.shard_numel, (rank + 1) * layout.shard_numel) for rank in range(world_size)
    ]


@given(st.lists(st.integers(0, 1000).map(lambda numel: (numel,)), max_size=6), st.integers(1, 9))
def test_slots_and_shards_begin_where_kernels_read_fast(shapes, world_size):
    layout, plain = _aligned(shapes, world_size), _layout(shapes, world_size)
    assert [slot.shape for slot in layout.slots] == shapes
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots if slot.numel >= LEAST_ALIGNED)
    assert layout.shard_numel % ALIGNMENT == 0 or layout.shard_numel < LEAST_ALIGNED
    assert layout.padded_numel <= plain.padded_numel * (1 + 2 * ALIGNMENT / LEAST_ALIGNED) + world_size
    flat = torch.full((layout.padded_numel,), 7)
    for view in layout.views(flat):
        view.fill_(1)
    layout.zero_padding(flat)
    assert flat.sum() == sum(slot.numel for slot in layout.slots)


def test_what_comes_after_one_element_is_aligned():
    layout = FlatLayout.of([("scale", ()), ("weight", (32, 32)), ("bias", (32,))], 2, ALIGNMENT)
    assert [slot.offset for slot in layout.slots] == [0, 8, 8 + 1024]
    assert (layout.shard_numel, layout.padding) == (536, ((1, 8), (1064, 1072)))
    assert FlatLayout.of([("scale", ()), ("bias", (32,))], 2, ALIGNMENT).slots[1].offset == 1


@given(SHAPES, st.integers(1, 5))
def test_views_are_the_parameters_end_to_end(shapes, world_size):
    layout = _layout(shapes, world_size)
    flat = torch.arange(layout.padded_numel)
    views = layout.views(flat)
    assert [tuple(view.shape) for view in views] == shapes
    ends = torch.cat([view.reshape(-1) for view in views] or [flat[:0]])
    assert torch.equal(ends, flat[: len(ends)])


def test_one_element_on_four_ranks_belongs_to_the_first():
    layout = _layout([()], 4)
    assert [len(layout.owned(rank)) for rank in range(4)] == [1, 0, 0, 0]
    assert layout.padded_numel == 4


def test_numbers_that_lay_out_nothing_are_refused_by_name():
    require_whole_numbers(FlatLayout.of, ["alignment"])
    with pytest.raises(ValueError, match=r"^world_size must be at least 1, got 0"):
        FlatLayout((), 0)
