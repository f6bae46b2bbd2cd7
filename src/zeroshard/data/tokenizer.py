"""Tokenizers: text to ids and back.

``bytes`` (our own), ``gpt2`` and others of tiktoken, ``bpe:N`` (trained on the train split), ``json:PATH`` (an existing
``tokenizer.json``, such as an imported model's).

A ``tokenizer.json`` may put ids around a text (its post-processor: LLaMA's begin with BOS). `encode` adds them and
`encode_piece` does not. `zeroshard.data.joining` describes how documents are joined.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.files import within
from zeroshard.data.meta import (
    SPLITS,
    TOKENIZER_FILE,
    DataMeta,
    SourceMeta,
    SplitMeta,
    dtype_for,
    read_meta,
    write_meta,
)
from zeroshard.data.special_tokens import SpecialTokens, special_tokens_of, write_special_tokens
from zeroshard.data.tokens import check_texts
from zeroshard.host.errors import UserError, shown, unknown_name
from zeroshard.host.regular_files import read_bytes, require_regular, write_inside

if TYPE_CHECKING:
    import tokenizers

_JSON_BYTES = 1 << 30  # limit for a tokenizer.json; those with 256,000 entries have 33 MB
# tiktoken's name -> number of ids, end-of-text id; listed here so that no download is needed to know them
TIKTOKEN = {
    "gpt2": (50_257, 50_256),
    "r50k_base": (50_257, 50_256),
    "p50k_base": (50_281, 50_256),
    "cl100k_base": (100_277, 100_257),
    "o200k_base": (200_019, 199_999),
}
TOKENIZERS = ("bytes", *TIKTOKEN, "bpe:N", "json:PATH")
END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # its spelling where no file names it
_MOST_PROBES = 100  # texts that are encoded to find the ids that a file puts around a text
_MOST_IDS = 1 << 27  # as many as a model may have; tables of a number for each id are made
_MIN_BPE, _MAX_BPE = 257, 1 << 20  # 256 bytes and the end-of-text id; more than a million is surely a typo

Ids = Sequence[int] | NDArray[np.integer]


class Tokenizer(Protocol):
    """A reversible map between text and ids below ``vocab_size``."""

    @property
    def name(self) -> str:
        """The name, as in ``data.tokenizer``."""

    @property
    def vocab_size(self) -> int:
        """Ids are in ``[0, vocab_size)``."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document; None if there is none."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids at which generation ends: ``eos_id``, and others that the model's files name."""

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that `encode` puts before a text and after it; mostly none."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``text``, [n], with those `around` it. Text that spells a special token is plain text."""

    def encode_piece(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a piece of text, [n], with nothing around them."""

    def decode(self, ids: Ids) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """A tokenizer in which each byte of UTF-8 is its own id."""

    name = "bytes"
    vocab_size = 256
    eos_id = None
    stop_ids: tuple[int, ...] = ()
    around: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``text``, [num_bytes]."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    encode_piece = encode

    def decode(self, ids: Ids) -> str:
        """Return the text of ids; raise ValueError for an id above 255."""
        return bytes(np.asarray(ids, dtype=np.int64).tolist()).decode(errors="replace")


class TiktokenTokenizer:
    """OpenAI's vocabularies, by tiktoken, which downloads their tables at first use.

    Args:
        name: a key of `TIKTOKEN`; ``gpt2`` is GPT-2's 50,257 ids (Radford et al. 2019).
        timeout_s: time limit of the download.

    Raises:
        UserError: tiktoken is not installed, or the tables cannot be downloaded within ``timeout_s``.
    """

    around: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

    def __init__(self, name: str = "gpt2", timeout_s: float = 20.0) -> None:
        self.name = name
        try:
            import tiktoken
        except ImportError:
            raise UserError("data.tokenizer", f"{name} needs the package tiktoken", "pip install tiktoken") from None
        try:
            self._encoding = within(timeout_s, lambda: tiktoken.get_encoding(name))
        except (OSError, ValueError) as error:  # no answer, no connection; a table with the wrong checksum
            why = f"no answer in {timeout_s:g} s" if isinstance(error, TimeoutError) else type(error).__name__
            todo = "go online once, or use bytes or bpe:N"
            raise UserError("data.tokenizer", f"the tables of {name} cannot be fetched ({why})", todo) from None
        self.vocab_size, self.eos_id = self._encoding.n_vocab, self._encoding.eot_token
        self.stop_ids = (self.eos_id,)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``text``, [n]."""
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.int64)

    encode_piece = encode

    @property
    def ranks(self) -> Mapping[bytes, int]:
        """The id of each byte string, without the special tokens."""
        return self._encoding._mergeable_ranks

    @property
    def pattern(self) -> str:
        """The regular expression that splits text into the pieces that are encoded separately."""
        return self._encoding._pat_str

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens, which plain text never gets."""
        return self._encoding._special_tokens

    def decode(self, ids: Ids) -> str:
        """Return the text of ids."""
        return self._encoding.decode(np.asarray(ids, dtype=np.int64).tolist())


class BpeTokenizer:
    """A tokenizer of the tokenizers library: trained by us, or read from a file.

    If we trained it, it is byte-level byte-pair encoding (Sennrich et al. 2016; bytes as in GPT-2). A file may have any
    other kind.

    Args:
        name: the name, if it was read from a file; None if it was trained here, as ``bpe:N``.
        special: what files beside it say of its special tokens; without them the end of a text is recognised by its
            spelling.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, name: str | None = None, special: SpecialTokens | None = None
    ) -> None:
        self._inner, special = inner, special or SpecialTokens()
        self._inner.encode_special_tokens = True  # a document that spells <|endoftext|> does not end there
        self._inner.no_truncation()  # a file may set it, and would cut each document after so many ids
        self._inner.no_padding()
        # The ids of a file may have gaps.
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1 if name else inner.get_vocab_size()
        if not 0 < self.vocab_size <= _MOST_IDS:
            what = f"its largest id is {self.vocab_size - 1:,}" if self.vocab_size else "its vocabulary is empty"
            raise UserError("data.tokenizer", f"{name}: {what}", "give another tokenizer.json")
        self.name = name or f"bpe:{self.vocab_size}"
        self.eos_token = self._end(special)
        self.eos_id: int | None = None if self.eos_token is None else self.id_of(self.eos_token)
        self._end_ids = frozenset(id_ for id_ in special.end_ids if self.token(id_) is not None)
        self.around = self._find_around()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids at which generation ends."""
        return tuple(sorted(self._end_ids | (set() if self.eos_id is None else {self.eos_id})))

    def _end(self, special: SpecialTokens) -> str | None:
        """Return the token that ends a document: that which the files name, else the first of `ENDS`."""
        named = (special.named.get("eos_token", ""), *(self.token(id_) or "" for id_ in special.end_ids), *ENDS)
        return next((text for text in named if text and self.id_of(text) is not None), None)

    def keep_special_tokens(self, folder: Path) -> None:
        """Write into ``folder`` what a reader of this tokenizer's ``tokenizer.json`` there needs to end texts alike."""
        found, stop_ids = special_tokens_of(folder), {*self.stop_ids, self.eos_id}
        if {id_ for id_ in found.end_ids if self.token(id_) is not None} | {self.eos_id} != stop_ids:
            found = replace(found, end_ids=self.stop_ids)
            write_special_tokens(folder, None, self.stop_ids)
        if self._end(found) != self.eos_token:
            write_special_tokens(folder, self.eos_token, ())

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``text``, [n], with those that the file's post-processor puts around them."""
        return self._encode(text, add_special_tokens=True)

    def encode_piece(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a piece of text, [n], with nothing around them."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int64]:
        # `encode_batch_fast` with a batch of one skips the tokens' offsets, and takes half the time.
        try:
            (encoded,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except Exception as error:
            if "[UNK]" not in str(error):  # the library has no exception class for it, only this message
                raise
            unknown = sorted(set(text) - self._inner.get_vocab().keys())
            what = f"it has no token for the characters {shown(''.join(unknown), 80)}"
            raise UserError("data.tokenizer", what, "leave them out") from None
        return np.asarray(encoded.ids, dtype=np.int64)

    def _find_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        for probe in ("a", *islice(self.ordinary_tokens, _MOST_PROBES)):  # texts that are not special tokens
            try:
                piece, whole = self.encode_piece(probe).tolist(), self.encode(probe).tolist()
            except UserError:  # it has no such character
                continue
            if piece and len(whole) >= len(piece):
                places = [at for at in range(len(whole) - len(piece) + 1) if whole[at : at + len(piece)] == piece]
                if len(places) == 1:
                    return tuple(whole[: places[0]]), tuple(whole[places[0] + len(piece) :])
        if not self.encode("").size:
            return (), ()
        what = "its post-processor does more than add special tokens around a text"
        raise UserError("data.tokenizer", what, "give another tokenizer.json")

    def decode(self, ids: Ids) -> str:
        """Return the text of ids."""
        return self._inner.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its spelling; None if there is none."""
        return self._inner.token_to_id(token)

    def token(self, id_: int) -> str | None:
        """Return the spelling of an id's token; None if there is none."""
        return self._inner.id_to_token(id_)

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are byte strings, with each byte spelled as one character."""
        return type(self._inner.decoder).__name__ == "ByteLevel"

    @property
    def ordinary_tokens(self) -> Mapping[str, int]:
        """The tokens that make up text, by their spelling; without special and added tokens."""
        added = {token.content for token in self._inner.get_added_tokens_decoder().values()}
        return {text: id_ for text, id_ in self._inner.get_vocab().items() if text not in added}

    def to_json(self) -> str:
        """Return the content of ``tokenizer.json``, which the tokenizers and transformers libraries can read too."""
        return self._inner.to_str(pretty=True)


def check_tokenizer(name: str) -> None:
    """Check that a tokenizer of that name exists, else raise UserError. Loads and downloads nothing."""
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not (size.isascii() and size.isdigit() and _MIN_BPE <= int(size) <= _MAX_BPE):
            raise UserError(
                "data.tokenizer",
                f"{name} does not name a vocabulary size",
                f"use bpe:N with N from {_MIN_BPE} (the bytes and one id more) to {_MAX_BPE}",
            )
    elif name.startswith("json:"):
        if not Path(name.removeprefix("json:")).is_file():
            raise UserError("data.tokenizer", f"{name} names no file", "use json:PATH of a tokenizer.json")
    elif name != "bytes" and name not in TIKTOKEN:
        raise unknown_name("data.tokenizer", name, TOKENIZERS)


def make_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer called ``name``; ``bpe:N`` is trained on ``texts``, which the others do not read."""
    check_tokenizer(name)
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("json:"):
        return read_tokenizer(Path(name.removeprefix("json:")))
    return TiktokenTokenizer(name) if name in TIKTOKEN else train_bpe(int(name.removeprefix("bpe:")), texts)


def known_vocab_size(name: str) -> int:
    """Return the vocabulary size of a tokenizer that need not be trained; downloads nothing.

    Raises:
        UserError: there is no such tokenizer, or it must be trained first.
    """
    check_tokenizer(name)
    if name.startswith("json:"):
        return read_tokenizer(Path(name.removeprefix("json:"))).vocab_size
    if name.startswith("bpe:"):
        todo = "name its file as json:PATH"
        raise UserError("data.tokenizer", f"{name} is trained on text, and here is none", todo)
    return TIKTOKEN[name][0] if name in TIKTOKEN else ByteTokenizer.vocab_size


def eos_id_of(name: str) -> int | None:
    """Return the id that ends a document, if the tokenizer's name alone decides it; else None."""
    return TIKTOKEN[name][1] if name in TIKTOKEN else None


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Return the tokenizer that made a prepared folder's tokens.

    Raises:
        UserError: the folder is not a prepared one or is damaged, or its tokens were never text.
    """
    meta = read_meta(Path(folder))
    if meta.tokenizer == "none":
        raise UserError("data.dir", f"{folder} holds synthetic tokens, which are no text", "use a text source")
    check_texts(Path(folder), meta)
    if meta.tokenizer_sha256:
        path = Path(folder) / TOKENIZER_FILE
        tokenizer = read_tokenizer(path, meta.tokenizer)
        end = None if meta.eos_id is None else tokenizer.token(meta.eos_id)
        if end is not None:
            tokenizer.eos_token, tokenizer.eos_id = end, tokenizer.id_of(end)
        return tokenizer
    return make_tokenizer(meta.tokenizer, ())


def keep_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    vocab_size: int,
    description: str,
    spec: Mapping[str, Any] | None = None,
    sha256: str = "",
) -> None:
    """Make ``folder`` a prepared folder without tokens, from which `load_tokenizer` reads the tokenizer.

    Args:
        vocab_size: the model's vocabulary size; at least the tokenizer's.
        description: where the tokenizer comes from.
        spec: the choices by which text was split, if any was.
        sha256: sha256 of that text.
    """
    folder.mkdir()
    digest = ""
    if isinstance(tokenizer, BpeTokenizer):
        digest = write_tokenizer(folder, tokenizer)
    no_tokens = {split: SplitMeta(0, ()) for split in SPLITS}
    source, dtype = SourceMeta(description, 0, 0, sha256), dtype_for(vocab_size)
    meta = DataMeta(spec or {}, source, tokenizer.name, digest, vocab_size, dtype, no_tokens, eos_id=tokenizer.eos_id)
    write_meta(folder, meta)


def write_tokenizer(folder: Path, tokenizer: BpeTokenizer) -> str:
    """Write `TOKENIZER_FILE` and its special tokens into ``folder``; return the sha256 of the former."""
    content = tokenizer.to_json().encode()
    tokenizer.keep_special_tokens(folder)  # first: where a tokenizer.json is, they are there too
    write_inside(folder, TOKENIZER_FILE, content)
    return hashlib.sha256(content).hexdigest()


def read_tokenizer(path: Path, name: str = "json") -> BpeTokenizer:
    """Read the tokenizer in a ``tokenizer.json``.

    Args:
        name: name of the tokenizer; ``bpe:N`` means that it was trained here.

    Raises:
        UserError: the tokenizers library cannot read the file.
    """
    import tokenizers  # here, because only these tokenizers need it

    try:
        require_regular(path)
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 -- the library raises nothing more precise
        raise UserError("data.tokenizer", f"{path} cannot be read ({error})", "give another tokenizer.json") from None
    return BpeTokenizer(inner, None if name.startswith("bpe:") else name, special_tokens_of(path.parent))


def tokenizer_identity(name: str) -> str:
    """Return a string that decides the ids: the name; of ``json:PATH`` a hash, and the end of text if files name it."""
    if not name.startswith("json:"):
        return name
    path = Path(name.removeprefix("json:"))
    try:
        content, special = read_bytes(path, _JSON_BYTES), special_tokens_of(path.parent)
    except OSError as error:
        raise UserError("data.tokenizer", f"{path} cannot be read ({error.strerror})", "check the path") from None
    spelled, end = next((text for text in ENDS if _has_token(content, text)), None), special.named.get("eos_token")
    if end is None or not _has_token(content, end):
        end = read_tokenizer(path).eos_token if special.end_ids else spelled
    return f"json:{hashlib.sha256(content).hexdigest()[:16]}" + (f"+{end}" if end not in (None, spelled) else "")


def _has_token(content: bytes, token: str) -> bool:
    """Whether the content of a ``tokenizer.json`` has this token; a fast answer, without reading it as JSON."""
    return json.dumps(token, ensure_ascii=False).encode() in content


def train_bpe(vocab_size: int, texts: Iterable[str]) -> BpeTokenizer:
    """Train ``vocab_size`` entries: 256 bytes, end of text, and merges. The same texts give the same entries.

    Raises:
        UserError: the texts have too few pairs to merge for that size.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    if (learned := inner.get_vocab_size()) < vocab_size:
        raise UserError(
            "data.tokenizer",
            f"bpe:{vocab_size} finds only {learned:,} entries in this text",
            f"use bpe:{learned} or less, or more text",
        )
    return BpeTokenizer(inner)
