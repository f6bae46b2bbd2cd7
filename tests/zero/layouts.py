"""What every layout of a flat buffer does."""

import pytest
from hypothesis import strategies as st

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)


def named(shapes):
    """Names for the parameters of these shapes."""
    return [(f"p{i}", shape) for i, shape in enumerate(shapes)]


def require_one_owner(layout):
    """Each element of the buffer is of one rank's piece, or padding."""
    owned = [0] * layout.padded_numel
    for start, stop in layout.padding:
        assert start < stop
        owned[start:stop] = [1] * (stop - start)
    for rank in range(layout.world_size):
        for piece in layout.owned(rank):
            slot = layout.slots[piece.slot]
            assert piece.numel > 0
            assert piece.offset == slot.offset + piece.interval[0]
            assert layout.interval(rank)[0] <= piece.offset
            assert piece.offset + piece.numel <= layout.interval(rank)[1]
            for element in range(piece.offset, piece.offset + piece.numel):
                owned[element] += 1
    assert owned == [1] * layout.padded_numel


def require_whole_numbers(make, counts):
    """``make(shapes, world_size, ...)`` refuses what is no number of ranks, and none of its other ``counts``."""
    for given in (0, -1, 1.5, "2", True, None):
        with pytest.raises(ValueError, match=r"^world_size must be at least 1, got "):
            make([("a", (3,))], given)
        for count in counts:
            with pytest.raises(ValueError, match=f"^{count} must be at least 1, got "):
                make([("a", (3,))], 2, **{count: given})
    for shape in ((-1,), (2, -3), (1.5,), ("2",)):
        with pytest.raises(ValueError, match=r"^shapes: each size of a must be an integer of at least 0, got "):
            make([("a", shape)], 2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"^rank: {rank} is outside a world of 2; ranks count from 0"):
            make([("a", (3,))], 2).interval(rank)
        with pytest.raises(ValueError, match=f"^rank: {rank} is outside a world of 2; ranks count from 0"):
            make([("a", (3,))], 2).owned(rank)
