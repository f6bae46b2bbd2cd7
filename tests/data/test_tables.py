from contextlib import nullcontext

import pytest

import small_tables as made
from web import serve
from zeroshard.data import tables as module
from zeroshard.data.files import facts_of
from zeroshard.data.tables import PartReader, Tables, count_documents, is_table
from zeroshard.host.errors import UserError


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 700)


@pytest.mark.parametrize("kind", made.KINDS)
def test_parts_together_hold_every_document_once_and_in_order(tmp_path, small_parts, kind):
    texts = made.documents(200)
    tables = made.tables_of(made.write_table(tmp_path / f"a.{kind}", texts))
    parts = made.read_all(tables)
    assert len([part for part in parts if part]) > 5
    assert [text for part in parts for text in part] == texts


@pytest.mark.redundant
@pytest.mark.parametrize("kind", made.KINDS)
def test_a_part_is_the_same_whatever_was_read_before(tmp_path, small_parts, kind):
    texts = made.documents(120)
    tables = made.tables_of(*(made.write_table(tmp_path / f"{name}.{kind}", texts) for name in "ab"))
    in_order = made.read_all(tables)
    parts = list(tables.parts())
    for places in (range(len(parts) - 1, -1, -1), [3, 0, 3, 5, len(parts) - 1, 1, 2]):
        reader = PartReader()
        assert [list(reader.texts(parts[place])) for place in places] == [in_order[place] for place in places]
        reader.close()


def test_a_line_longer_than_a_part_is_one_document(tmp_path, small_parts):
    texts = ["short", "x" * 5000, "last"]
    for kind in ("jsonl", "jsonl.gz"):
        tables = made.tables_of(made.write_table(tmp_path / f"a.{kind}", texts))
        assert [text for part in made.read_all(tables) for text in part] == texts


def test_empty_rows_are_no_documents(tmp_path):
    for kind in ("parquet", "jsonl"):
        tables = made.tables_of(made.write_table(tmp_path / f"a.{kind}", ["one", "", None, "two"]))
        assert made.read_all(tables) == [["one", "two"]]


def test_another_column_may_hold_the_text(tmp_path):
    for kind in made.KINDS:
        path = made.write_table(tmp_path / f"a.{kind}", ["one", "two"], column="content")
        assert [t for part in made.read_all(made.tables_of(path, column="content")) for t in part] == ["one", "two"]


def test_a_column_that_is_not_there_is_refused_and_the_others_named(tmp_path):
    path = made.write_table(tmp_path / "a.parquet", ["one"], column="content")
    with pytest.raises(UserError, match=r"data\.column: .*no column 'text'; name one .* it has id, content"):
        list(made.tables_of(path).parts())
    with pytest.raises(UserError, match=r"data\.column: 'id' of .* is int64, not text"):
        list(made.tables_of(path, column="id").parts())


@pytest.mark.parametrize("kind", made.KINDS)
def test_documents_are_counted_as_far_as_is_asked(tmp_path, small_parts, kind):
    tables = made.tables_of(made.write_table(tmp_path / f"a.{kind}", ["", *made.documents(50)]))
    assert [count_documents(tables, at_most) for at_most in (1, 49, 50, 51)] == [1, 49, 50, 50]


def test_what_is_a_table_is_told_by_its_name():
    assert all(is_table(name) for name in ("a.parquet", "A.JSONL", "https://x/y.jsonl.zst?download=true"))
    assert not any(is_table(name) for name in ("a.txt", "parquet", "https://x/a.orc"))


@pytest.mark.parametrize(("kind", "between"), [("csv", ","), ("TSV", "\t")])
def test_rows_of_separated_values_are_read_with_what_quotes_hold(tmp_path, small_parts, kind, between):
    path = tmp_path / f"a.{kind}"
    lines = ["label{}text", '1{}"two\r\nlines, and a ""quote"""', "", '"2"{}', f'3{{}}"a{between}b"', "4{}é"]
    path.write_bytes(("\ufeff" + "\n".join(lines)).format(*[between] * 5).encode())
    tables = made.tables_of(path)
    assert made.read_all(tables) == [['two\r\nlines, and a "quote"', f"a{between}b", "é"]]
    assert made.read_all(made.tables_of(path, column="label")) == [["1", "2", "3", "4"]]
    assert count_documents(tables, 9) == 3


@pytest.mark.parametrize("kind", [*made.KINDS, "address"])
def test_a_text_without_end_is_refused_and_not_read(tmp_path, small_parts, monkeypatch, kind):
    """A line ends where it may be longest, wherever a part begins; what is compressed may be of any size."""
    path = made.write_table(tmp_path / f"a.{'jsonl' if kind == 'address' else kind}", ["short", "long" * 3000, "next"])
    monkeypatch.setattr(module, "LONGEST_TEXT", 9999)
    with serve(tmp_path) if kind == "address" else nullcontext() as site:
        name = str(path) if site is None else f"{site.address}/files/a.jsonl"
        found = Tables((facts_of(name),))
        line = (
            r"row 2 of .* \(12,000 characters are above the 9,999|the line at byte 27 of .* has more than 9,999 bytes"
        )
        with pytest.raises(UserError, match=line):
            made.read_all(found)
        if kind != "parquet":  # a part that begins in the line begins after it
            parts, reader = list(found.parts()), PartReader()
            assert [text for part in parts[1:] for text in reader.texts(part)] == ["next"]
            reader.close()
    monkeypatch.setattr(module, "LONGEST_TEXT", 1 << 20)
    monkeypatch.setattr(module, "_LIST_BYTES", 9)
    (tmp_path / "list.json").write_text(' \n[{"text": "a"}]')
    with pytest.raises(UserError, match=r"list\.json has more than 0 GiB in one list"):
        made.read_all(made.tables_of(tmp_path / "list.json"))
