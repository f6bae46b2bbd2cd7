"""The manifest of a checkpoint: which tensors there are, where their pieces lie, and what every file must hash to.

``manifest.json`` is written last, so a checkpoint is complete exactly when it is there. It carries a sha256 of
each file and of itself: torch and safetensors alike load a flipped bit without a word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.reshard import Interval, check_tiling
from zeroshard.errors import UserError

FORMAT = "zeroshard-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
DAMAGED_TODO = "take an older checkpoint, or restore this one from a copy"


@dataclass(frozen=True)
class Piece:
    """Where ``interval`` of a flattened tensor lies: under ``key`` in ``file``, one-dimensional."""

    interval: Interval
    file: str
    key: str


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
    """What a file of the checkpoint must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a checkpoint without opening its files.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        files: what each file must be, by name.
        tensors: every tensor, and where its pieces lie.
        extra: what the caller of `save` added.
        param_groups: the optimizer's, settings and names of ``params``; empty where the source had none to tell.
        tied: each further name of a tensor -> the name that it is saved under.
    """

    step: int
    world_size: int
    files: dict[str, FileEntry]
    tensors: tuple[TensorEntry, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    param_groups: tuple[dict[str, Any], ...] = ()
    tied: dict[str, str] = field(default_factory=dict)


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
        try:
            check_tiling([piece.interval for piece in entry.pieces], prod(entry.shape))
        except ValueError as error:
            raise ValueError(f"{entry.kind} of {entry.name} is not tiled: {error}") from None
    return tuple(merged.values())


def dump(manifest: Manifest) -> str:
    """The manifest as JSON, with its own sha256 in it."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1, allow_nan=False) + "\n"


def parse(path: Path) -> Manifest:
    """Read and check ``manifest.json``.

    Raises:
        UserError: the file is not JSON, does not match its own sha256, or is of a version unknown here.
    """
    damaged = UserError(str(path), "is damaged", DAMAGED_TODO)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise damaged from None
    if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
        raise damaged
    if (body["format"], body["version"]) != (FORMAT, VERSION):
        raise UserError(
            str(path),
            f"is of format {body['format']!r} version {body['version']!r}, not {FORMAT!r} version {VERSION}",
            "read it with the zeroshard release that wrote it",
        )
    return Manifest(
        step=body["step"],
        world_size=body["world_size"],
        files={name: FileEntry(**entry) for name, entry in body["files"].items()},
        tensors=tuple(tensor_entry(entry) for entry in body["tensors"]),
        extra=body["extra"],
        param_groups=tuple(body["param_groups"]),
        tied=body["tied"],
    )


def tensor_entry(entry: Mapping[str, Any]) -> TensorEntry:
    """A `TensorEntry` from its JSON form."""
    pieces = tuple(
        Piece((piece["interval"][0], piece["interval"][1]), piece["file"], piece["key"]) for piece in entry["pieces"]
    )
    return TensorEntry(entry["name"], entry["kind"], entry["dtype"], tuple(entry["shape"]), pieces)


def _digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
