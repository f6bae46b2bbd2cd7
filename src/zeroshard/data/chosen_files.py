"""Decides which files the user's paths name, how each is read, and which are left out.

    a file    a table (`zeroshard.data.tables`) or a text, by its suffix in any case
    a glob    the files that it matches, each as if it was named
    a folder  its tables if it has any, but no ``.json``, which may be some program's settings; otherwise its
              `TEXT_SUFFIXES` files; links inside are followed

A file under two names is read once. `Chosen.left_out` says what was in a folder or glob and is not read, so that no
part of a corpus is missing in silence.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeroshard.data.files import is_address, suffix_of
from zeroshard.data.tables import TABLE_SUFFIXES, is_table
from zeroshard.host.errors import UserError
from zeroshard.host.masked_addresses import is_masked

TEXT_SUFFIXES = (".txt", ".md", ".py")
_COLUMNS = (".arrow", ".feather", ".orc", ".avro", ".xlsx")
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z")
_MAY_BE_NO_TEXT = (".json", ".csv", ".tsv")  # tables of text where they are named; in a folder they may be anything
_MOST_NAMED = 3  # suffixes that a line about files which are left out names


@dataclass
class Chosen:
    """The files that paths name, in order, without duplicates."""

    files: list[str] = field(default_factory=list)  # paths and addresses
    left_out: list[str] = field(default_factory=list)  # lines for the user about what is not read

    @property
    def tables(self) -> list[str]:
        """The files with one text per row."""
        return [file for file in self.files if is_table(file)]

    @property
    def texts(self) -> list[str]:
        """The files that are one text each."""
        return [file for file in self.files if not is_table(file)]


def choose(paths: Sequence[str], suffix: str = "") -> Chosen:
    """Return the files that ``paths`` name.

    Args:
        paths: files, folders, globs and addresses.
        suffix: read the files of this suffix in a folder, and leave out all others; empty: tables, else texts.

    Raises:
        UserError: a path is missing or empty, a folder has nothing to read, or a file is of a kind that is not read.
    """
    chosen, identities = Chosen(), set()
    for path in paths:
        for file in _named_by(path, suffix, chosen.left_out):
            identity = file if is_address(file) else os.path.realpath(file)
            if identity not in identities:
                identities.add(identity)
                chosen.files.append(file)
    return chosen


def walk(folder: Path, *, skipped: frozenset[str] = frozenset(), follow: bool = True) -> Iterator[Path]:
    """Yield the files in ``folder`` in sorted order, depth first, without hidden folders; each folder once.

    Args:
        skipped: names of folders to skip.
        follow: whether to follow links to folders.

    Raises:
        UserError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError("data.path", f"{error.filename} cannot be read ({error.strerror})", "check its permissions")

    seen = {os.path.realpath(folder)}
    for where, folders, names in os.walk(folder, followlinks=follow, onerror=refuse):
        inside = sorted(each for each in folders if each not in skipped and not each.startswith("."))
        places = {each: os.path.realpath(os.path.join(where, each)) for each in inside}
        folders[:] = [each for each in inside if places[each] not in seen]
        seen.update(places.values())
        for name in sorted(names):
            yield Path(where, name)


def _named_by(path: str, suffix: str, left_out: list[str]) -> Iterator[str]:
    if is_address(path):
        if is_masked(path):
            todo = "give the address again, by --data.path or --data.val-path"
            raise UserError("data.path", f"{path} lacks its secrets, which are never saved", todo)
        if any(map(str.isspace, path)):
            raise UserError("data.path", "an address has a space in it", "write it as %20")
        if not is_table(path):
            todo = "download other files first"
            raise UserError("data.path", f"{path} is none of {', '.join(TABLE_SUFFIXES)}", todo)
        yield path
        return
    found = Path(path).expanduser()
    if found.is_dir():
        yield from _of_folder(found, path, suffix, left_out)
        return
    files = [found] if found.is_file() else [Path(match) for match in sorted(glob.glob(str(found), recursive=True))]
    folders = [file for file in files if file.is_dir()]
    files = [file for file in files if file.is_file()]
    if not files:
        raise UserError("data.path", f"{path} does not exist", "check the path")
    reached = [file for file in files if any(folder in file.parents for folder in folders)]
    if folders and not reached:
        left_out.append(f"{path}: {_count(len(folders), 'folder')} that it matches left out; name them to read them")
    for file in files:
        if file.stat().st_size == 0:
            raise UserError("data.path", f"{file} is empty", "leave it out or give a file with text")
        yield _readable(file)


def _of_folder(folder: Path, named: str, wanted: str, left_out: list[str]) -> list[str]:
    """Return a folder's files of the suffix ``wanted``, or its tables, else its texts, and describe its other files."""
    if wanted:
        files = [str(file) for file in walk(folder) if suffix_of(str(file)) == wanted and file.is_file()]
        if not files:
            raise UserError("data.path", f"{named} holds no {wanted} file", "name the files")
        return files
    tables, texts, others = [], [], []
    for file in walk(folder, skipped=frozenset({"__pycache__"})):
        suffix = suffix_of(str(file))
        if not file.is_file():
            others.append(file)
        elif not file.stat().st_size:
            continue
        elif is_table(str(file)) and suffix not in _MAY_BE_NO_TEXT:
            tables.append(str(file))
        else:
            (texts if suffix in TEXT_SUFFIXES else others).append(file)
    if not tables and not texts:
        suffixes = " ".join((*TEXT_SUFFIXES, ".jsonl", ".parquet"))
        raise UserError("data.path", f"{named} holds no file with text ({suffixes})", "name the files or a glob")
    rest = [*texts, *others] if tables else others
    if rest:
        kinds = Counter(file.suffix.lower() or "without suffix" for file in rest).most_common()
        words = [f"{number} {kind}" for kind, number in kinds[:_MOST_NAMED]] + ["..."] * (len(kinds) > _MOST_NAMED)
        why = "its tables are read" if tables else f"{' '.join(TEXT_SUFFIXES)} are read"
        left_out.append(
            f"{named}: {_count(len(rest), 'file')} left out ({', '.join(words)}): {why}; name others to read them"
        )
    return tables or [str(file) for file in texts]


def _readable(file: Path) -> str:
    """Return the path under which a named file is read; raise UserError if its suffix says that it is no text."""
    suffix = suffix_of(str(file))
    if is_table(str(file)):
        return str(file)
    if suffix in _COLUMNS:
        todo = "convert it to .jsonl or .parquet"
        raise UserError("data.path", f"{file} has columns, and those of {suffix} are not read", todo)
    if suffix in _PACKED:
        tables = ", ".join(each for each in TABLE_SUFFIXES if each.count(".") == 2)
        raise UserError("data.path", f"{file} is compressed", f"unpack it; of compressed files {tables} are read")
    return str(file)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
