"""Sources are drawn by weight, each of their rows once an epoch, alike wherever a run begins to look."""

import numpy as np
import pytest

from zeroshard.data.base import TextRows
from zeroshard.data.mixing import JoinedRows, Mixture
from zeroshard.data.tokens import TokenDataset

SEQ_LEN = 4
SIZES = (50, 7, 400)
WEIGHTS = (3.0, 1.0, 6.0)


def joined(sizes=SIZES):
    """Sources of as many rows, whose ids say which source they are of."""
    streams = [np.full(size * SEQ_LEN + 1, source, np.uint16) for source, size in enumerate(sizes)]
    return JoinedRows([TextRows(TokenDataset([stream], 9), SEQ_LEN) for stream in streams])


def test_sources_have_their_share_of_rows():
    mixture = Mixture(joined(), WEIGHTS, seed=1)
    rows = mixture(np.arange(20_000))
    source_of = np.searchsorted(np.cumsum(SIZES), rows, side="right")
    shares = np.bincount(source_of) / 20_000
    assert shares == pytest.approx([0.3, 0.1, 0.6], abs=0.015)  # four standard deviations
    assert mixture.counts(20_000).tolist() == np.bincount(source_of).tolist()
    assert mixture.tokens(20_000) == (np.bincount(source_of) * SEQ_LEN).tolist()


def test_a_source_gives_each_row_once_an_epoch():
    rows = Mixture(joined(), WEIGHTS, seed=3)(np.arange(5_000))
    for source, (first, size) in enumerate(zip((0, 50, 57), SIZES, strict=True)):
        own = rows[(rows >= first) & (rows < first + size)] - first
        for epoch in range(own.size // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size)), source


@pytest.mark.parametrize("first", [0, 1, 4095, 4096, 9000, 1_300_000])
def test_rows_are_the_same_whoever_asks_for_them_first(first):
    """What a run that resumes there takes is what one that came there would; the counting has blocks of 4,096."""
    positions = np.arange(first, first + 40)
    through = Mixture(joined(), WEIGHTS, seed=5)
    for begin in range(0, min(first, 9000), 3000):
        through(np.arange(begin, begin + 3000))
    whole = through(positions)
    assert np.array_equal(whole, Mixture(joined(), WEIGHTS, seed=5)(positions))
    parts = [Mixture(joined(), WEIGHTS, seed=5)(positions[begin::4]) for begin in (3, 1, 0, 2)]
    assert sorted(np.concatenate(parts).tolist()) == sorted(whole.tolist())
    assert not np.array_equal(whole, Mixture(joined(), WEIGHTS, seed=6)(positions))


def test_rows_are_read_from_their_sources_in_the_order_asked_for():
    rows = joined()
    wanted = np.array([60, 3, 52, 456, 0])
    tokens, targets = rows.read(wanted)
    assert tokens[:, 0].tolist() == targets[:, -1].tolist() == [2, 0, 1, 2, 0]
    assert rows.targets_in(wanted).tolist() == rows.inputs_in(wanted).tolist() == [SEQ_LEN] * 5
    assert rows.num_rows == sum(SIZES)


@pytest.mark.parametrize(("num_rows", "counts"), [(10, [3, 1, 6]), (3, [1, 1, 2]), (1000, [50, 7, 400])])
def test_an_evaluation_has_rows_of_each_source_by_its_weight(num_rows, counts):
    chosen = Mixture(joined(), WEIGHTS, seed=0).evenly(num_rows)
    source_of = np.searchsorted(np.cumsum(SIZES), chosen, side="right")
    assert np.bincount(source_of).tolist() == counts
    assert np.unique(chosen).size == chosen.size
