"""Convert our tokenizers to ``tokenizer.json``, which the tokenizers and transformers libraries read.

All of them are byte-level: a byte is written as one printable character (GPT-2's table), and merges build on those.

- ``bytes``: the 256 bytes, each its own id, and no merges.
- ``gpt2`` and others of tiktoken: tiktoken stores ranks of byte strings and no merges. The merge that made a string is
  found by encoding the string with only the ranks below its own, which leaves two parts.
- ``bpe:N``, ``json:PATH``: written as they were trained or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from zeroshard.data.tokenizer import BpeTokenizer, ByteTokenizer, TiktokenTokenizer, Tokenizer

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class PortableTokenizer:
    """A tokenizer in the form that other libraries read."""

    json: str  # the content of ``tokenizer.json``
    eos_token: str | None  # the text of the token that ends a document; None if there is none
    bos_token: str | None = None  # the text of the token that begins one; None if there is none


def portable(tokenizer: Tokenizer) -> PortableTokenizer:
    """Convert a tokenizer to the tokenizers library's form, with the same ids for the same text.

    Raises:
        TypeError: the tokenizer's class is not one of ours.
    """
    if isinstance(tokenizer, BpeTokenizer):
        before = tokenizer.around[0]
        return PortableTokenizer(
            tokenizer.to_json(), tokenizer.eos_token, tokenizer.token(before[0]) if before else None
        )
    if isinstance(tokenizer, ByteTokenizer):
        return PortableTokenizer(_byte_level({bytes([byte]): byte for byte in range(256)}, words="").to_str(), None)
    if isinstance(tokenizer, TiktokenTokenizer):
        specials = tokenizer.special_tokens
        eos = next((text for text, id_ in specials.items() if id_ == tokenizer.eos_id), None)
        inner = _byte_level(tokenizer.ranks, words=tokenizer.pattern, specials=specials)
        return PortableTokenizer(inner.to_str(), eos)
    raise TypeError(f"tokenizer: a {type(tokenizer).__name__} has no form that other libraries read")


def byte_characters() -> list[str]:
    """Return GPT-2's character for each byte: its own if that is printable, else the next unused one from 256 on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printing]
    return [chr(byte) if byte in printing else chr(256 + others.index(byte)) for byte in range(256)]


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pair whose merge gives each string of more than one byte, in the order of ranks."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _encode(token, ranks, below=rank)
            merges.append((left, right))
    return merges


def _encode(token: bytes, ranks: Mapping[bytes, int], below: int) -> list[bytes]:
    parts = [token[place : place + 1] for place in range(len(token))]
    while True:
        pairs = [(ranks.get(a + b, below), place) for place, (a, b) in enumerate(pairwise(parts))]
        rank, place = min(pairs, default=(below, 0))
        if rank >= below:
            return parts
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def _byte_level(
    ranks: Mapping[bytes, int], *, words: str, specials: Mapping[str, int] | None = None
) -> tokenizers.Tokenizer:
    """Byte-pair encoding with ranks as ids; ``words``: a regular expression that splits text first, if not empty."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    characters = byte_characters()

    def spell(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    vocabulary |= dict(specials or {})
    merges = [(spell(left), spell(right)) for left, right in merges_of(ranks)]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cut, spelled])
    inner.decoder = decoders.ByteLevel()
    if specials:
        inner.add_special_tokens(list(specials))
    return inner
