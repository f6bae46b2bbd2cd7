"""nanoGPT's meta.pkl: its characters are read, and nothing in it is carried out."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from zeroshard.data.character_meta import read_characters
from zeroshard.data.meta import read_meta
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.tokenizer import load_tokenizer, read_tokenizer
from zeroshard.errors import UserError

STOI = {character: id_ for id_, character in enumerate(sorted("\n abcé.😀"))}
META = {"vocab_size": len(STOI), "itos": {id_: character for character, id_ in STOI.items()}, "stoi": STOI}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_characters_are_read_whichever_protocol_wrote_them(protocol, tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(META, protocol))
    assert read_characters(tmp_path / "meta.pkl") == STOI


def test_text_becomes_nanogpts_ids_and_text_again(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(META))
    tokenizer = read_tokenizer(tmp_path / "meta.pkl")
    text = "a  b\n\n😀é. c "
    assert tokenizer.encode(text).tolist() == [STOI[character] for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.around) == (len(STOI), None, ((), ()))


def test_a_character_without_an_id_is_named(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(META))
    with pytest.raises(UserError, match="no token for the characters 'xz'; leave them out"):
        read_tokenizer(tmp_path / "meta.pkl").encode("za x")


def test_prepared_tokens_keep_the_characters_without_the_pickle(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("train", "val"):
        (np.arange(500) % len(STOI)).astype("<u2").tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps(META))
    out = prepare(DataSpec("bin", (str(folder),), f"json:{folder}/meta.pkl"), tmp_path / "out")
    (folder / "meta.pkl").unlink()
    assert read_meta(out).vocab_size == len(STOI)
    assert load_tokenizer(out).decode([1, 2, 0]) == " .\n"


class _Code:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({**META, "more": _Code()}),
        pickle.dumps({**META, "more": _Code()}, 0),
        pickle.dumps({**META, "more": {1, 2}}),
        pickle.dumps({**META, "more": 2**80}),
        b"cos\nmkdir\n(S'executed'\ntR.",
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"",
        b"\x80\x04",
        b"no pickle",
        pickle.dumps(META)[:-20],
    ],
)
def test_what_holds_more_than_plain_values_is_refused_and_not_run(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(UserError, match="is no pickle of plain values"):
        read_characters(tmp_path / "meta.pkl")
    assert os.listdir(tmp_path) == ["meta.pkl"]


@pytest.mark.parametrize(
    "meta",
    [
        [],
        {"vocab_size": 50_304},
        {**META, "stoi": {"ab": 0}},
        {**META, "stoi": {"a": 1}},
        {**META, "stoi": {"a": True}},
        {**META, "stoi": {"a": 0, "b": 0}},
        {**META, "itos": {0: "x"}},
        {**META, "stoi": {"\ud800": 0}},
    ],
)
def test_what_is_no_set_of_characters_is_refused(meta, tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(UserError, match=r"^data.tokenizer: "):
        read_characters(tmp_path / "meta.pkl")
