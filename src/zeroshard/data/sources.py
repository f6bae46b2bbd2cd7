"""Sources of text. Each yields documents (or tokens, if it has no text) and a fingerprint of its content.

python-stdlib    the running interpreter's own standard library, read in place: some 10 MB of real text
python-docs      the text of Python's `help()` on its topics: half a megabyte of English
text             the user's files: a file, a folder, a glob, or several
synthetic        seeded token ids that a model can learn: no text, no tokenizer
bin              token files written by nanoGPT or llm.c
fineweb-edu, openwebtext, OWNER/NAME[:CONFIGURATION][@SPLIT]   data sets of the Hugging Face hub

For ``text``, files with one text per row (``.parquet``, ``.jsonl``, ``.json``, also compressed) and addresses
(``https://``) become `tables`, like data sets of the hub; other files become documents. `chosen_files` decides which.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.bins import TokenBins
from zeroshard.data.chosen_files import choose, walk
from zeroshard.data.documents import Document, documents_of, fingerprint_of, text_document
from zeroshard.data.files import Fingerprint, facts_of
from zeroshard.data.hub import parse_hub_name
from zeroshard.data.registry import SOURCES, SourceRequest, SyntheticSize, is_hub_name, source_entry
from zeroshard.data.tables import Tables
from zeroshard.host.errors import UserError, unknown_name
from zeroshard.host.lazily import is_address as is_module_address

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class TextSource(Protocol):
    """A source of documents in a stable order."""

    @property
    def description(self) -> str:
        """One line that describes the source, for ``meta.json``."""

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the current content. It reads the files, because size and date prove nothing."""

    def documents(self) -> Iterator[Document]:
        """Yield all documents; the same ones in the same order each time."""


class TextFiles:
    """Text files, one document each.

    Args:
        description: see `TextSource`.
        left_out: lines for the user about files that are not read.
    """

    def __init__(self, files: Sequence[str | Path], description: str, left_out: Sequence[str] = ()) -> None:
        self.files, self.description, self.left_out = [Path(file) for file in files], description, tuple(left_out)

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the bytes of all files."""
        return fingerprint_of(self.files)

    def documents(self) -> Iterator[Document]:
        """Yield one document per file."""
        return documents_of(self.files)


def python_stdlib(folder: Path | None = None) -> TextFiles:
    """Return the ``.py`` files of the running interpreter's standard library, without its tests and installed packages.

    Empty files are skipped, and so are the few that are not UTF-8 (on purpose: they test decoders).

    Raises:
        UserError: the interpreter has no sources on disk.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    found = walk(folder, skipped=_SKIPPED_FOLDERS, follow=False)
    files = [file for file in found if file.suffix == ".py" and file.is_file() and _is_text(file)]
    if not files:
        raise UserError("data.source", f"{folder} holds no .py files", "use --data text --data.path FILE")
    return TextFiles(files, f"standard library of Python {platform.python_version()}")


class PythonDocs:
    """The text of ``help()`` on Python's own topics: half a megabyte of English, which every Python has.

    Raises:
        UserError: this Python was installed without it.
    """

    def __init__(self) -> None:
        self.description = f"help topics of Python {platform.python_version()}"
        try:
            topics: dict[str, str] = import_module("pydoc_data.topics").topics
        except ModuleNotFoundError:
            what = f"Python at {sys.prefix} has no help topics (pydoc_data)"
            raise UserError("data.source", what, "use python-stdlib, or --data text --data.path FILE") from None
        self._texts = {name: _unwrapped(topics[name]) for name in sorted(topics)}

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of all topics, one after the other."""
        whole = "".join(self._texts.values()).encode()
        return Fingerprint(len(whole), len(self._texts), hashlib.sha256(whole).hexdigest())

    def documents(self) -> Iterator[Document]:
        """Yield one document per topic."""
        return (text_document(text, f"topic {name}") for name, text in self._texts.items())


def _unwrapped(text: str) -> str:
    """Return ``text`` with each paragraph of prose joined to one line; code, grammar and tables stay as they are."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.split("\n")
        indents = {len(line) - len(line.lstrip()) for line in lines}
        is_prose = len(indents) == 1 and lines[0].strip()[:1].isalpha() and lines[-1].rstrip()[-1:] in ".:!?)"
        paragraphs.append(" ".join(map(str.strip, lines)) if is_prose else paragraph)
    return "\n\n".join(paragraphs) + "\n"


class SyntheticTokens:
    """Seeded token ids that a model can learn: a random walk on a circle.

        token[t + 1] = (token[t] + offset[k]) mod vocab_size        k = 0, 1, 2, 3 with probability 1/2, 1/4, 1/8, 1/8

    The four offsets are drawn from the seed, and differ if the vocabulary has at least four ids.
    """

    rule = ""  # it is split by position, which no name describes
    _BLOCK_TOKENS = 1 << 20
    _CHOICE = np.array([0, 0, 0, 0, 1, 1, 2, 3])

    def __init__(self, vocab_size: int, num_tokens: int, seed: int) -> None:
        self.vocab_size, self.num_tokens, self.seed = vocab_size, num_tokens, seed
        self.description = f"random walk over {vocab_size} ids, seed {seed}"
        # Raw bits, because numpy keeps those stable across versions, but not its distributions.
        raw = np.random.PCG64(seed).random_raw(64).tolist()
        distinct = list(dict.fromkeys(bits % vocab_size for bits in raw))
        spare = [id_ for id_ in range(min(vocab_size, 8)) if id_ not in distinct]
        self.offsets = np.resize(np.array((distinct + spare)[:4], dtype=np.int64), 4)

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the settings that decide the tokens; ``num_bytes`` is 0 for lack of text."""
        choices = f"walk-1 {self.vocab_size} {self.num_tokens} {self.seed}"
        return Fingerprint(0, 1, hashlib.sha256(choices.encode()).hexdigest())

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """Yield the ids, block by block."""
        generator = np.random.PCG64(self.seed + 1)
        last = 0
        for start in range(0, self.num_tokens, self._BLOCK_TOKENS):
            bits = generator.random_raw(min(self._BLOCK_TOKENS, self.num_tokens - start)) >> np.uint64(61)
            walk = (last + np.cumsum(self.offsets[self._CHOICE[bits]])) % self.vocab_size
            last = int(walk[-1])
            yield walk

    def split(self, val_fraction: float) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield ``("train" | "val", ids)`` in blocks; the walk's last ``val_fraction`` is ``val``."""
        num_left = self.num_tokens - int(self.num_tokens * val_fraction)  # to train on
        for block in self.blocks():
            cut = min(num_left, block.size)
            yield "train", block[:cut]
            yield "val", block[cut:]
            num_left -= cut


Source = TextSource | SyntheticTokens | Tables | TokenBins


def check_source(name: str, paths: Sequence[str]) -> None:
    """Check that a source exists and accepts these paths, without opening them; raise UserError otherwise."""
    if is_hub_name(name):
        parse_hub_name(name)
    elif name not in SOURCES and not is_module_address(name):
        todo = "a path is given by --data text --data.path" if Path(name).exists() else ""
        if not todo and Path(name).suffix:
            raise UserError("data.source", f"there is no file {name}", f"give one, or one of {', '.join(SOURCES)}")
        error = unknown_name("data.source", name, (*SOURCES, "OWNER/NAME of the Hugging Face hub, or module:name"))
        raise UserError(error.field, error.what, todo or error.todo)
    takes = source_entry(name).paths
    if takes == "some" and not paths:
        raise UserError("data.path", f"the source {name} needs at least one path", "pass --data.path FILE")
    if takes == "none" and paths:
        raise UserError("data.path", f"the source {name} reads no files, got {paths[0]}", "use --data text")


def has_columns(name: str, paths: Sequence[str]) -> bool:
    """Whether a column has a meaning for this source; raises UserError if a file is missing."""
    if name == "text":
        return bool(choose(paths).tables)
    return source_entry(name).has_columns


def open_source(
    name: str, paths: Sequence[str], synthetic: SyntheticSize, *, column: str = "text", vocab_size: int | None = None
) -> Source:
    """Return the source called ``name``; raises UserError as `check_source` does, and if files are missing or empty.

    ``column`` is the text column of tables; ``vocab_size`` is that of ids that another program wrote, if it is known.
    """
    check_source(name, paths)
    if column != "text" and not source_entry(name).has_columns:
        todo = "leave it out, or name .jsonl or .parquet files by --data text"
        raise UserError("data.column", f"{column!r} is asked for, and the source {name} has no columns", todo)
    return source_entry(name)(SourceRequest(name, tuple(paths), synthetic, column, vocab_size))


def built_in(asked: SourceRequest) -> Source:
    """Return the source of this file that ``asked`` names."""
    makers: dict[str, Callable[[], Source]] = {
        "python-stdlib": python_stdlib,
        "python-docs": PythonDocs,
        "synthetic": lambda: SyntheticTokens(*astuple(asked.synthetic)),
        "bin": lambda: TokenBins(asked.paths, asked.vocab_size),
    }
    return makers[asked.name]()


def text_or_tables(asked: SourceRequest) -> Tables | TextFiles:
    """Return the source ``text``: tables if all files are tables, otherwise documents.

    Raises:
        UserError: as `choose`; a column is named and no file has columns; or a table is beside texts.
    """
    chosen = choose(asked.paths)
    tables, texts = chosen.tables, chosen.texts
    if not texts:
        return Tables(tuple(facts_of(file) for file in tables), asked.column, tuple(chosen.left_out))
    if asked.column != "text" and not tables:
        what = f"{asked.column!r} is asked for, and {texts[0]} has no columns"
        raise UserError("data.column", what, "leave it out, or name .jsonl or .parquet files")
    if tables:
        what = f"{tables[0]} has a text in each row and {texts[0]} has not"
        raise UserError("data.path", what, "write the text as rows of a .jsonl, or prepare them apart")
    return TextFiles(texts, ", ".join(asked.paths), chosen.left_out)


def _is_text(file: Path) -> bool:
    content = file.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return bool(content) and b"\0" not in content
