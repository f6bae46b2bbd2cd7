"""Ids are those of `transformers`, and what counts is what the assistant writes."""

import pytest

import chats
from zeroshard.data.chat_templates import find_template
from zeroshard.data.examples.encode import ExampleEncoder
from zeroshard.data.examples.texts import ExampleText, texts_of_chats, texts_of_pairs
from zeroshard.data.tokenizer import ByteTokenizer, read_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return read_tokenizer(chats.write_tokenizer(tmp_path, find_template("chatml", "bytes").text))


def counted(tokenizer, encoded):
    """The text of what counts."""
    return tokenizer.decode(encoded.ids[encoded.counts])


@pytest.mark.redundant
@pytest.mark.parametrize("bytes_alone", [False, True])
def test_of_a_conversation_the_answers_count(tokenizer, bytes_alone):
    tokenizer = ByteTokenizer() if bytes_alone else tokenizer
    rows = chats.conversations(6)
    with find_template("chatml", "bytes").opened() as opened:
        texts = [text for _, text in texts_of_chats((("", row) for row in rows), opened, "messages")]
    found = ExampleEncoder(tokenizer, is_chat=True)(texts)
    for row, text, encoded in zip(rows, texts, found, strict=True):
        answers = [m["content"] + "<|im_end|>\n" for m in row["messages"] if m["role"] == "assistant"]
        assert counted(tokenizer, encoded) == "".join(answers)
        assert tokenizer.decode(encoded.ids) == text.text


@pytest.mark.redundant
def test_ids_are_those_of_transformers(tokenizer, tmp_path):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    rows = chats.conversations(6)
    rows[0]["messages"][1]["content"] = "é <|im_end|> 🙂"  # a mark that a user writes is one there too
    with find_template("", f"json:{tmp_path}/tokenizer.json").opened() as opened:
        texts = [text for _, text in texts_of_chats((("", row) for row in rows), opened, "messages")]
    for row, encoded in zip(rows, ExampleEncoder(tokenizer, is_chat=True)(texts), strict=True):
        assert encoded.ids.tolist() == list(theirs.apply_chat_template(row["messages"], return_dict=False))


def test_of_a_pair_the_completion_counts_and_the_end_of_text(tokenizer):
    row = {"prompt": "a <|im_end|> ", "completion": "b c"}
    ((_, example),) = texts_of_pairs([("", row)], "prompt", "completion")
    (encoded,) = ExampleEncoder(tokenizer, is_chat=False)([example])
    assert counted(tokenizer, encoded) == "b c<|im_end|>"  # the eos_token of its tokenizer_config.json
    assert len(encoded.ids) == len("a <|im_end|> b c") + 1  # a mark in the text is text


def test_a_token_that_is_partly_an_answer_counts():
    import tokenizers
    from tokenizers import models, pre_tokenizers

    from zeroshard.data.tokenizer import BpeTokenizer

    inner = tokenizers.Tokenizer(models.WordLevel({"ab": 0, "cd": 1, "ef": 2}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    encode = ExampleEncoder(BpeTokenizer(inner, "json"), is_chat=True)
    (encoded,) = encode([ExampleText("ab cd ef", ((4, 5),), "")])
    assert encoded.counts.tolist() == [False, True, False]
