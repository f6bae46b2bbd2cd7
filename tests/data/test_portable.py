"""Our tokenizers in the tokenizers library give the same ids for the same text."""

import hypothesis.strategies as st
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings

from soak import examples
from zeroshard.data.portable import byte_characters, merges_of, portable
from zeroshard.data.tokenizer import TiktokenTokenizer, train_bpe

TEXT = "The cat sat on the mat.  It's 42's déjà vu, isn't it?\n\n\tthe the them ☃ "
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2's class with tables that were learned here: the real ones are fetched from the network."""
    learned = train_bpe(290, [TEXT * 20])._inner
    spelled = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary = learned.get_vocab()
    del vocabulary["<|endoftext|>"]
    in_order = sorted(vocabulary, key=lambda text: (len(text) > 1, vocabulary[text]))
    ranks = {bytes(spelled[character] for character in text): rank for rank, text in enumerate(in_order)}
    encoding = tiktoken.Encoding(
        "small", pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )
    tokenizer = TiktokenTokenizer.__new__(TiktokenTokenizer)
    tokenizer._encoding = encoding
    tokenizer.vocab_size, tokenizer.eos_id = encoding.n_vocab, encoding.eot_token
    return tokenizer


def _there(tokenizer):
    return tokenizers.Tokenizer.from_str(portable(tokenizer).json)


@pytest.mark.redundant
@settings(deadline=None, max_examples=examples(40, 200))
@given(text=st.text(alphabet=st.sampled_from("the catsmISN'12\n\t é☃.,"), max_size=60))
def test_ranks_become_merges_that_give_the_same_ids(gpt2, text):
    there = _there(gpt2)
    ids = gpt2.encode(text).tolist()
    assert there.encode(text, add_special_tokens=False).ids == ids
    assert there.decode(ids) == text


def test_the_end_of_a_text_keeps_its_id(gpt2):
    assert portable(gpt2).eos_token == "<|endoftext|>"
    assert _there(gpt2).token_to_id("<|endoftext|>") == gpt2.eos_id
    assert _there(gpt2).get_vocab_size() == gpt2.vocab_size
    assert any(len(left + right) > 2 for left, right in merges_of(gpt2.ranks))  # merges of merges


def test_a_tokenizer_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="tokenizer: a object has no form"):
        portable(object())
