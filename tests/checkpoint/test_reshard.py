import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.checkpoint.reshard import Copy, check_tiling, plan_copies


@st.composite
def tilings(draw):
    """A number of elements and a way to cut them into pieces, in any order, some of them empty."""
    numel = draw(st.integers(0, 60))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=8))), numel]
    pieces = list(itertools.pairwise(cuts))
    return numel, draw(st.permutations(pieces))


@given(tilings(), st.data())
def test_every_wanted_interval_is_filled_with_exactly_its_own_elements(tiling, data):
    numel, pieces = tiling
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    target = [None] * (stop - start)
    for copy in plan_copies(pieces, (start, stop)):
        source = list(range(*pieces[copy.piece]))
        assert copy.length > 0
        for offset in range(copy.length):
            assert target[copy.target_offset + offset] is None
            target[copy.target_offset + offset] = source[copy.source_offset + offset]
    assert target == list(range(start, stop))


@given(tilings())
def test_a_way_to_cut_a_tensor_tiles_it(tiling):
    """`check_tiling` asserts it."""
    numel, pieces = tiling
    check_tiling(pieces, numel)


@given(tilings(), st.data())
def test_a_piece_that_is_lost_or_there_twice_breaks_the_tiling(tiling, data):
    numel, pieces = tiling
    real = [piece for piece in pieces if piece[0] < piece[1]]
    if not real:
        return
    piece = data.draw(st.sampled_from(real))
    rest = [other for other in real if other != piece]
    with pytest.raises(ValueError, match=r"in no piece|the pieces end at"):
        check_tiling(rest, numel)
    with pytest.raises(ValueError, match="in two pieces"):
        check_tiling([*real, piece], numel)


def test_a_gap_is_named():
    with pytest.raises(ValueError, match=r"elements \[4, 6\) were not saved"):
        plan_copies([(0, 4), (6, 9)], (2, 8))
    with pytest.raises(ValueError, match=r"elements \[9, 11\) were not saved"):
        plan_copies([(0, 9)], (8, 11))


def test_overlapping_replicas_are_read_once():
    assert plan_copies([(0, 4), (0, 8), (2, 5)], (0, 8)) == [Copy(1, 0, 8, 0)]
