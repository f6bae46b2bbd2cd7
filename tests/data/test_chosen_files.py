import gzip
import json
import os

import pytest

from small_tables import read_all
from zeroshard.data.chosen_files import choose
from zeroshard.data.sources import SyntheticSize, TextFiles, open_source
from zeroshard.data.tables import Tables
from zeroshard.host.errors import UserError

ROWS = [{"text": f"document {number}", "body": f"body {number}"} for number in range(5)]
TEXTS = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def opened(*paths, column="text"):
    return open_source("text", [str(path) for path in paths], SyntheticSize(256, 100, 0), column=column)


def texts_of(source):
    if isinstance(source, Tables):
        return [text for part in read_all(source) for text in part]
    return ["".join(document.chunks()) for document in source.documents()]


def write(path, content):
    data = content.encode()
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(gzip.compress(data) if path.suffix.lower() == ".gz" else data)
    return path


@pytest.mark.parametrize("content", [LINES, json.dumps(ROWS), json.dumps(ROWS, indent=2), "\ufeff" + json.dumps(ROWS)])
@pytest.mark.parametrize("name", ["a.json", "a.JSON", "a.json.gz", "a.Json.GZ"])
def test_rows_of_json_are_the_same_texts_as_lines_or_as_a_list(tmp_path, name, content):
    assert texts_of(opened(write(tmp_path / name, content))) == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.jsonl.gz", "a.NDJSON.gz", "a.ndjson.gz"])
def test_lines_are_rows_whatever_the_case_of_the_suffix(tmp_path, name):
    write(tmp_path / "in" / name, LINES)
    for path in (tmp_path / "in" / name, tmp_path / "in", f"{tmp_path}/in/*"):
        assert texts_of(opened(path)) == TEXTS
        assert texts_of(opened(path, column="body")) == [row["body"] for row in ROWS]


def test_a_folder_says_what_it_leaves_out(tmp_path):
    for name in ("notes.txt", "b.csv", "c.CSV", "image", "settings.json"):
        write(tmp_path / "in" / name, "{}")
    source = opened(tmp_path / "in")
    assert isinstance(source, TextFiles)
    assert source.left_out == (
        f"{tmp_path}/in: 4 files left out (2 .csv, 1 without suffix, 1 .json): "
        ".txt .md .py are read; name others to read them",
    )
    write(tmp_path / "in" / "rows.jsonl", LINES)
    source = opened(tmp_path / "in")
    assert texts_of(source) == TEXTS
    assert "5 files left out (2 .csv, 1 .txt" in source.left_out[0]


def test_rows_of_json_are_named_for_a_folder_may_hold_settings(tmp_path):
    write(tmp_path / "in" / "a.json", json.dumps([{"content": "hello"}]))
    with pytest.raises(UserError, match=r"in holds no file with text .*; name the files or a glob"):
        opened(tmp_path / "in")
    assert texts_of(opened(f"{tmp_path}/in/*.json", column="content")) == ["hello"]


def test_a_glob_sorts_each_file_by_its_own_suffix_and_names_folders_that_it_leaves_out(tmp_path):
    write(tmp_path / "a.txt", "plain\n")
    write(tmp_path / "b.rst", "more\n")
    write(tmp_path / "sub" / "c.txt", "deeper\n")
    source = opened(f"{tmp_path}/*")
    assert texts_of(source) == ["plain\n", "more\n"]
    assert source.left_out == (f"{tmp_path}/*: 1 folder that it matches left out; name them to read them",)
    everything = opened(f"{tmp_path}/**")
    assert texts_of(everything) == ["plain\n", "more\n", "deeper\n"]
    assert not everything.left_out


def test_links_lead_to_what_they_name_and_a_file_is_read_once(tmp_path):
    table = write(tmp_path / "store" / "rows.jsonl", LINES)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "same.jsonl").symlink_to(table)
    assert texts_of(opened(tmp_path / "in" / "same.jsonl")) == TEXTS
    assert texts_of(opened(table, tmp_path / "in", table)) == TEXTS
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "deep").symlink_to(table.parent)
    (tmp_path / "linked" / "loop").symlink_to(tmp_path / "linked")
    assert texts_of(opened(tmp_path / "linked")) == TEXTS


def test_a_link_that_leads_nowhere_is_left_out_aloud(tmp_path):
    write(tmp_path / "a.txt", "plain\n")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    assert "1 file left out (1 .txt)" in opened(tmp_path).left_out[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_refused(tmp_path):
    write(tmp_path / "a.txt", "plain\n")
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(UserError, match=r"closed cannot be read"):
        choose([str(tmp_path)])
