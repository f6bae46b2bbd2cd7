"""Rows of tables as dicts, for examples that need more than one column of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from zeroshard.data.files import in_one_line, suffix_of
from zeroshard.data.tables import ROW_BATCH, Tables, is_list, open_parquet, opened, rows_of_list
from zeroshard.errors import UserError
from zeroshard.regular_files import json_of


def rows_of(tables: Tables, columns: Sequence[str], settings: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all rows in order, each with a description of its place.

    Args:
        tables: the files.
        columns: the columns that each row must have.
        settings: for each column the setting that names it, such as ``data.prompt``; for error messages.

    Raises:
        UserError: a file or a row cannot be read, or a row lacks a column.
    """
    for file in tables.files:
        with ExitStack() as stack, in_one_line(file.path):
            if suffix_of(file.path) == ".parquet":
                yield from _of_parquet(file.path, columns, settings, stack)
            else:
                yield from _of_json_lines(file.path, columns, settings, stack)


def _of_parquet(
    path: str, columns: Sequence[str], settings: Sequence[str], stack: ExitStack
) -> Iterator[tuple[str, dict[str, Any]]]:
    table = stack.enter_context(open_parquet(path))
    names = table.schema_arrow.names
    for column, setting in zip(columns, settings, strict=True):
        if column not in names:
            raise _no_column(path, column, setting, names)
    number = 0
    for batch in table.iter_batches(ROW_BATCH, columns=list(columns), use_threads=False):
        for row in batch.to_pylist():
            number += 1
            yield f"row {number} of {path}", row


def _of_json_lines(
    path: str, columns: Sequence[str], settings: Sequence[str], stack: ExitStack
) -> Iterator[tuple[str, dict[str, Any]]]:
    file = opened(path, stack)
    for where, row in rows_of_list(path, file) if is_list(path) else _rows_of_lines(path, file):
        if not isinstance(row, dict):
            raise UserError("data.path", f"{where} is {type(row).__name__}, not an object", "write one object a line")
        for column, setting in zip(columns, settings, strict=True):
            if column not in row:
                raise _no_column(where, column, setting, row)
        yield where, {column: row[column] for column in columns}


def _rows_of_lines(path: str, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        where = f"line {number} of {path}"
        try:
            row = json_of(line)
        except ValueError as error:
            raise UserError("data.path", f"{where} cannot be read ({error})", "write one JSON object a line") from None
        yield where, row


def _no_column(where: str, column: str, setting: str, has: Sequence[str] | dict[str, Any]) -> UserError:
    names = ", ".join(str(name) for name in list(has)[:10])
    return UserError(setting, f"{where} has no column {column!r}", f"name one of its own: {names or 'it has none'}")
