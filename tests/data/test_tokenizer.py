import json
import threading
from types import SimpleNamespace

import pytest
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    TiktokenTokenizer,
    check_tokenizer,
    load_tokenizer,
    make_tokenizer,
    tokenizer_identity,
    train_bpe,
)
from zeroshard.host.errors import UserError

TEXTS = ["the cat sat on the mat, the rat sat on the cat\n" * 5, "def the(cat): return cat + the\n" * 5]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(280, TEXTS)


@pytest.fixture
def small_gpt2(monkeypatch):
    """tiktoken without its download: the bytes alone, and the end of text."""
    encoding = tiktoken.Encoding(
        "small",
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": encoding}[name])


@given(st.text())
def test_bytes_are_their_own_ids_and_back(text):
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


@given(text=st.text())
def test_bpe_gives_back_any_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(0 <= id_ < 280 for id_ in ids.tolist())


def test_bpe_learns_what_is_frequent(bpe):
    assert (bpe.name, bpe.vocab_size) == ("bpe:280", 280)
    assert len(bpe.encode(TEXTS[0])) < 0.6 * len(TEXTS[0])


def test_text_that_spells_the_end_of_text_does_not_end_it(bpe, small_gpt2):
    for tokenizer in (bpe, TiktokenTokenizer()):
        assert tokenizer.eos_id not in tokenizer.encode(f"a{END_OF_TEXT}b").tolist()
        assert tokenizer.decode(tokenizer.encode(f"a{END_OF_TEXT}b")) == f"a{END_OF_TEXT}b"
        assert tokenizer.decode([tokenizer.eos_id]) == END_OF_TEXT


@pytest.mark.parametrize(
    ("error", "why"), [(ConnectionError("no route\nto host"), "ConnectionError"), (ValueError("hash"), "ValueError")]
)
def test_gpt2_without_its_tables_is_one_line(monkeypatch, error, why):
    def fail(name):
        raise error

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(UserError) as caught:
        TiktokenTokenizer()
    assert str(caught.value) == (
        f"data.tokenizer: the tables of gpt2 cannot be fetched ({why}); go online once, or use bytes or bpe:N"
    )


def test_gpt2_does_not_wait_for_a_host_that_never_answers(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: answer.wait(600) and SimpleNamespace())
    with pytest.raises(UserError, match=r"no answer in 0\.05 s"):  # and no tokenizer, after an answer
        TiktokenTokenizer(timeout_s=0.05)
    answer.set()


def test_a_prepared_folder_gives_its_tokenizer_back(tmp_path):
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    for name in ("bytes", "bpe:270"):
        folder = prepare(DataSpec("text", (str(tmp_path / "a.txt"),), name), tmp_path / name.replace(":", "-"))
        tokenizer = load_tokenizer(folder)
        assert tokenizer.name == name
        assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("Ġ", "x", 1))
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged: it has sha256"):
        load_tokenizer(folder)


def test_synthetic_tokens_have_no_tokenizer(tmp_path):
    folder = prepare(DataSpec("synthetic", num_tokens=100), tmp_path / "data")
    with pytest.raises(UserError, match="holds synthetic tokens, which are no text"):
        load_tokenizer(folder)


def test_a_tokenizer_in_a_file_is_known_by_its_content(bpe, tmp_path):
    path, copy = tmp_path / "tokenizer.json", tmp_path / "copy.json"
    path.write_text(bpe.to_json())
    copy.write_text(bpe.to_json())
    check_tokenizer(f"json:{path}")
    read = make_tokenizer(f"json:{path}", ())
    assert (read.vocab_size, read.eos_id) == (bpe.vocab_size, bpe.eos_id)
    assert read.encode("the cat").tolist() == bpe.encode("the cat").tolist()
    assert tokenizer_identity(f"json:{path}") == tokenizer_identity(f"json:{copy}")
    copy.write_text(bpe.to_json() + " ")
    assert tokenizer_identity(f"json:{path}") != tokenizer_identity(f"json:{copy}")
    assert tokenizer_identity("bpe:280") == "bpe:280"


@pytest.mark.parametrize(
    ("vocab", "why"), [({}, "its vocabulary is empty"), ({"a": 0, "<unk>": 2**31}, "its largest id is 2,147,483,648")]
)
def test_a_vocabulary_that_no_model_can_have_is_refused(tmp_path, vocab, why):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", **dict.fromkeys(parts), "added_tokens": [], "model": model}))
    with pytest.raises(UserError, match=rf"^data\.tokenizer: .*{why}; give another"):
        make_tokenizer(f"json:{path}", ())


def test_a_vocabulary_is_as_large_as_its_largest_id_says():
    """What others have made may leave ids out, and a model has a row for each of them."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert BpeTokenizer(inner, "json").vocab_size == 8
