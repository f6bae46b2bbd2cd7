"""``meta.json``: what a folder of prepared tokens contains, how it was made, and the checksums to verify it.

    DIR/meta.json                 this description
    DIR/train/tokens-00000.bin    token ids, little-endian uint16 (uint32 above 65,536 ids), nothing else
    DIR/train/blocks.bin          a checksum of each block of these, see `zeroshard.data.token_shard`
    DIR/val/tokens-00000.bin, blocks.bin
    DIR/tokenizer.json            only if the tokenizer was trained on this source, or was read from a file
        DIR/train/counts.bin, ends.bin, DIR/chat_template.jinja   of examples, see `zeroshard.data.examples`

The folder appears under its name in one rename, `meta.json` included, so a folder that has one is complete. `meta.json`
has a sha256 of every other file and of itself, so that no change of a folder goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from zeroshard.host.errors import UserError, shown
from zeroshard.host.masked_addresses import masked
from zeroshard.host.regular_files import open_binary, read_text, write_inside

FORMAT_VERSION = 1
META_NAME = "meta.json"
TOKENIZER_FILE, BLOCKS, COUNTS, ENDS = "tokenizer.json", "blocks.bin", "counts.bin", "ends.bin"
SPLITS = ("train", "val")
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class _Declared:
    """Refuses fields that a class does not declare."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class ShardMeta(_Declared):
    """One file of tokens: its path under the folder and its expected content."""

    file: str
    num_tokens: Count
    sha256: str


@dataclass(frozen=True)
class SplitMeta(_Declared):
    """The files of one split, in order."""

    num_tokens: Count
    shards: tuple[ShardMeta, ...]


@dataclass(frozen=True)
class SourceMeta(_Declared):
    """Where the text came from. The sha256 identifies its content; see `documents.Fingerprint`."""

    description: str
    num_bytes: Count
    num_documents: Count
    sha256: str


@dataclass(frozen=True)
class ExamplesMeta(_Declared):
    """Counts and checksums of a split that contains examples, see `zeroshard.data.examples.store`."""

    num_examples: Count
    num_counted: Count
    counts_sha256: str
    ends_sha256: str


@dataclass(frozen=True)
class DataMeta(_Declared):
    """The complete content of ``meta.json``.

    ``spec`` contains the choices that decide the tokens (source, tokenizer, val_fraction, ...): a folder is reused only
    for the same choices. ``tokenizer_sha256`` is the hash of ``tokenizer.json``, or empty if there is none. ``eos_id``
    ends each document; it is None if no id does. ``examples`` is set if the splits contain fine-tuning examples instead
    of plain text. ``block_bytes`` is the size of a block of tokens that has a checksum; 0 if there are no tokens.
    ``files`` has the sha256 of each file that is no token file, by its path under the folder; `write_meta` fills it in.
    """

    spec: Mapping[str, Any]
    source: SourceMeta
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: Count
    dtype: str
    splits: Mapping[str, SplitMeta]
    eos_id: Count | None = None
    format_version: int = FORMAT_VERSION
    examples: Mapping[str, ExamplesMeta] = field(default_factory=dict)
    block_bytes: Count = 0
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokens_sha256(self) -> str:
        """A hash of the tokens of all splits: if it is equal, training reads the same data."""
        digests = [f"{name} {shard.sha256}" for name in SPLITS for shard in self.splits[name].shards]
        digests += [f"{name} {each.counts_sha256} {each.ends_sha256}" for name, each in self.examples.items()]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def dtype_for(vocab_size: int) -> str:
    """Return the narrowest dtype of token files that can represent ids below ``vocab_size``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_meta(folder: Path, meta: DataMeta) -> None:
    """Write ``meta.json`` into ``folder``, with checksums of the other files there and of itself."""
    tokens = {shard.file for split in meta.splits.values() for shard in split.shards}
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {name: sha256_of(path) for name, path in paths.items() if name not in {META_NAME, *tokens}}
    source = replace(meta.source, description=masked(meta.source.description))
    facts = asdict(replace(meta, files=files, source=source))
    for name in ("examples", "block_bytes", "files"):
        if not facts[name]:
            del facts[name]
    text = json.dumps({**facts, "sha256": _sha256_of_facts(facts)}, indent=2)
    write_inside(folder, META_NAME, text + "\n")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal."""
    with open_binary(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of_facts(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_meta(folder: Path) -> DataMeta:
    """Read ``meta.json`` of a prepared folder.

    Raises:
        UserError: there is no folder or no ``meta.json``, or it is damaged, of another version, or names a file outside
            of the folder.
    """
    path = Path(folder) / META_NAME
    try:
        found = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        todo = "run `zeroshard prepare` first"
        if not Path(folder).is_absolute():
            todo += ", or change to the directory that the run was started in"
        raise UserError("data.dir", f"{folder} holds no prepared tokens (no {META_NAME})", todo) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, (isinstance(error, OSError) and error.strerror) or str(error)) from None
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise _damaged(path, f"format version {version!r} where {FORMAT_VERSION} is read")
    try:
        if found.pop("sha256", None) != _sha256_of_facts(found):
            raise _damaged(path, "it does not match its own checksum")
        meta = _META.validate_python(found, strict=False)
    except RecursionError:
        raise _damaged(path, "it is nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"unexpected content ({where}: {first['msg']})") from None
    if (
        meta.dtype not in DTYPES
        or set(meta.splits) != set(SPLITS)
        or (meta.examples and set(meta.examples) != set(SPLITS))
    ):
        raise _damaged(path, f"unexpected dtype {meta.dtype!r} or splits {sorted(meta.splits)}")
    if not meta.block_bytes and any(split.shards for split in meta.splits.values()):
        raise _damaged(path, "it names no blocks of tokens, and so no checksums of them")
    names = (*meta.files, *(shard.file for split in meta.splits.values() for shard in split.shards))
    if outside := [name for name in names if not _is_within(name)]:
        raise _damaged(path, f"it names {shown(outside[0])}, which is no file of the folder")
    return meta


def _is_within(name: str) -> bool:
    """Whether a name is a plain path below the folder: joined with the folder it leads nowhere else."""
    parts = PurePosixPath(name).parts
    return name == "/".join(parts) and bool(parts) and ".." not in parts and "\0" not in name


_META = TypeAdapter(DataMeta)


def _damaged(path: Path, why: str) -> UserError:
    return UserError("data.dir", f"{path} cannot be read: {why}", "delete the folder and prepare it again")
