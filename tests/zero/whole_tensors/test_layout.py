import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.layouts import SHAPES, named, require_one_owner, require_whole_numbers
from zeroshard.zero.whole_tensors.layout import WHOLE_ALIGNMENT, balance, whole_layout


def _whole(shapes, world_size, loads=()):
    return whole_layout(named(shapes), world_size, loads)


@given(SHAPES, st.integers(1, 9))
def test_ranks_own_every_element_exactly_once(shapes, world_size):
    """`require_one_owner` asserts it."""
    require_one_owner(_whole(shapes, world_size))


@given(SHAPES, st.integers(1, 9))
def test_whole_tensors_lie_in_one_shard_in_their_shapes(shapes, world_size):
    layout = _whole(shapes, world_size)
    pieces = [piece for rank in range(world_size) for piece in layout.owned(rank)]
    assert sorted(pieces, key=lambda piece: piece.slot) == list(layout.pieces(0, layout.padded_numel))
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


def test_numbers_that_lay_out_nothing_are_refused_by_name():
    """`require_whole_numbers` asserts it."""
    require_whole_numbers(whole_layout, ["parts"])
