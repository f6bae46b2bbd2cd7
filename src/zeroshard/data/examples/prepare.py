"""Prepare examples: read rows, render, split by content, encode, write.

Complete examples are held out for validation. In a set of `MANY_DOCUMENTS` or more, those whose content hashes below
``val_fraction``, as for text (`zeroshard.data.split`). In a smaller set, as many as the fraction says and at least one:
those with the smallest hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from zeroshard.data.chat_templates import OpenTemplate, find_template, keep_template
from zeroshard.data.examples.encode import ExampleEncoder
from zeroshard.data.examples.store import ExampleWriter
from zeroshard.data.examples.texts import ExampleText, texts_of_chats, texts_of_pairs
from zeroshard.data.files import in_one_line
from zeroshard.data.meta import SPLITS, DataMeta, SourceMeta, dtype_for
from zeroshard.data.spec import DataSpec
from zeroshard.data.split import MANY_DOCUMENTS
from zeroshard.data.tables import Part, PartReader, Tables, is_list
from zeroshard.data.token_shard import BLOCK_BYTES
from zeroshard.data.tokenizer import BpeTokenizer, make_tokenizer, write_tokenizer
from zeroshard.host.errors import UserError

BY_EXAMPLE = "examples-1"  # the name of the split's rule in `meta.json`
_AT_ONCE = 256  # examples that are encoded together
_ALL = 1 << 64


def write_examples(spec: DataSpec, tables: Tables, draft: Path, shard_tokens: int) -> DataMeta:
    """Write the examples of ``spec``, whose format is ``chat`` or ``prompt``, into ``draft``; return their description.

    Raises:
        UserError: a row is not an example, or too few are left.
    """
    template = find_template(spec.template, spec.tokenizer) if spec.format == "chat" else None
    with ExitStack() as stack:
        opened = None if template is None else stack.enter_context(template.opened())
        is_val, num_examples = _validating(spec, tables)
        texts = (text.text for split, text in _texts(spec, tables, opened, is_val) if split == "train")
        tokenizer = make_tokenizer(spec.tokenizer, texts)
        encode = ExampleEncoder(tokenizer, is_chat=spec.format == "chat")
        dtype = dtype_for(tokenizer.vocab_size)
        writers = {
            split: stack.enter_context(closing(ExampleWriter(draft, split, dtype, shard_tokens))) for split in SPLITS
        }
        each = _texts(spec, tables, opened, is_val)
        while some := list(islice(each, _AT_ONCE)):
            for (split, _), encoded in zip(some, encode([text for _, text in some]), strict=True):
                writers[split].write(encoded)
        if not writers["train"].num_examples:
            what = f"{spec.val_fraction:g} leaves nothing to train on"
            raise UserError("data.val_fraction", what, "lower it, or give more rows")
        if spec.val_fraction and not writers["val"].num_examples:
            what = f"{spec.val_fraction:g} of these examples is less than one example"
            raise UserError("data.val_fraction", what, "use more rows, or a larger fraction")
        examples = {split: writer.finish() for split, writer in writers.items()}
        splits = {split: writer.tokens.finish() for split, writer in writers.items()}
    tokenizer_sha256 = write_tokenizer(draft, tokenizer) if isinstance(tokenizer, BpeTokenizer) else ""
    if template is not None:
        keep_template(draft, template)
    fingerprint = tables.fingerprint()
    described = ", ".join(spec.paths) or spec.source
    return DataMeta(
        spec.identity() | {"split": BY_EXAMPLE},
        SourceMeta(described, fingerprint.num_bytes, num_examples, fingerprint.sha256),
        tokenizer.name,
        tokenizer_sha256,
        tokenizer.vocab_size,
        dtype,
        splits,
        eos_id=tokenizer.eos_id,
        examples=examples,
        block_bytes=BLOCK_BYTES,
    )


def _texts(
    spec: DataSpec, tables: Tables, template: OpenTemplate | None, is_val: Callable[[int], bool]
) -> Iterator[tuple[str, ExampleText]]:
    """Yield every example as text, with its split, in the order of rows."""
    rows = _rows(spec, tables)
    if template is not None:
        texts = texts_of_chats(rows, template, spec.messages)
    else:
        texts = texts_of_pairs(rows, spec.prompt, spec.completion)
    for row, text in texts:
        yield "val" if is_val(_hash_of(row)) else "train", text


def _rows(spec: DataSpec, tables: Tables) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the columns of all rows in order, each with a description of its place."""
    settings = ("data.messages",) if spec.format == "chat" else ("data.prompt", "data.completion")
    for file in tables.files:
        with in_one_line(file.path), closing(PartReader(*spec.columns, numbered=True)) as reader:
            for where, row in reader.rows(Part(0, file, 0, 0, -1, is_list(file.path))):
                for column, setting in zip(spec.columns, settings, strict=True):
                    if column not in row:
                        names = ", ".join(list(row)[:10]) or "it has none"
                        raise UserError(setting, f"{where} has no column {column!r}", f"name one of its own: {names}")
                yield where, {column: row[column] for column in spec.columns}


def _validating(spec: DataSpec, tables: Tables) -> tuple[Callable[[int], bool], int]:
    """Return a function that tells whether a hash validates, and the number of examples."""
    num_examples, few = 0, set()
    for _, row in _rows(spec, tables):
        num_examples += 1
        if num_examples < MANY_DOCUMENTS:
            few.add(_hash_of(row))
    if not num_examples:
        raise UserError("data.path", f"{tables.files[0].path} holds no example", "give rows to train on")
    limit = int(spec.val_fraction * _ALL)
    if limit > 0 and num_examples < MANY_DOCUMENTS:
        if len(few) == 1:
            what = f"{tables.files[0].path} holds one example, which cannot both train and validate"
            raise UserError("data.val_fraction", what, "give more rows")
        limit = sorted(few)[min(ceil(len(few) * spec.val_fraction), len(few) - 1)]
    return lambda value: value < limit, num_examples


def _hash_of(row: Mapping[str, Any]) -> int:
    content = json.dumps(row, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8, key=BY_EXAMPLE.encode()).digest(), "little")
