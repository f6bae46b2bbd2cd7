"""Examples in a folder: the same from the same rows, split by content, refused in a line."""

import gzip
import json

import numpy as np
import pytest

import chats
from zeroshard.data.examples.row_plan import rows_of_length
from zeroshard.data.examples.store import Examples
from zeroshard.data.meta import read_meta
from zeroshard.data.prepare import prepare
from zeroshard.data.spec import DataSpec
from zeroshard.data.tokenizer import ByteTokenizer
from zeroshard.data.tokens import verify
from zeroshard.host.errors import UserError


def spec_of(path, **changes):
    return DataSpec(**{"source": "text", "paths": (str(path),), "format": "chat", "template": "chatml", **changes})


def texts_of(folder, split):
    found = Examples(folder, split)
    return {
        ByteTokenizer().decode(found.tokens.window(int(begin), int(end - begin)))
        for begin, end in zip(found.begins, found.ends, strict=True)
    }


@pytest.fixture
def prepared(tmp_path):
    path = chats.write_rows(tmp_path / "rows.jsonl", chats.conversations(200))
    return prepare(spec_of(path), tmp_path / "out")


def test_a_folder_holds_every_example_once(prepared):
    meta = read_meta(prepared)
    assert sum(each.num_examples for each in meta.examples.values()) == meta.source.num_documents == 200
    assert 5 < meta.examples["val"].num_examples < 40
    assert verify(prepared) == ()


@pytest.mark.redundant
def test_examples_validate_by_their_content(prepared, tmp_path):
    rows = chats.conversations(200)
    some = chats.write_rows(tmp_path / "some.jsonl", rows[:50:-1])
    other = prepare(spec_of(some), tmp_path / "other")
    assert texts_of(other, "val") <= texts_of(prepared, "val")
    assert texts_of(other, "train") <= texts_of(prepared, "train")


def test_of_few_examples_some_train_and_some_validate(tmp_path):
    rows = chats.pairs(3)
    path = chats.write_rows(tmp_path / "rows.jsonl", [*rows, rows[0]])
    out = prepare(spec_of(path, format="prompt", template=""), tmp_path / "out")
    train, val = texts_of(out, "train"), texts_of(out, "val")
    assert (len(train), len(val)) == (2, 1)
    assert not train & val
    one = chats.write_rows(tmp_path / "one.jsonl", rows[:1])
    with pytest.raises(UserError, match="cannot both train and validate"):
        prepare(spec_of(one, format="prompt", template=""), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.redundant
def test_rows_of_every_kind_of_table_give_the_same_tokens(prepared, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = chats.conversations(200)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"id": 7, **row}) + "\n\n" for row in rows)
    parquet.write_table(pyarrow.table({"messages": [row["messages"] for row in rows]}), tmp_path / "rows.parquet")
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows, indent=1).encode()))
    for name in ("rows.jsonl.gz", "rows.json.gz", "rows.parquet"):
        other = prepare(spec_of(tmp_path / name), tmp_path / name[5:])
        assert read_meta(other).tokens_sha256 == read_meta(prepared).tokens_sha256


@pytest.mark.redundant
def test_a_folder_is_used_again_for_the_same_choices_alone(prepared, tmp_path):
    rows, own = tmp_path / "rows.jsonl", tmp_path / "own.jinja"
    assert prepare(spec_of(rows), prepared) == prepared
    own.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    for changed in (spec_of(rows, template=str(own)), spec_of(rows, val_fraction=0.2), DataSpec("text", (str(rows),))):
        with pytest.raises(UserError, match="was prepared with"):
            prepare(changed, prepared)


def test_a_row_is_cut_or_left_out(tmp_path):
    rows = [{"prompt": "p" * n, "completion": "cc"} for n in (1, 3, 8, 9, 30)]
    path = chats.write_rows(tmp_path / "rows.jsonl", rows)
    folder = prepare(spec_of(path, format="prompt", template="", val_fraction=0.0), tmp_path / "out")
    examples = Examples(folder, "train")
    cut = rows_of_length(examples, 8, split="train")
    assert (cut.num_cut, cut.num_dropped, cut.num_targets.tolist()) == (1, 2, [3, 3, 1])
    assert "1 are cut to seq_len = 8 and 2 are left out" in cut.said("train")
    assert rows_of_length(examples, 64, split="train").said("train") == ""
    chats.write_rows(path, rows[2:])
    folder = prepare(spec_of(path, format="prompt", template="", val_fraction=0.0), tmp_path / "long")
    with pytest.raises(UserError, match="no example of the train split has a target within 2 tokens"):
        rows_of_length(Examples(folder, "train"), 2, split="train")


def test_targets_are_what_follows_where_it_counts(tmp_path):
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "x", "completion": "y"}]
    path = chats.write_rows(tmp_path / "rows.jsonl", rows)
    folder = prepare(spec_of(path, format="prompt", template="", val_fraction=0.0), tmp_path / "out")
    rows = rows_of_length(Examples(folder, "train"), 5, split="train")
    tokens, targets = rows.read(np.arange(2))
    a, b, c, d, end, x, y = *b"abcd\n", *b"xy"
    assert tokens.tolist() == [[a, b, c, d, 0], [x, y, 0, 0, 0]]
    no = -100
    assert targets.tolist() == [[no, c, d, end, no], [y, end, no, no, no]]
