"""``meta.json``: what a folder of prepared tokens holds, from what it was made, and how to tell that it is whole.

    DIR/meta.json                 this description
    DIR/train/tokens-00000.bin    token ids, little-endian uint16 (uint32 above 65,536 ids), nothing else
    DIR/val/tokens-00000.bin
    DIR/tokenizer.json            only where the tokenizer was trained on this source

The folder appears under its name in one rename, `meta.json` and all, so a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zeroshard.errors import UserError

FORMAT_VERSION = 1
META_NAME = "meta.json"
SPLITS = ("train", "val")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class ShardMeta:
    """One file of tokens: its path under the folder, and what it must hold."""

    file: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True)
class SplitMeta:
    """The files of one split, in order."""

    num_tokens: int
    shards: tuple[ShardMeta, ...]


@dataclass(frozen=True)
class SourceMeta:
    """Where the text came from. The sha256 is the truth about its content; see `documents.Fingerprint`."""

    description: str
    num_bytes: int
    num_documents: int
    sha256: str


@dataclass(frozen=True)
class DataMeta:
    """All of ``meta.json``.

    ``spec`` holds the choices that decide the tokens (source, tokenizer, val_fraction, ...): a folder is used again
    only for the same ones. ``tokenizer_sha256`` is that of ``tokenizer.json``, or empty where there is none. ``eos_id``
    ends each document; None where nothing does, or in a folder of an earlier version.
    """

    spec: Mapping[str, Any]
    source: SourceMeta
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    dtype: str
    splits: Mapping[str, SplitMeta]
    eos_id: int | None = None
    format_version: int = FORMAT_VERSION

    @property
    def tokens_sha256(self) -> str:
        """Of the tokens of every split, wherever they lie: the same exactly where training reads the same."""
        digests = [f"{name} {shard.sha256}" for name in SPLITS for shard in self.splits[name].shards]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def dtype_for(vocab_size: int) -> str:
    """The narrowest dtype of token files that holds ids below ``vocab_size``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_meta(folder: Path, meta: DataMeta) -> None:
    """Write ``meta.json`` into ``folder``."""
    (folder / META_NAME).write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")


def read_meta(folder: Path) -> DataMeta:
    """Read ``meta.json`` of a prepared folder.

    Raises:
        UserError: there is no folder or no ``meta.json``, or it is damaged or of another version.
    """
    path = Path(folder) / META_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            "data.dir", f"{folder} holds no prepared tokens (no {META_NAME})", "run `zeroshard prepare` first"
        ) from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise _damaged(path, f"format version {version!r} where {FORMAT_VERSION} is read")
    try:
        splits = {
            name: SplitMeta(split["num_tokens"], tuple(ShardMeta(**shard) for shard in split["shards"]))
            for name, split in found.pop("splits").items()
        }
        meta = DataMeta(source=SourceMeta(**found.pop("source")), splits=splits, **found)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"unexpected content ({error})") from None
    if meta.dtype not in DTYPES or set(splits) != set(SPLITS):
        raise _damaged(path, f"unexpected dtype {meta.dtype!r} or splits {sorted(splits)}")
    return meta


def _damaged(path: Path, why: str) -> UserError:
    return UserError("data.dir", f"{path} cannot be read: {why}", "delete the folder and prepare it again")
