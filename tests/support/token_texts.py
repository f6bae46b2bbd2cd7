"""Tokenizers of a few words, with each decoder of the tokenizers library that looks at an id's neighbours."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from zeroshard.data.tokenizer import read_tokenizer

WORDS = "the quick brown fox sleeps as über as it can"
SNOWMAN = ["▁", "<0xE2>", "<0x98>", "<0x83>"]  # a character of three ids


def _cut(word: str, first: str = "", other: str = "", last: str = "") -> list[str]:
    """A word in pieces of three characters, with the marks of a kind of pieces."""
    pieces = [word[at : at + 3] for at in range(0, len(word), 3)]
    marked = [(other if at else first) + piece for at, piece in enumerate(pieces)]
    return [*marked[:-1], marked[-1] + last]


_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
# of each: its decoder, and the pieces of `WORDS`
KINDS: dict[str, tuple[Any, list[str]]] = {
    "metaspace": (decoders.Metaspace(), [each for word in WORDS.split() for each in _cut(word, first="▁")]),
    "llama": (
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        [*(each for word in WORDS.split() for each in _cut(word, first="▁")), *SNOWMAN, "▁the"],
    ),
    "wordpiece": (decoders.WordPiece(), [each for word in WORDS.split() for each in _cut(word, other="##")]),
    "bpe": (decoders.BPEDecoder(), [each for word in WORDS.split() for each in _cut(word, last="</w>")]),
    "byte level": (decoders.ByteLevel(), [char for word, _ in _BYTE_LEVEL.pre_tokenize_str(WORDS) for char in word]),
}


def tokenizer_of(kind: str, folder: Path) -> tuple[Any, list[int]]:
    """A tokenizer of this kind that puts ``<s>`` (0) before a text, and the ids of `WORDS`, without it."""
    decoder, pieces = KINDS[kind]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(["<s>", "<unk>", *pieces]))}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.add_special_tokens(["<s>"])
    inner.decoder = decoder
    if any("▁" in piece for piece in pieces):
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(folder / "tokenizer.json"))
    return read_tokenizer(folder / "tokenizer.json"), [vocab[piece] for piece in pieces]
