import json
from contextlib import closing, suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.data.meta import _sha256_of_facts, dtype_for
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.tokens import TokenDataset, TokenWriter
from zeroshard.host.errors import UserError

OUTSIDE = ("../tokens.bin", "/etc/hostname", "val/../../tokens.bin", "", ".", "val//tokens.bin", "val/\\u0000")


@pytest.fixture
def folder(tmp_path):
    """250 train tokens in files of 100, and 50 of validation."""
    spec = DataSpec("synthetic", num_tokens=300, val_fraction=1 / 6)
    return prepare(spec, tmp_path / "data", shard_tokens=100)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_windows_ignore_the_borders_between_shards(sizes, data):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    dataset = TokenDataset(np.split(whole, np.cumsum(sizes)[:-1]), vocab_size=100)
    assert dataset.num_tokens == whole.size
    length = data.draw(st.integers(0, whole.size))
    start = data.draw(st.integers(0, whole.size - length))
    assert dataset.window(start, length).tolist() == whole[start : start + length].tolist()
    if length:
        starts = data.draw(st.lists(st.integers(0, whole.size - length), max_size=8))
        expected = [whole[each : each + length].tolist() for each in starts]
        assert dataset.gather(starts, length).tolist() == expected


def test_windows_outside_the_stream_are_refused():
    dataset = TokenDataset([np.arange(10, dtype=np.uint16)], 10)
    for start, length in [(-1, 2), (9, 2), (11, 0)]:
        with pytest.raises(ValueError, match=r"outside \[0, 10\)"):
            dataset.window(start, length)
    for starts in ([-1], [0, 9]):
        with pytest.raises(ValueError, match=r"outside \[0, 10\)"):
            dataset.gather(starts, 2)


def test_files_on_disk_are_little_endian_and_nothing_else(tmp_path):
    for dtype, spelling in [("uint16", "<u2"), ("uint32", "<u4")]:
        with closing(TokenWriter(tmp_path, dtype, dtype, shard_tokens=3)) as writer:
            writer.write(np.array([1, 258]))
            writer.write(np.array([3, 4, 5, 6, 7]))
            split = writer.finish()
        assert [shard.num_tokens for shard in split.shards] == [3, 3, 1]
        content = b"".join((tmp_path / shard.file).read_bytes() for shard in split.shards)
        assert content == np.array([1, 258, 3, 4, 5, 6, 7], dtype=spelling).tobytes()


def test_ids_get_the_narrowest_type_that_holds_them():
    assert dtype_for(256) == dtype_for(65_536) == "uint16"
    assert dtype_for(65_537) == "uint32"


def test_a_prepared_folder_opens_as_one_stream_per_split(folder):
    train, val = TokenDataset.open(folder), TokenDataset.open(folder, "val")
    assert (train.num_tokens, val.num_tokens, train.vocab_size) == (250, 50, 256)
    assert sorted(file.name for file in (folder / "train").iterdir()) == [
        "blocks.bin",
        *(f"tokens-0000{i}.bin" for i in range(3)),
    ]
    with pytest.raises(ValueError, match="split must be one of train, val"):
        TokenDataset.open(folder, "test")


@pytest.mark.parametrize("change", [-2, 2])
def test_a_file_of_the_wrong_size_is_named_on_opening(folder, change):
    path = folder / "train" / "tokens-00001.bin"
    path.write_bytes((path.read_bytes() + b"\0\0")[: 200 + change])
    with pytest.raises(UserError, match=rf"tokens-00001.bin has {200 + change} bytes where 200 were written"):
        TokenDataset.open(folder)
    TokenDataset.open(folder, "val")


def test_a_missing_file_is_named_on_opening(folder):
    (folder / "val" / "tokens-00000.bin").unlink()
    with pytest.raises(UserError, match=r"val/tokens-00000.bin is missing; delete the folder"):
        TokenDataset.open(folder, "val")


def test_a_folder_without_meta_is_not_prepared(tmp_path):
    with pytest.raises(UserError, match=r"holds no prepared tokens \(no meta.json\); run `zeroshard prepare` first"):
        TokenDataset.open(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda meta: "{",
        lambda meta: "[]",
        lambda meta: json.dumps(meta | {"format_version": 99}),
        lambda meta: json.dumps(meta | {"dtype": "float8"}),
        lambda meta: json.dumps(meta | {"splits": 3}),
        lambda meta: json.dumps(meta | {"block_bytes": 0}),
        lambda meta: json.dumps(meta | {"surplus": 1}),
        lambda meta: json.dumps({key: value for key, value in meta.items() if key != "source"}),
        *(lambda meta, name=name: json.dumps(meta).replace("val/tokens-00000.bin", name) for name in OUTSIDE),
    ],
)
def test_damaged_meta_is_named(folder, damage):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    del meta["sha256"]
    damaged = damage(meta)
    with suppress(ValueError, TypeError):
        facts = json.loads(damaged)
        damaged = json.dumps({**facts, "sha256": _sha256_of_facts(facts)})
    path.write_text(damaged)
    with pytest.raises(UserError, match=r"meta.json cannot be read: .*; delete the folder and prepare it again"):
        TokenDataset.open(folder)
