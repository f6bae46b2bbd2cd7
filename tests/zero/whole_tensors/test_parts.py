import functools
import itertools

import pytest

from zero.layouts import require_whole_numbers
from zeroshard.zero import FlatLayout
from zeroshard.zero.whole_tensors.layout import whole_layout


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
            cuts = [layout.slots[slot].within(*part) for part in layout.parts_of(rank)]
            parts = [part for part in cuts if part != (0, 0)]
            start, stop = layout.slots[slot].within(*layout.interval(rank))
            assert sum(last - first for first, last in parts) == stop - start
            assert not parts or (parts[0][0], parts[-1][1]) == (start, stop)


def test_numbers_that_lay_out_nothing_are_refused_by_name():
    """`require_whole_numbers` asserts it."""
    require_whole_numbers(FlatLayout.of, ["alignment", "parts"])
