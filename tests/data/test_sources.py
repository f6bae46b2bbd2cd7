import os
import sys
import sysconfig

import numpy as np
import pytest

from zeroshard.data.sources import (
    PythonDocs,
    SyntheticSize,
    SyntheticTokens,
    open_source,
    python_stdlib,
)
from zeroshard.host.errors import UserError


def opened(path):
    return open_source("text", [str(path)], SyntheticSize(256, 100, 0))


def text_of(source):
    return ["".join(document.chunks()) for document in source.documents()]


@pytest.fixture
def tree(tmp_path):
    for name, content in {
        "b.txt": "b",
        "a.md": "a",
        "sub/c.py": "c",
        "sub/empty.py": "",
        "sub/e.rst": "e",
        ".hidden/f.txt": "f",
        "image.png": "\0",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def test_a_folder_gives_its_text_files_in_sorted_order(tree):
    assert text_of(opened(tree)) == ["a", "b", "c"]


def test_changed_content_changes_the_fingerprint_whatever_size_and_date_say(tree):
    path = tree / "b.txt"
    before, date = opened(tree).fingerprint(), path.stat().st_mtime_ns
    path.write_text("B")
    os.utime(path, ns=(date, date))
    assert opened(tree).fingerprint() != before


@pytest.mark.redundant
def test_the_standard_library_is_a_corpus_of_megabytes():
    source = python_stdlib()
    found = source.fingerprint()
    assert 5e6 < found.num_bytes < 50e6
    assert found.num_documents == len(source.files) > 300
    parts = {part for file in source.files for part in file.relative_to(sysconfig.get_path("stdlib")).parts[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert source.files[:20] == sorted(source.files[:20])


def test_files_of_the_library_that_are_not_text_are_skipped(tmp_path):
    (tmp_path / "fine.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "held_out.py").write_text("x = 2\n")
    assert text_of(python_stdlib(tmp_path)) == ["x = 1\n"]


def test_an_interpreter_without_sources_is_told_apart(tmp_path):
    with pytest.raises(UserError, match=r"holds no \.py files; use --data text"):
        python_stdlib(tmp_path).fingerprint()


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 256, 70_000])
def test_synthetic_tokens_are_seeded_and_in_range(vocab_size):
    one, same, other = (np.concatenate(list(SyntheticTokens(vocab_size, 5000, seed).blocks())) for seed in (3, 3, 4))
    assert one.tolist() == same.tolist()
    assert one.shape == (5000,)
    assert one.min() >= 0
    assert one.max() < vocab_size
    assert vocab_size < 4 or one.tolist() != other.tolist()


def test_synthetic_tokens_go_on_across_blocks(monkeypatch):
    whole = np.concatenate(list(SyntheticTokens(256, 3000, 0).blocks()))
    monkeypatch.setattr(SyntheticTokens, "_BLOCK_TOKENS", 700)
    assert np.concatenate(list(SyntheticTokens(256, 3000, 0).blocks())).tolist() == whole.tolist()


def test_help_topics_are_documents_of_english_that_stay_the_same():
    source = PythonDocs()
    documents = list(source.documents())
    texts = {document.name: "".join(document.chunks()) for document in documents}
    assert len(texts) > 64  # enough to be split by content
    assert "try" in texts["topic try"]
    prose = [
        line for text in texts.values() for line in text.splitlines() if line.startswith("The ") and line.endswith(".")
    ]
    assert max(map(len, prose)) > 200  # a paragraph in a line
    assert any("    def " in text for text in texts.values())  # and code as it was
    found = source.fingerprint()
    assert found == PythonDocs().fingerprint()
    assert (found.num_bytes, found.num_documents) == (sum(len(t.encode()) for t in texts.values()), len(texts))


def test_a_python_without_help_topics_is_told_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match=r"^data\.source: .* has no help topics \(pydoc_data\); use python-stdlib"):
        PythonDocs()
