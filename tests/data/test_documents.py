import pytest

from zeroshard.data import documents
from zeroshard.data.documents import fingerprint_of, read_chunks
from zeroshard.host.errors import UserError


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(documents, "CHUNK_BYTES", 16)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("text", ["", "a", "a\n", "line\n" * 20, "x" * 100, "é🙂" * 30, "a\nb" * 30, "\r\n" * 20])
def test_chunks_add_up_to_the_file(tmp_path, text):
    chunks = list(read_chunks(write(tmp_path / "a.txt", text)))
    assert "".join(chunks) == text
    assert all(chunks)


@pytest.mark.usefixtures("small_chunks")
def test_chunks_end_at_line_ends(tmp_path):
    chunks = list(read_chunks(write(tmp_path / "a.txt", "12345\n" * 20)))
    assert len(chunks) > 5
    assert all(chunk.endswith("\n") for chunk in chunks)


def test_the_fingerprint_knows_where_one_file_ends(tmp_path):
    one = [write(tmp_path / "1.txt", "ab"), write(tmp_path / "2.txt", "c")]
    other = [write(tmp_path / "3.txt", "a"), write(tmp_path / "4.txt", "bc")]
    assert fingerprint_of(one).num_bytes == fingerprint_of(other).num_bytes == 3
    assert fingerprint_of(one) != fingerprint_of(other)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*gone\.txt: No such file"):
        fingerprint_of([tmp_path / "gone.txt"])
