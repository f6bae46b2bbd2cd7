"""Small tables of documents in every form that is read."""

import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

from zeroshard.data.files import facts_of
from zeroshard.data.tables import PartReader, Tables

KINDS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst")


def documents(num: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [
        f"{seed}/{i} " + " ".join(draw.choices(("cat", "sat", "mat", "über"), k=draw.randrange(30))) for i in range(num)
    ]


def write_table(path: Path, texts: list[str], *, group: int = 10, column: str = "text") -> Path:
    lines = b"".join(json.dumps({"id": i, column: text}).encode() + b"\n" for i, text in enumerate(texts))
    if path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), column: texts}), path, row_group_size=group)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.name.endswith(".zst"):
        path.write_bytes(zstandard.compress(lines))
    else:
        path.write_bytes(lines)
    return path


def tables_of(*paths: Path, column: str = "text") -> Tables:
    return Tables(tuple(facts_of(str(path)) for path in paths), column)


def read_all(tables: Tables) -> list[list[str]]:
    """The documents of each part, in order."""
    reader = PartReader(tables.column)
    try:
        return [list(reader.texts(part)) for part in tables.parts()]
    finally:
        reader.close()
