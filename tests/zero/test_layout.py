import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.zero import FlatLayout

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)


def _layout(shapes, world_size):
    return FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size)


@given(shapes, st.integers(1, 9))
def test_ranks_own_every_element_exactly_once(shapes, world_size):
    layout = _layout(shapes, world_size)
    owned = [0] * layout.numel
    for rank in range(world_size):
        for piece in layout.owned(rank):
            slot = layout.slots[piece.slot]
            assert piece.numel > 0
            assert piece.offset == slot.offset + piece.interval[0]
            assert layout.interval(rank)[0] <= piece.offset
            assert piece.offset + piece.numel <= layout.interval(rank)[1]
            for element in range(piece.offset, piece.offset + piece.numel):
                owned[element] += 1
    assert owned == [1] * layout.numel


@given(shapes, st.integers(1, 9))
def test_shards_are_equal_and_padding_is_less_than_one_element_a_rank(shapes, world_size):
    layout = _layout(shapes, world_size)
    assert layout.padded_numel == layout.shard_numel * world_size
    assert 0 <= layout.padded_numel - layout.numel < world_size
    assert [layout.interval(rank) for rank in range(world_size)] == [
        (rank * layout.shard_numel, (rank + 1) * layout.shard_numel) for rank in range(world_size)
    ]


@given(shapes, st.integers(1, 5))
def test_views_are_the_parameters_end_to_end(shapes, world_size):
    layout = _layout(shapes, world_size)
    flat = torch.arange(layout.padded_numel)
    views = layout.views(flat)
    assert [tuple(view.shape) for view in views] == shapes
    assert torch.equal(torch.cat([view.reshape(-1) for view in views] or [flat[:0]]), flat[: layout.numel])


def test_one_element_on_four_ranks_belongs_to_the_first():
    layout = _layout([()], 4)
    assert [len(layout.owned(rank)) for rank in range(4)] == [1, 0, 0, 0]
    assert layout.padded_numel == 4


def test_a_world_has_at_least_one_rank():
    with pytest.raises(ValueError, match="world_size: 0 ranks; give at least 1"):
        FlatLayout((), 0)
