import hashlib
import json
import math
from pathlib import Path

import pytest

from zeroshard.data import prepare as module
from zeroshard.data.meta import read_meta
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.spec import data_dir
from zeroshard.data.split import validates
from zeroshard.data.tokenizer import load_tokenizer
from zeroshard.data.tokens import TokenDataset, verify
from zeroshard.host.errors import UserError

TEXT = "".join(f"line {i} of the text\n" for i in range(500))


def ids(folder, split):
    dataset = TokenDataset.open(folder, split)
    return dataset.window(0, dataset.num_tokens)


def text(folder, split):
    return load_tokenizer(folder).decode(ids(folder, split))


def files(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.fixture
def one_file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return DataSpec("text", (str(path),))


@pytest.fixture
def many_files(tmp_path):
    (tmp_path / "src").mkdir()
    for i in range(200):
        (tmp_path / "src" / f"{i:03d}.md").write_text(f"document {i:03d} ends here" + "\n" * (i % 2))
    return DataSpec("text", (str(tmp_path / "src"),))


def validates_in(spec, line):
    """Whether the document with that line validates."""
    path = next(path for path in Path(spec.paths[0]).iterdir() if path.read_text().rstrip("\n") == line)
    return validates((path.read_text(),), 0.1)


def test_one_document_is_cut_in_two_and_nothing_is_lost(one_file, tmp_path):
    folder = prepare(one_file, tmp_path / "data")
    train, val = text(folder, "train"), text(folder, "val")
    assert train + val == TEXT
    assert train.endswith("\n")
    assert len(val) == pytest.approx(0.1 * len(TEXT), abs=30)


@pytest.mark.redundant
def test_many_documents_go_whole_to_one_side_each_ending_its_line(many_files, tmp_path):
    folder = prepare(many_files, tmp_path / "data")
    train, val = (text(folder, split).splitlines() for split in ("train", "val"))
    assert sorted(train + val) == [f"document {i:03d} ends here" for i in range(200)]
    assert not set(train) & set(val)
    assert val == [line for line in sorted(train + val) if validates_in(many_files, line)]
    assert 10 < len(val) < 30


def test_a_tokenizer_never_learns_from_validation(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT + "zqzq\n" * (len(TEXT) // 100))
    folder = prepare(DataSpec("text", (str(tmp_path / "book.txt"),), "bpe:300"), tmp_path / "data")
    assert "zq" in text(folder, "val")
    assert "zq" not in text(folder, "train")
    tokenizer = load_tokenizer(folder)
    assert not [id_ for id_ in range(300) if "zq" in tokenizer.decode([id_])]


def test_meta_tells_what_was_read(one_file, tmp_path):
    folder = prepare(one_file, tmp_path / "data", shard_tokens=1000)
    meta = read_meta(folder)
    assert meta.source.num_bytes == len(TEXT)
    assert meta.source.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (meta.tokenizer, meta.vocab_size, meta.dtype) == ("bytes", 256, "uint16")
    assert sum(shard.num_tokens for shard in meta.splits["train"].shards) == meta.splits["train"].num_tokens
    assert len(meta.splits["train"].shards) == math.ceil(meta.splits["train"].num_tokens / 1000)
    assert verify(folder) == ()


def test_files_give_the_same_bytes_for_any_number_of_processes(many_files, one_file, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroshard.data.encode.TASK_BYTES", 500)
    spec = DataSpec("text", (*many_files.paths, *one_file.paths), "bpe:270")
    ours = [files(prepare(spec, tmp_path / str(num), num_workers=num)) for num in (1, 2)]
    assert ours[0] == ours[1]


def test_a_tokenizer_is_trained_on_so_much_text_at_the_most(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRAINING_BYTES", 1000)
    texts, seen = (f"text number {number}" for number in range(999)), []
    module.tokenizer_of("bpe:260", (seen.append(text) or text for text in texts), tmp_path)
    assert 1000 <= sum(map(len, seen)) < 1100


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokenizer": "bpe:300"}, "tokenizer 'bytes' where 'bpe:300' is asked for"),
        ({"val_fraction": 0.2}, r"val_fraction 0\.1 where 0\.2 is asked for"),
        ({"max_tokens": 50}, "max_tokens 0 where 50 is asked for"),
        ({"source": "synthetic", "paths": ()}, "source 'text' where 'synthetic' is asked for"),
    ],
)
def test_a_folder_of_another_spec_is_refused_with_the_difference(one_file, tmp_path, change, what):
    folder = prepare(one_file, tmp_path / "data")
    with pytest.raises(UserError, match=f"was prepared with .*{what}.*; name another folder or delete this one"):
        prepare(DataSpec(**({"source": "text", "paths": one_file.paths} | change)), folder)


def test_the_same_text_under_another_name_is_the_same(one_file, tmp_path):
    folder = prepare(one_file, tmp_path / "data")
    (tmp_path / "copy.txt").write_text(TEXT)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare(DataSpec("text", (str(tmp_path / "copy.txt"),)), folder) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_not_prepared_data_is_left_alone(one_file, tmp_path, is_file):
    out = tmp_path / "precious"
    if is_file:
        out.write_text("mine")
    else:
        (out / "sub").mkdir(parents=True)
    with pytest.raises(UserError, match=r"precious exists and is not prepared data \(no meta\.json\)"):
        prepare(one_file, out)
    assert out.exists()


def test_a_failure_leaves_nothing(one_file, tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"fine\n" * 100 + b"\xff")
    out = tmp_path / "out" / "data"
    with pytest.raises(UserError, match=r"binary\.txt is not UTF-8 text: invalid start byte at offset 500"):
        prepare(DataSpec("text", (*one_file.paths, str(tmp_path / "binary.txt"))), out)
    assert list(out.parent.iterdir()) == []


def test_a_source_that_changes_while_it_is_read_is_refused(one_file, tmp_path):
    def grow(told):
        (tmp_path / "book.txt").write_text(TEXT + "more\n")

    with pytest.raises(UserError, match="changed while it was read; try again"):
        prepare(one_file, tmp_path / "data", on_progress=grow)
    assert not (tmp_path / "data").exists()


def test_a_place_without_permission_is_named(one_file, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.dir: cannot write .*; name a folder that can be written"):
        prepare(one_file, tmp_path / "file" / "data")


@pytest.mark.redundant
def test_max_tokens_bounds_both_splits_together(one_file, many_files, tmp_path):
    for number, paths in enumerate((one_file.paths, many_files.paths)):
        folder = prepare(DataSpec("text", paths, max_tokens=500, val_fraction=0.2), tmp_path / str(number))
        assert (ids(folder, "train").size, ids(folder, "val").size) == (400, 100)
        assert not set(text(folder, "train").splitlines()[:-1]) & set(text(folder, "val").splitlines()[:-1])


def test_synthetic_tokens_validate_on_the_end_of_the_walk(tmp_path):
    folder = prepare(DataSpec("synthetic", vocab_size=70_000, num_tokens=1000, seed=3), tmp_path / "data")
    assert (ids(folder, "train").size, ids(folder, "val").size) == (900, 100)
    assert read_meta(folder).dtype == "uint32"
    assert ids(folder, "train").max() > 65_535


def test_no_validation_is_a_choice(one_file, tmp_path):
    folder = prepare(DataSpec("text", one_file.paths, val_fraction=0.0), tmp_path / "all")
    assert text(folder, "train") == TEXT
    assert TokenDataset.open(folder, "val").num_tokens == 0


def test_the_default_folder_is_named_after_the_spec():
    assert str(data_dir(DataSpec())) == "data/python-stdlib-bytes"
    assert str(data_dir(DataSpec(tokenizer="bpe:1024"), "d")) == "d/python-stdlib-bpe-1024"
    specs = [
        DataSpec("text", ("a b.txt",)),
        DataSpec("text", ("x/a b.txt",)),
        DataSpec("text", ("a b.txt",), val_fraction=0.2),
        DataSpec(max_tokens=5),
        DataSpec("synthetic"),
        DataSpec("synthetic", seed=1),
    ]
    names = [data_dir(spec).name for spec in specs]
    assert len(set(names)) == len(specs)
    assert names[0].startswith("text-a-b-bytes-")


def test_memory_stays_flat_as_the_corpus_grows(tmp_path, monkeypatch):
    """No more than a task is held at a time, however large the file."""
    monkeypatch.setattr("zeroshard.data.documents.CHUNK_BYTES", 4096)
    monkeypatch.setattr("zeroshard.data.encode.TASK_BYTES", 4096)
    (tmp_path / "big.txt").write_text(TEXT * 20)
    longest, write = [0], module.TokenWriter.write

    def watch(self, ids):
        longest[0] = max(longest[0], ids.size)
        write(self, ids)

    monkeypatch.setattr(module.TokenWriter, "write", watch)
    folder = prepare(DataSpec("text", (str(tmp_path / "big.txt"),)), tmp_path / "data")
    assert 0 < longest[0] <= 3 * 4096
    assert json.loads((folder / "meta.json").read_text())["source"]["num_bytes"] == 20 * len(TEXT)
