"""How documents are joined, held against the tokenizers library's own answers."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

import small_tables as made
import token_texts
from zeroshard.data.joining import begin_ids, document_ids, end_ids, marks_of, num_text_bytes, prompt_ids
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.tokenizer import ByteTokenizer, load_tokenizer, read_tokenizer, train_bpe
from zeroshard.data.tokens import TokenDataset

TEXTS = ["the cat sat on the mat, the rat sat on the cat\n" * 5, "def the(cat): return cat + the\n" * 5]
AROUND = {  # what a post-processor puts around a text -> before, after, what ends a document
    "nothing": ("$A", [], [], ["<|endoftext|>"]),
    "bos": ("<s> $A", ["<s>"], [], ["<|endoftext|>"]),
    "eos": ("$A <|endoftext|>", [], ["<|endoftext|>"], ["<|endoftext|>"]),
    "both": ("<s> $A <|endoftext|>", ["<s>"], ["<|endoftext|>"], ["<|endoftext|>"]),
    "other": ("<s> $A [SEP]", ["<s>"], ["[SEP]"], ["[SEP]", "<|endoftext|>"]),
}


@pytest.fixture(params=sorted(AROUND))
def case(request, tmp_path):
    """The path of a tokenizer.json, the library's own reading of it, and ids before, after and at the end."""
    inner = tokenizers.Tokenizer.from_str(train_bpe(280, TEXTS).to_json())
    inner.add_special_tokens(["<s>", "[SEP]"])
    template, *marks = AROUND[request.param]
    specials = [(name, inner.token_to_id(name)) for name in ("<s>", "[SEP]", "<|endoftext|>")]
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    return path, inner, [[inner.token_to_id(name) for name in names] for names in marks]


@pytest.mark.parametrize("text", ["the cat", "", "the rat sat\n", "über <s> ☃"])
def test_a_text_has_the_ids_that_the_library_gives_it(case, text):
    path, inner, (before, after, end) = case
    ours = read_tokenizer(path)
    inner.encode_special_tokens = True
    assert ours.encode(text).tolist() == inner.encode(text).ids
    piece = inner.encode(text, add_special_tokens=False).ids
    assert ours.encode_piece(text).tolist() == piece
    assert ours.around == (tuple(before), tuple(after))
    assert document_ids(ours, text).tolist() == before + piece + end
    assert prompt_ids(ours, text).tolist() == before + piece


@pytest.mark.redundant
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_prepared_documents_are_begun_and_ended(case, tmp_path, kind):
    path, _, (before, _, end) = case
    texts = [text.strip() for text in made.documents(90)]
    (tmp_path / "in").mkdir()
    if kind == "jsonl":
        made.write_table(tmp_path / "in" / "a.jsonl", texts)
    else:
        for number, text in enumerate(texts):
            (tmp_path / "in" / f"{number:03d}.txt").write_text(text)
    spec = DataSpec("text", (str(tmp_path / "in"),), f"json:{path}", val_fraction=0)
    out = prepare(spec, tmp_path / "out", num_workers=1)
    train = TokenDataset.open(out)
    ids, tokenizer = train.window(0, train.num_tokens), load_tokenizer(out)
    assert ids.tolist() == [id_ for text in texts for id_ in [*before, *tokenizer.encode_piece(text).tolist(), *end]]
    assert num_text_bytes(tokenizer, ids) == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("kind", token_texts.KINDS)
def test_rows_that_cut_a_document_have_its_bytes_together(kind, tmp_path):
    """Wherever it is cut between characters: the space before a row's first token counts too."""
    tokenizer, ids = token_texts.tokenizer_of(kind, tmp_path)
    ids = np.array([0, *ids])
    for at in (at for at in range(2, len(ids)) if not tokenizer.decode(ids[1:at]).endswith("\ufffd")):
        rows = num_text_bytes(tokenizer, ids[1:at], ids[:1]) + num_text_bytes(tokenizer, ids[at:], ids[at - 1 : at])
        assert rows == len(tokenizer.decode(ids[1:]).encode())


def test_a_document_of_bytes_ends_its_line_once():
    tokenizer = ByteTokenizer()
    assert bytes(document_ids(tokenizer, "a").tolist()) == bytes(document_ids(tokenizer, "a\n").tolist()) == b"a\n"
    assert end_ids(tokenizer, ends_line=False).tolist() == [10]
    assert begin_ids(tokenizer).size == end_ids(tokenizer, ends_line=True).size == 0
    assert marks_of(tokenizer) == []
    assert num_text_bytes(tokenizer, np.array([1, 2])) == 2


def test_a_file_that_cuts_or_fills_texts_does_neither(tmp_path):
    inner = tokenizers.Tokenizer.from_str(train_bpe(280, TEXTS).to_json())
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = read_tokenizer(tmp_path / "tokenizer.json")
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]
    assert len(ours.encode("the")) < 3


def test_a_vocabulary_of_words_alone_may_begin_its_texts_too(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "cat": 1, "sat": 2}, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = read_tokenizer(tmp_path / "tokenizer.json")
    assert (ours.around, ours.encode("cat sat").tolist()) == (((0,), ()), [0, 1, 2])
