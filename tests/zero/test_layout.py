import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.zero import FlatLayout
from zeroshard.zero.core.layout import ALIGNMENT, LEAST_ALIGNED
from zeroshard.zero.whole_tensors.layout import WHOLE_ALIGNMENT, balance, whole_layout

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)


def _layout(shapes, world_size):
    return FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size)


def _whole(shapes, world_size, loads=()):
    return whole_layout([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size, loads)


def _aligned(shapes, world_size):
    return FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size, ALIGNMENT)


@pytest.mark.parametrize("make", [_layout, _whole, _aligned])
@given(shapes, st.integers(1, 9))
def test_ranks_own_every_element_exactly_once(make, shapes, world_size):
    layout = make(shapes, world_size)
    owned = [0] * layout.padded_numel
    for start, stop in layout.padding:
        assert start < stop
        owned[start:stop] = [1] * (stop - start)
    for rank in range(world_size):
        for piece in layout.owned(rank):
            slot = layout.slots[piece.slot]
            assert piece.numel > 0
            assert piece.offset == slot.offset + piece.interval[0]
            assert layout.interval(rank)[0] <= piece.offset
            assert piece.offset + piece.numel <= layout.interval(rank)[1]
            for element in range(piece.offset, piece.offset + piece.numel):
                owned[element] += 1
    assert owned == [1] * layout.padded_numel


@given(shapes, st.integers(1, 9))
def test_shards_are_equal_and_padding_is_less_than_one_element_a_rank(shapes, world_size):
    layout = _layout(shapes, world_size)
    assert layout.padded_numel == layout.shard_numel * world_size
    assert 0 <= layout.padded_numel - layout.numel < world_size
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
    assert layout.numel == plain.numel
    flat = torch.full((layout.padded_numel,), 7)
    for view in layout.views(flat):
        view.fill_(1)
    layout.zero_padding(flat)
    assert flat.sum() == layout.numel


def test_what_comes_after_one_element_is_aligned():
    layout = FlatLayout.of([("scale", ()), ("weight", (32, 32)), ("bias", (32,))], 2, ALIGNMENT)
    assert [slot.offset for slot in layout.slots] == [0, 8, 8 + 1024]
    assert (layout.shard_numel, layout.padding) == (536, ((1, 8), (1064, 1072)))
    assert FlatLayout.of([("scale", ()), ("bias", (32,))], 2, ALIGNMENT).slots[1].offset == 1


@given(shapes, st.integers(1, 5))
def test_views_are_the_parameters_end_to_end(shapes, world_size):
    layout = _layout(shapes, world_size)
    flat = torch.arange(layout.padded_numel)
    views = layout.views(flat)
    assert [tuple(view.shape) for view in views] == shapes
    assert torch.equal(torch.cat([view.reshape(-1) for view in views] or [flat[:0]]), flat[: layout.numel])


@given(shapes, st.integers(1, 9))
def test_whole_tensors_lie_in_one_shard_in_their_shapes(shapes, world_size):
    layout = _whole(shapes, world_size)
    pieces = [piece for rank in range(world_size) for piece in layout.owned(rank)]
    assert sorted(pieces, key=lambda piece: piece.slot) == list(layout.tensors())
    for piece in pieces:
        slot = layout.slots[piece.slot]
        assert (piece.interval, piece.shape, piece.offset) == ((0, slot.numel), slot.shape, slot.offset)
    assert all(slot.offset % WHOLE_ALIGNMENT == 0 for slot in layout.slots)
    assert layout.shard_numel % WHOLE_ALIGNMENT == 0
    flat = torch.full((layout.padded_numel,), 7)
    for index, view in enumerate(layout.views(flat)):
        view.fill_(index)
    layout.zero_padding(flat)
    assert [tuple(view.shape) for view in layout.views(flat)] == shapes
    assert all(view.eq(index).all() for index, view in enumerate(layout.views(flat)))
    assert (flat == 7).sum() == (layout.slots[7].numel if len(layout.slots) > 7 else 0)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(1, 3))
def test_the_longest_shard_is_at_most_a_third_longer_than_it_must_be(numels, world_size):
    blocks = [-(-numel // WHOLE_ALIGNMENT) for numel in numels]
    assignments = itertools.product(range(world_size), repeat=len(blocks))
    best = min(
        max(
            sum(size for size, owner in zip(blocks, owners, strict=True) if owner == rank) for rank in range(world_size)
        )
        for owners in assignments
    )
    longest = _whole([(numel,) for numel in numels], world_size).shard_numel // WHOLE_ALIGNMENT
    assert best <= longest
    assert 3 * world_size * longest <= (4 * world_size - 1) * best


def test_the_largest_goes_first_and_to_the_shard_with_least():
    assert balance([16, 64, 32, 48], [0, 0]) == [0, 0, 1, 1]
    assert balance([16, 16, 16], [0, 0, 0, 0]) == [0, 1, 2]
    layout = _whole([(4, 4), (8, 8), (4, 8), (6, 8)], 2)
    assert [slot.offset for slot in layout.slots] == [0, 16, 80, 112]
    assert (layout.numel, layout.shard_numel, layout.padding) == (160, 80, ())


def test_ranks_that_own_less_elsewhere_come_first():
    assert balance([16, 16], [64, 0, 32]) == [1, 2]
    layout = _whole([(5, 7)], 3, [9, 9, 0])
    assert [len(layout.owned(rank)) for rank in range(3)] == [0, 0, 1]
    assert layout.padding == ((0, 96), (131, 144))


def test_one_element_on_four_ranks_belongs_to_the_first():
    layout = _layout([()], 4)
    assert [len(layout.owned(rank)) for rank in range(4)] == [1, 0, 0, 0]
    assert layout.padded_numel == 4


def test_a_world_has_at_least_one_rank():
    with pytest.raises(ValueError, match=r"^world_size must be at least 1, got 0"):
        FlatLayout((), 0)
    with pytest.raises(ValueError, match=r"^world_size must be at least 1, got 0"):
        whole_layout([], 0)
    with pytest.raises(ValueError, match=r"^alignment must be at least 1, got 0"):
        FlatLayout.of([("a", (2,))], 2, 0)


@pytest.mark.parametrize("make", [FlatLayout.of, whole_layout])
def test_numbers_that_lay_out_nothing_are_refused_by_name(make):
    for world_size in (-1, 1.5, "2", True, None):
        with pytest.raises(ValueError, match=r"^world_size must be at least 1, got "):
            make([("a", (3,))], world_size)
        with pytest.raises(ValueError, match=r"^parts must be at least 1, got "):
            make([("a", (3,))], 2, parts=world_size)
    for shape in ((-1,), (2, -3), (1.5,), ("2",)):
        with pytest.raises(ValueError, match=r"^shapes: each size of a must be an integer of at least 0, got "):
            make([("a", shape)], 2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"^rank: {rank} is outside a world of 2; ranks count from 0"):
            make([("a", (3,))], 2).interval(rank)
        with pytest.raises(ValueError, match=f"^rank: {rank} is outside a world of 2; ranks count from 0"):
            make([("a", (3,))], 2).owned(rank)


@pytest.mark.parametrize("whole", [False, True])
def test_pieces_end_where_parts_do(whole):
    """A world of 2 with 4 parts is laid out, and cut, as one of 8."""
    shapes = [("a", (300, 7)), ("b", (5,)), ("c", (33, 40)), ("d", ()), ("e", (11, 3))]
    lay_out = whole_layout if whole else functools.partial(FlatLayout.of, alignment=8)
    cut = {world_size: lay_out(shapes, world_size, parts=8 // world_size) for world_size in (1, 2, 4, 8)}
    pieces = {size: [p for rank in range(size) for p in layout.owned(rank)] for size, layout in cut.items()}
    for world_size, layout in cut.items():
        assert layout.slots == cut[8].slots
        assert (layout.padded_numel, layout.part_numel) == (cut[8].padded_numel, cut[8].shard_numel)
        assert pieces[world_size] == pieces[8]
        for rank, slot in itertools.product(range(world_size), range(len(shapes))):
            parts = [part for part in layout.cut(rank, slot) if part != (0, 0)]
            start, stop = layout.part(rank, slot)
            assert sum(last - first for first, last in parts) == stop - start
            assert not parts or (parts[0][0], parts[-1][1]) == (start, stop)
