"""The manifest of a checkpoint: which tensors there are, where their pieces lie, and what every file must hash to.

``manifest.json`` is written last, so a checkpoint is complete exactly when it is there. It carries a checksum of every
tensor piece, of every file's header and of itself, so that each byte of each file is covered once: torch and
safetensors alike load a flipped bit without a word.

Pieces and headers are checked by XXH128 (https://xxhash.com), which keeps up with memory where SHA-256 makes a load
wait. Either finds damage; neither proves who wrote a checkpoint, since what changes a file can change a manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.reshard import Interval, check_tiling
from zeroshard.errors import UserError

FORMAT = "zeroshard-checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
DAMAGED_TODO = "take an older checkpoint, or restore this one from a copy"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2} | dict.fromkeys(
    ("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1
)  # of safetensors' dtypes


@dataclass(frozen=True)
class Piece:
    """Where ``interval`` of a flattened tensor lies: under ``key`` in ``file``, one-dimensional.

    Attributes:
        interval: ``[start, stop)`` in elements of the flattened whole tensor.
        file: a name in the checkpoint's folder.
        key: safetensors' name of the piece.
        offset: of the piece's first byte in the file.
        xxh128: of the piece's bytes, in hex; `xxh128sum` prints the same.
    """

    interval: Interval
    file: str
    key: str
    offset: int
    xxh128: str


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor and the pieces that tile it. ``dtype`` is safetensors' name (``"F32"``)."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class FileEntry:
    """What a file of the checkpoint must be: its size, and the header (safetensors') that comes before the pieces."""

    num_bytes: int
    header_bytes: int
    header_xxh128: str


@dataclass(frozen=True)
class Region:
    """A stretch of a file, what it holds in words, and what it must hash to."""

    file: str
    offset: int
    num_bytes: int
    xxh128: str
    holds: str


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a checkpoint without opening its files.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        files: what each file must be, by name.
        tensors: every tensor, and where its pieces lie.
        extra: what the caller of `save` added; a trained run's configuration and position in its data.
        versions: of zeroshard, torch and Python, by name.
        param_groups: the optimizer's, settings and names of ``params``; empty where the source had none to tell.
        tied: each further name of a tensor -> the name that it is saved under.
    """

    step: int
    world_size: int
    files: dict[str, FileEntry]
    tensors: tuple[TensorEntry, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    param_groups: tuple[dict[str, Any], ...] = ()
    tied: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, the manifest's own not counted."""
        return sum(entry.num_bytes for entry in self.files.values())

    def regions(self) -> list[Region]:
        """Every byte of every file exactly once, in the order of files and offsets; empty pieces left out."""
        found = [
            Region(file, 0, entry.header_bytes, entry.header_xxh128, "its header") for file, entry in self.files.items()
        ]
        for entry in self.tensors:
            for piece in entry.pieces:
                start, stop = piece.interval
                num_bytes = (stop - start) * ITEM_BYTES[entry.dtype]
                if num_bytes:
                    holds = f"{entry.kind} of {entry.name}, elements [{start}, {stop})"
                    found.append(Region(piece.file, piece.offset, num_bytes, piece.xxh128, holds))
        return sorted(found, key=lambda region: (region.file, region.offset))


def merge(entries: list[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Join the ranks' entries of each (name, kind) and check that together they tile the tensor.

    Raises:
        ValueError: ranks disagree on shape or dtype, or the pieces do not tile the tensor exactly once.
    """
    merged: dict[tuple[str, str], TensorEntry] = {}
    for entry in entries:
        key = (entry.name, entry.kind)
        known = merged.setdefault(key, TensorEntry(entry.name, entry.kind, entry.dtype, entry.shape, ()))
        if (known.dtype, known.shape) != (entry.dtype, entry.shape):
            raise ValueError(
                f"ranks disagree on {entry.kind} of {entry.name}: {known.dtype} {list(known.shape)} "
                f"and {entry.dtype} {list(entry.shape)}"
            )
        merged[key] = TensorEntry(*key, known.dtype, known.shape, known.pieces + entry.pieces)
    for entry in merged.values():
        _check_tiled(entry)
    return tuple(merged.values())


def dump(manifest: Manifest) -> str:
    """The manifest as JSON, with its own sha256 in it."""
    return _text({"format": FORMAT, "version": VERSION, **asdict(manifest)})


def parse(path: Path) -> Manifest:
    """Read and check ``manifest.json``.

    Raises:
        UserError: the file cannot be read, is not JSON, does not match its own sha256, contradicts itself, or is of a
            version unknown here.
    """
    try:
        text = path.read_bytes().decode()
        body = json.loads(text)
        # Written again it must be the same text: a changed blank would not change what is read.
        whole = isinstance(body, dict) and body.pop("sha256", None) == _digest(body) and _text(body) == text
    except (ValueError, RecursionError):
        raise _damaged(path, "is damaged: it is not JSON") from None
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from None
    if not whole:
        raise _damaged(path, "is damaged: it does not match its own checksum")
    if (body.get("format"), body.get("version")) != (FORMAT, VERSION):
        raise UserError(
            str(path),
            f"is of format {body.get('format')!r} version {body.get('version')!r}, not {FORMAT!r} version {VERSION}",
            "read it with the zeroshard release that wrote it",
        )
    try:
        manifest = Manifest(
            step=body["step"],
            world_size=body["world_size"],
            files={name: FileEntry(**entry) for name, entry in body["files"].items()},
            tensors=tuple(tensor_entry(entry) for entry in body["tensors"]),
            extra=body["extra"],
            versions=body["versions"],
            param_groups=tuple(body["param_groups"]),
            tied=body["tied"],
        )
        check(manifest)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise _damaged(path, f"contradicts itself ({error})") from None
    return manifest


def check(manifest: Manifest) -> None:
    """Check that pieces tile every tensor, and headers and pieces every file.

    Raises:
        ValueError: they do not, or a file's name leads out of the folder.
    """
    for entry in manifest.tensors:
        _check_tiled(entry)
    by_file = {file: list(found) for file, found in groupby(manifest.regions(), lambda region: region.file)}
    for file, entry in manifest.files.items():
        if file != Path(file).name or file in ("", ".", "..", MANIFEST):
            raise ValueError(f"{file!r} is no file of a checkpoint")
        regions = by_file.pop(file, [])
        check_tiling([(region.offset, region.offset + region.num_bytes) for region in regions], entry.num_bytes)
    if by_file:
        raise ValueError(f"{next(iter(by_file))!r} is not listed")


def tensor_entry(entry: Mapping[str, Any]) -> TensorEntry:
    """A `TensorEntry` from its JSON form."""
    pieces = tuple(
        Piece(
            (piece["interval"][0], piece["interval"][1]), piece["file"], piece["key"], piece["offset"], piece["xxh128"]
        )
        for piece in entry["pieces"]
    )
    return TensorEntry(entry["name"], entry["kind"], entry["dtype"], tuple(entry["shape"]), pieces)


def _check_tiled(entry: TensorEntry) -> None:
    try:
        check_tiling([piece.interval for piece in entry.pieces], prod(entry.shape))
    except ValueError as error:
        raise ValueError(f"{entry.kind} of {entry.name} is not tiled: {error}") from None


def _damaged(path: Path, what: str) -> UserError:
    return UserError(str(path), what, DAMAGED_TODO)


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps({**body, "sha256": _digest(body)}, indent=1, allow_nan=False) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
