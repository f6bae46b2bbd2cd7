"""No change of a prepared folder goes unnoticed: a block of tokens is checked when it is first read."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chats
from zeroshard.cli import main
from zeroshard.data import block_checksums
from zeroshard.data.block_checksums import BLOCK_BYTES, BlockSums
from zeroshard.data.examples.row_plan import rows_of_folder
from zeroshard.data.meta import read_meta
from zeroshard.data.prepare import prepare
from zeroshard.data.spec import DataSpec
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
    true_hash = block_checksums.xxhash.xxh3_64_intdigest

    def counted(data):
        hashed.append(len(data))
        return true_hash(data)

    monkeypatch.setattr(block_checksums.xxhash, "xxh3_64_intdigest", counted)
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
    sums, at = BlockSums(), 0
    for size in sizes:
        sums.update(content[at : at + size])
        at += size
    blocks = range(0, len(content), BLOCK_BYTES)
    assert sums.finish() == [block_checksums.xxhash.xxh3_64_intdigest(content[i : i + BLOCK_BYTES]) for i in blocks]


def test_a_folder_of_an_earlier_version_is_read_and_a_line_says_what_is_not_checked(made, tmp_path, capsys):
    folder = shutil.copytree(made / "chat", tmp_path / "old")
    meta = json.loads((folder / "meta.json").read_text())
    for name in ("sha256", "files", "block_bytes"):
        del meta[name]
    (folder / "meta.json").write_text(json.dumps(meta))
    for split in ("train", "val"):
        (folder / split / "blocks.bin").unlink()
    read_all(folder)
    assert read_meta(folder).tokens_sha256 == read_meta(made / "chat").tokens_sha256
    assert main(["prepare", "--data.dir", str(folder), "--verify"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("undamaged"), err.count("was prepared by an earlier version")) == (1, 1)
    flip(folder / "train" / "tokens-00000.bin")
    flip(folder / "train" / "counts.bin")
    assert main(["prepare", "--data.dir", str(folder), "--verify"]) == 3
    assert [line.split(" is damaged")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{folder}/train/{name}" for name in ("tokens-00000.bin", "counts.bin")
    ]
    with pytest.raises(UserError, match=r"counts\.bin is damaged"):
        read_all(folder)
    assert main(["prepare", "--data.dir", str(tmp_path / "none"), "--verify"]) == 2
