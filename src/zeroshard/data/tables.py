"""Files with one text per row, cut into parts that workers read independently; the parts are the same on every machine.

    .parquet                  row groups, so many together that they hold about `PART_BYTES`
    .jsonl, .json             lines that begin in a range of `PART_BYTES`
    .jsonl.gz, .jsonl.zst     the same ranges of the uncompressed content; reading parts in order reads the file once
    (if a JSON list is in it instead of lines: one part)
    .csv, .tsv                one part: a quoted field may hold ends of lines. The first row names the columns

A part contains all that a process needs to make its tokens, so tokens depend neither on who makes them nor on when.
Rows that are null or empty are not documents.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

from zeroshard.data.files import (
    FileFacts,
    Fingerprint,
    is_address,
    name_of,
    open_binary,
    patiently,
    require_package,
    suffix_of,
)
from zeroshard.host.errors import UserError, shortened
from zeroshard.host.regular_files import json_of

if TYPE_CHECKING:
    import pyarrow.parquet

PART_BYTES = 8 << 20  # target size of a part's text
ROW_BATCH = 256
_JSON = (".jsonl", ".ndjson", ".json")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLE_SUFFIXES = (".parquet", *(json + packed for json in _JSON for packed in ("", ".gz", ".zst")), *_DELIMITERS)
_MOST_COMPRESSED = 16  # assumed maximum of the compression ratio; any text beyond that is in the last part
_BLOCK_BYTES = 1 << 20
LONGEST_TEXT = 256 << 20  # bytes of a line, characters of a text: what is longer is a mistake, or meant to fill memory
_LIST_BYTES = 4 << 30  # a JSON list is read as a whole


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one file."""

    index: int  # its position among all parts of the corpus
    file: FileFacts  # the file that contains the rows
    num_before: int  # bytes of the corpus' files before this one, as stored
    # begin, end: for ``.parquet`` a range of row groups, else a range of bytes in which the lines begin; ``end`` -1
    # means the end of the file
    begin: int
    end: int
    is_list: bool = False  # whether the part is the whole file, which is one JSON list


def is_table(path: str) -> bool:
    """Whether a path names a file with one text per row."""
    return name_of(path).lower().endswith(TABLE_SUFFIXES)


@dataclass(frozen=True)
class Tables:
    """A corpus of files in a stable order."""

    files: tuple[FileFacts, ...]  # the files
    column: str = "text"  # the column that contains the text
    left_out: tuple[str, ...] = field(default=(), compare=False)  # lines for the user about files that are not read

    @property
    def num_bytes(self) -> int:
        """Total size of all files, compressed if they are."""
        return sum(file.num_bytes for file in self.files)

    def parts(self) -> Iterator[Part]:
        """Yield all parts, file after file; a file is opened only when its turn comes.

        Raises:
            UserError: a file cannot be read, or lacks the column.
        """
        index = num_before = 0
        for file in self.files:
            whole = is_list(file.path)
            for begin, end in ((0, -1),) if whole else _ranges(file, self.column):
                yield Part(index, file, num_before, begin, end, whole)
                index += 1
            num_before += file.num_bytes

    def texts(self) -> Iterator[str]:
        """Yield all documents, in order; errors as of `parts` and of `PartReader.texts`."""
        with closing(PartReader(self.column)) as reader:
            for part in self.parts():
                yield from reader.texts(part)

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint of the files' names, sizes and versions; documents are not counted unread."""
        return Fingerprint(self.num_bytes, 0, hashlib.sha256(corpus_identity(self.files).encode()).hexdigest())


class PartReader:
    """Reads parts. Reading them in order is fastest, because the file of the last part stays open.

    Args:
        columns: the columns that are read; the first is that of `texts`. None: ``text``.
        numbered: whether messages name lines by number, for parts that are whole files; else by their first byte.
    """

    def __init__(self, *columns: str, numbered: bool = False) -> None:
        self.columns, self.numbered = columns or ("text",), numbered
        self._path = ""
        self._stack = ExitStack()
        self._table: Any = None  # pyarrow's ParquetFile
        self._raw: BinaryIO | None = None  # the file that _lines read, still compressed if it is
        self._lines: _Lines | None = None

    def texts(self, part: Part) -> Iterator[str]:
        """Yield the documents of a part.

        Raises:
            UserError: a row cannot be read, or is not text.
            OSError: the file failed.
        """
        for where, row in self.rows(part):
            if self.columns[0] not in row and suffix_of(part.file.path) in _DELIMITERS:
                _refuse_column(part.file.path, self.columns[0], list(row))
            if text := text_of_row(row, self.columns[0], where):
                yield text

    def rows(self, part: Part) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rows of a part, each with a description of its place; a row may lack columns or have others too.

        Raises:
            UserError: a row cannot be read, or is no object.
            OSError: the file failed.
        """
        path = part.file.path
        if path != self._path:
            self.close()
        if suffix_of(path) == ".parquet":
            yield from self._of_parquet(part)
            return
        if suffix_of(path) in _DELIMITERS:
            yield from self._of_columns(path)
            return
        for where, row in self._of_list(path) if part.is_list else self._of_lines(part):
            if not isinstance(row, dict):
                what = f"{where} cannot be read (a {type(row).__name__} is not an object)"
                raise UserError("data.path", what, _ONE_A_LINE)
            yield where, row

    def close(self) -> None:
        """Close the file."""
        self._stack.close()
        self._path, self._table, self._raw, self._lines = "", None, None, None

    def position(self, part: Part) -> int:
        """Return about how many bytes of the stored file have been read up to the end of ``part``; for progress."""
        if self._table is not None:
            return part.file.num_bytes * part.end // self._table.metadata.num_row_groups
        return min(self._raw.tell(), part.file.num_bytes) if self._raw is not None else 0

    def _of_parquet(self, part: Part) -> Iterator[tuple[str, dict[str, Any]]]:
        path = part.file.path
        if self._table is None:
            self._table, self._path = self._stack.enter_context(open_parquet(path)), path
        meta = self._table.metadata
        groups = range(part.begin, meta.num_row_groups if part.end < 0 else part.end)
        number = sum(meta.row_group(group).num_rows for group in range(part.begin))
        has_all = set(self.columns) <= set(self._table.schema_arrow.names)
        columns = list(self.columns) if has_all else None
        for batch in self._table.iter_batches(ROW_BATCH, row_groups=groups, columns=columns, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number} of {path}", row

    def _of_lines(self, part: Part) -> Iterator[tuple[str, Any]]:
        path = part.file.path
        if self._lines is not None and not self._lines.can_reach(part.begin):
            self.close()
        if self._lines is None:
            self._raw, self._path = self._stack.enter_context(open_binary(path)), path
            self._lines = _Lines(uncompressed(path, self._raw, self._stack), path)
        for number, (position, line) in enumerate(self._lines.within(part.begin, part.end), start=1):
            if line.isspace():
                continue
            where = f"line {number}" if self.numbered else f"the line at byte {position:,}"
            try:
                row = json_of(line)
            except ValueError as error:
                what = f"{where} of {path} cannot be read ({error})"
                raise UserError("data.path", what, _ONE_A_LINE) from None
            yield f"{where} of {path}", row

    def _of_columns(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rows of a file of separated values, which is read from its beginning; all values are text."""
        self.close()
        self._raw = self._stack.enter_context(open_binary(path))
        csv.field_size_limit(LONGEST_TEXT)
        raw = uncompressed(path, self._raw, self._stack)
        lines = self._stack.enter_context(io.TextIOWrapper(raw, "utf-8-sig", newline=""))
        reader, number = csv.reader(lines, delimiter=_DELIMITERS[suffix_of(path)], strict=True), 1
        todo = "write it again, with quotes around values that hold separators, quotes or ends of lines"
        try:
            names = next(reader, [])
            if twice := [name for name in self.columns if names.count(name) > 1]:
                raise UserError("data.path", f"{path} has several columns {twice[0]!r}", "give each a name of its own")
            for number, values in enumerate(reader, start=2):
                if len(values) == len(names):
                    yield f"row {number:,} of {path}", dict(zip(names, values, strict=True))
                elif values:  # an empty line is no row
                    what = f"row {number:,} of {path} has {len(values):,} values, and the first row {len(names):,}"
                    raise UserError("data.path", what, todo)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError("data.path", f"{path} cannot be read after row {number:,} ({error})", todo) from None

    def _of_list(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the values of the JSON list in a file, which is read as a whole."""
        self.close()
        self._raw = self._stack.enter_context(open_binary(path))
        content = uncompressed(path, self._raw, self._stack).read(_LIST_BYTES + 1)
        if len(content) > _LIST_BYTES:
            raise UserError("data.path", f"{path} has more than {_LIST_BYTES >> 30} GiB in one list", _ONE_A_LINE)
        try:
            rows = json_of(content)
        except ValueError as error:
            raise UserError("data.path", f"{path} cannot be read ({error})", "write it again, or as lines") from None
        for number, row in enumerate(rows, start=1):
            yield f"row {number:,} of {path}", row


def text_of_row(row: Mapping[str, Any], column: str, where: str) -> str | None:
    """Return a row's text, None if it is null; ``where`` names the row.

    Raises:
        UserError: the row lacks the column, or has something else than text in it.
    """
    todo = 'write each row as {"text": "..."}, or name its key by --data.column'
    if column not in row:
        raise UserError("data.path", f"{where} has no key {column!r}", todo)
    text = row[column]
    try:
        if not isinstance(text, str | None):
            raise TypeError(f"{column} is {type(text).__name__}, not a string")
        if text and len(text) > LONGEST_TEXT:
            raise ValueError(f"{len(text):,} characters are above the {LONGEST_TEXT:,} that are read")
        if text and not text.isascii():
            text.encode()  # refuse half of a surrogate pair
    except (ValueError, TypeError) as error:
        raise UserError("data.path", f"{where} cannot be read ({error})", todo) from None
    return text


_ONE_A_LINE = "write one JSON object a line, or rename a file that has no rows to .txt"


def is_list(path: str) -> bool:
    """Whether a ``.json`` file, compressed or not, contains one list rather than lines.

    Raises:
        UserError: it cannot be read.
    """

    def ask() -> bool:
        with ExitStack() as stack:
            file = uncompressed(path, stack.enter_context(open_binary(path)), stack)
            for _ in range(0, LONGEST_TEXT, 1 << 12):
                block = file.read(1 << 12)
                if (text := block.lstrip(b" \t\n\r\xef\xbb\xbf")) or not block:
                    return text.startswith(b"[")
        return False

    return name_of(path).lower().endswith((".json", ".json.gz", ".json.zst")) and patiently(ask, path, "try again")


class _Lines:
    """The lines of a stream that is read once, from front to back."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path, self._position, self._no_line_from = file, path, 0, 0

    def can_reach(self, begin: int) -> bool:
        """Whether the stream has not yet passed any line that begins at ``begin`` or later."""
        return self._no_line_from <= begin

    def within(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that begin in ``[begin, end)``, each with its position; ``end`` -1 has no end.

        Raises:
            UserError: a line is longer than `LONGEST_TEXT`; no more of it is read.
        """
        if self._position < begin:
            self._skip_to(begin)
        while end < 0 or self._position < end:
            line = self._file.readline(LONGEST_TEXT + 1)
            if not line:
                break
            if len(line) > LONGEST_TEXT:
                what = f"the line at byte {self._position:,} of {self._path} has more than {LONGEST_TEXT:,} bytes"
                raise UserError("data.path", what, "cut its text into several lines")
            self._no_line_from = self._position + 1
            position, self._position = self._position, self._position + len(line)
            yield position, line

    def _skip_to(self, begin: int) -> None:
        """Skip to the first line that begins at ``begin`` or later."""
        before = begin - 1  # the byte that ends a line, if one begins at ``begin``
        if self._file.seekable() and not isinstance(self._file, gzip.GzipFile):
            self._file.seek(before)
        else:
            left = before - self._position
            while left and (skipped := len(self._file.read(min(left, _BLOCK_BYTES)))):
                left -= skipped
        self._position = before
        while piece := self._file.readline(_BLOCK_BYTES):
            self._position += len(piece)
            if piece.endswith(b"\n"):
                break
        self._no_line_from = begin


def count_documents(tables: Tables, at_most: int) -> int:
    """Return the number of documents, or ``at_most`` if there are more: no more than that are read.

    Raises:
        UserError: a file or a row cannot be read.
    """
    return patiently(lambda: sum(1 for _ in islice(tables.texts(), at_most)), tables.files[0].path, "try again")


def open_parquet(path: str) -> pyarrow.parquet.ParquetFile:
    """Open a parquet file.

    Raises:
        UserError: it is not a parquet file, or is damaged.
    """
    require_package("pyarrow", "a .parquet file")
    import pyarrow
    import pyarrow.parquet

    try:
        file = path if not is_address(path) else open_binary(path, whole_ranges=True)
        return pyarrow.parquet.ParquetFile(file, memory_map=False, pre_buffer=False)
    except pyarrow.ArrowInvalid as error:
        raise UserError("data.path", f"{path} is no parquet file ({error})", "fetch it again") from None


def _ranges(file: FileFacts, column: str) -> Iterable[tuple[int, int]]:
    suffix = suffix_of(file.path)
    if suffix in _DELIMITERS:
        return [(0, -1)]
    if suffix == ".parquet":
        return patiently(lambda: list(_row_groups(file.path, column)), file.path, "try again")
    size, ends = file.num_bytes, file.num_bytes
    if suffix in (".gz", ".zst"):
        size, ends = file.num_bytes * _MOST_COMPRESSED, -1
    cuts = [*range(0, size, PART_BYTES), ends]
    return pairwise(cuts)


def _row_groups(path: str, column: str) -> Iterable[tuple[int, int]]:
    with open_parquet(path) as table:
        names = table.schema_arrow.names
        if column not in names:
            _refuse_column(path, column, names)
        kind = str(table.schema_arrow.field(column).type)
        if kind not in ("string", "large_string", "string_view", "null"):
            raise UserError("data.column", f"{column!r} of {path} is {kind}, not text", "name a column of text")
        meta = table.metadata
        place = next(i for i in range(meta.num_columns) if meta.schema.column(i).path == column)
        cuts, held = [0], 0
        for group in range(meta.num_row_groups):
            held += meta.row_group(group).column(place).total_uncompressed_size
            if held >= PART_BYTES:
                cuts.append(group + 1)
                held = 0
        if cuts[-1] < meta.num_row_groups:
            cuts.append(meta.num_row_groups)
    return pairwise(cuts)


def _refuse_column(path: str, column: str, names: Sequence[str]) -> NoReturn:
    has = f"it has {shortened(', '.join(names))}"
    raise UserError("data.column", f"{path} has no column {column!r}", f"name one by --data.column; {has}")


def uncompressed(path: str, raw: BinaryIO, stack: ExitStack) -> BinaryIO:
    """Return a stream of the uncompressed content of the file at ``path``, read from ``raw``; ``stack`` closes it."""
    suffix = suffix_of(path)
    if suffix == ".gz":
        return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw)))
    if suffix == ".zst":
        require_package("zstandard", "a .zst file")
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(stack.enter_context(stream), _BLOCK_BYTES)
    # a file of fsspec reads lines of any length
    return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, raw), _BLOCK_BYTES)


def corpus_identity(files: Sequence[FileFacts]) -> str:
    """Return one string that identifies the content of files in order, whatever folder or address they have."""
    return "\n".join(f"{name_of(file.path)} {file.num_bytes} {file.identity}" for file in files)
