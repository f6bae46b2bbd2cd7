"""Pages of a token file are fetched together; no change of a prepared folder goes unnoticed."""

import mmap
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chats
from zeroshard.cli import main
from zeroshard.data import token_shard
from zeroshard.data.examples.row_plan import rows_of_folder
from zeroshard.data.prepare import prepare
from zeroshard.data.spec import DataSpec
from zeroshard.data.token_shard import BLOCK_BYTES, FileSums, TokenShard
from zeroshard.data.tokenizer import load_tokenizer
from zeroshard.data.tokens import TokenDataset, verify
from zeroshard.host.errors import UserError

PER_BLOCK = BLOCK_BYTES // 2  # tokens of two bytes


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`chat`: conversations, with tokenizer, ends and template; `walk`: tokens in files of several blocks."""
    folder = tmp_path_factory.mktemp("made")
    rows = chats.write_rows(folder / "rows.jsonl", chats.conversations(80))
    tokenizer = chats.write_tokenizer(folder / "model", "{% for m in messages %}{{ m.content }}|{% endfor %}")
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    prepare(DataSpec("text", (str(rows),), f"json:{tokenizer}", format="chat"), folder / "chat")
    prepare(DataSpec("synthetic", num_tokens=300_000), folder / "walk", shard_tokens=4 * PER_BLOCK + 7)
    return folder


def flip(path, place=-3):
    """Change one bit; the file keeps its size."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def read_all(folder):
    """Read a prepared folder as a run does."""
    load_tokenizer(folder)
    for split in ("train", "val"):
        rows = rows_of_folder(folder, split, 16)
        rows.read(np.arange(rows.num_rows))


def test_no_change_that_keeps_sizes_is_read(made, tmp_path):
    names = sorted(str(path.relative_to(made / "chat")) for path in (made / "chat").rglob("*") if path.is_file())
    assert len(names) == 2 * len(["blocks", "counts", "ends", "tokens"]) + 6
    read_all(made / "chat")
    assert verify(made / "chat") == ()
    for name in names:
        folder = shutil.copytree(made / "chat", tmp_path / name.replace("/", "-"))
        place = (folder / name).read_text().index('"vocab_size"') + 15 if name == "meta.json" else -3
        flip(folder / name, place)
        with pytest.raises(UserError, match=rf"data\.dir: .*{name}.* (is damaged|its own checksum).*prepare it again"):
            read_all(folder)
        assert main(["prepare", "--data.dir", str(folder), "--verify"]) == 3


def test_a_block_is_checked_when_it_is_first_read_and_never_again(made, tmp_path, monkeypatch):
    folder, hashed = shutil.copytree(made / "walk", tmp_path / "walk"), []
    true_hash = token_shard.xxhash.xxh3_64_intdigest

    def counted(data):
        hashed.append(len(data))
        return true_hash(data)

    monkeypatch.setattr(token_shard.xxhash, "xxh3_64_intdigest", counted)
    flip(folder / "train" / "tokens-00001.bin", 2 * BLOCK_BYTES + 5)
    tokens = TokenDataset.open(folder)
    whole, second = TokenDataset.open(made / "walk"), 4 * PER_BLOCK + 7  # where the second file begins
    assert tokens.gather([0, 5, PER_BLOCK - 4], 9).tolist() == whole.gather([0, 5, PER_BLOCK - 4], 9).tolist()
    assert len(hashed) == 2 * 2
    tokens.gather([9, PER_BLOCK + 9], 9)
    tokens.window(second - 3, 6)  # the last block of one file, of seven tokens, and the first of the next
    assert hashed[4:] == [14, BLOCK_BYTES]
    for read in (lambda: tokens.gather([second + 3 * PER_BLOCK - 1], 2), lambda: tokens.window(second, 3 * PER_BLOCK)):
        with pytest.raises(UserError, match=rf"tokens-00001\.bin is damaged: bytes from {2 * BLOCK_BYTES:,} on"):
            read()
    tokens.window(second + 3 * PER_BLOCK, 9)
    TokenDataset.open(folder, "val").window(0, 9)


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6))
def test_sums_do_not_depend_on_the_pieces_in_which_a_file_is_written(sizes):
    content = np.arange(sum(sizes), dtype=np.uint32).astype(np.uint8).tobytes()
    sums, at = FileSums(), 0
    for size in sizes:
        sums.update(content[at : at + size])
        at += size
    blocks = range(0, len(content), BLOCK_BYTES)
    assert sums.finish()[1] == [token_shard.xxhash.xxh3_64_intdigest(content[i : i + BLOCK_BYTES]) for i in blocks]


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
        shard = TokenShard(array)
        for start, length in ((0, 1), (2000, 100), (2041, 1), (mapped.size - first - 3, 50)):
            shard._pages = told = Told(len(mapped._mmap), fails)
            shard.read_ahead(start, length)
            begin = 14 + 2 * (first + start)  # numpy's map begins with a page, here the header's second
            end = min(begin + 2 * length, 14 + mapped.nbytes)
            assert set(range(begin, end)) <= told.bytes
            assert len(told.begins) == 1
            assert min(told.bytes) > begin - mmap.PAGESIZE


def test_a_batch_asks_for_its_windows_in_their_own_files(mapped):
    dataset = TokenDataset([np.arange(10, dtype=np.uint16), mapped, mapped], 2**16)
    tolds = [Told(len(mapped._mmap)) for _ in range(2)]
    for shard, told in zip(dataset._shards[1:], tolds, strict=True):
        shard._pages = told
    dataset.gather([0, 3], 5)  # which lie in memory
    assert not tolds[0].begins + tolds[1].begins
    dataset.gather([10 + 5000, 10 + mapped.size + 20], 4)
    assert [told.begins for told in tolds] == [[(14 + 10000) // mmap.PAGESIZE * mmap.PAGESIZE], [0]]
    dataset.gather([10 + mapped.size - 1], 100)  # continues in the next file, of which nothing is told
    assert [len(told.begins) for told in tolds] == [2, 1]
    assert dataset.gather([10 + mapped.size - 1], 2).tolist() == [[mapped[-1], mapped[0]]]


def test_blocks_that_will_be_checked_are_told_of_whole_and_only_once(mapped):
    size, place, content = 2 * mmap.PAGESIZE, mmap.PAGESIZE + 10, mapped.tobytes()
    hashes = [token_shard.xxhash.xxh3_64_intdigest(content[at : at + size]) for at in range(0, len(content), size)]
    shard = TokenShard(mapped, np.array(hashes, token_shard.SUM), size)
    for told_bytes in (14 + size, 14 + 20 + 8):  # from the page in which the block begins, then from the row's
        shard._pages = told = Told(len(mapped._mmap))
        shard.read_ahead(place, 4)
        assert len(told.bytes) == told_bytes
        assert shard.read(place, 4).tolist() == mapped[place : place + 4].tolist()


def test_advice_is_taken_where_there_is_any_and_left_out_where_not(mapped, monkeypatch):
    TokenShard(mapped).read_ahead(0, mapped.size)
    assert TokenShard(mapped)._pages is mapped._mmap
    TokenShard(np.arange(3)).read_ahead(0, 3)
    monkeypatch.setattr(token_shard, "_WILL_NEED", None)
    TokenShard(mapped).read_ahead(0, mapped.size)
    assert TokenShard(mapped)._pages is None
