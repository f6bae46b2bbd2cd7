import mmap

import numpy as np
import pytest

from zeroshard.data import mapped_pages
from zeroshard.data.mapped_pages import MappedPages
from zeroshard.data.tokens import TokenDataset


class Told:
    """In the place of a map: which of its bytes the kernel was told of."""

    def __init__(self, num_bytes, fails=False):
        self._num_bytes, self._fails, self.bytes, self.begins = num_bytes, fails, set(), []

    def madvise(self, option, start, length):
        assert option == mmap.MADV_WILLNEED
        assert start % mmap.PAGESIZE == 0
        assert start + length <= self._num_bytes
        self.begins.append(start)
        self.bytes |= set(range(start, start + length))
        if self._fails:
            raise OSError("no advice is taken")


@pytest.fixture
def mapped(tmp_path):
    """A file of 5 pages and a bit, mapped behind a header of a page and 7 tokens; token i is i."""
    header, num_tokens = mmap.PAGESIZE + 14, 2 * mmap.PAGESIZE
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(header) + np.arange(num_tokens, dtype=np.uint16).tobytes())
    return np.memmap(path, np.uint16, "r", header, (num_tokens,))


@pytest.mark.parametrize("fails", [False, True])
def test_the_pages_that_a_window_lies_in_are_told_of_and_no_others(mapped, fails):
    for array, first in ((mapped, 0), (mapped[100:], 100)):
        pages = MappedPages(array)
        for start, length in ((0, 1), (2000, 100), (2041, 1), (mapped.size - first - 3, 50)):
            pages._pages = told = Told(len(mapped._mmap), fails)
            pages.read_ahead(np.array([2 * start]), np.array([2 * length]))
            begin = 14 + 2 * (first + start)  # numpy's map begins with a page, here the header's second
            end = min(begin + 2 * length, 14 + mapped.nbytes)
            assert set(range(begin, end)) <= told.bytes
            assert len(told.begins) == 1
            assert min(told.bytes) > begin - mmap.PAGESIZE


def test_a_batch_asks_for_its_windows_in_their_own_files(mapped):
    dataset = TokenDataset([np.arange(10, dtype=np.uint16), mapped, mapped], 2**16)
    tolds = [Told(len(mapped._mmap)) for _ in range(2)]
    for pages, told in zip(dataset._pages[1:], tolds, strict=True):
        pages._pages = told
    dataset.gather([0, 3], 5)  # which lie in memory
    assert not tolds[0].begins + tolds[1].begins
    dataset.gather([10 + 5000, 10 + mapped.size + 20], 4)
    assert [told.begins for told in tolds] == [[(14 + 10000) // mmap.PAGESIZE * mmap.PAGESIZE], [0]]
    dataset.gather([10 + mapped.size - 1], 100)  # continues in the next file, of which nothing is told
    assert [len(told.begins) for told in tolds] == [2, 1]
    assert dataset.gather([10 + mapped.size - 1], 2).tolist() == [[mapped[-1], mapped[0]]]


def test_advice_is_taken_where_there_is_any_and_left_out_where_not(mapped, monkeypatch):
    everything = np.array([0]), np.array([mapped.nbytes])
    MappedPages(mapped).read_ahead(*everything)
    assert MappedPages(mapped)._pages is mapped._mmap
    MappedPages(np.arange(3)).read_ahead(*everything)
    monkeypatch.setattr(mapped_pages, "_WILL_NEED", None)
    MappedPages(mapped).read_ahead(*everything)
    assert MappedPages(mapped)._pages is None
