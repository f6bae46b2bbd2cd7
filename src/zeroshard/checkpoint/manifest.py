"""The manifest of a checkpoint: which tensors it has, where their pieces lie, and the hash that each part must have.

``manifest.json`` is written last, so a checkpoint is complete exactly if it exists. It carries a checksum of every
tensor piece, of every file's header and of itself, so that each byte of each file is covered once. This is needed
because torch and safetensors load a flipped bit without an error.

Pieces and headers are checked by XXH128 (https://xxhash.com), which is as fast as memory; SHA-256 would slow a load
down. Either detects damage. Neither proves who wrote a checkpoint, because whoever changes a file can also change the
manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from zeroshard.checkpoint.manifest_text import FORMAT, MOST_BYTES, VERSION, plain, seal, short, text, unseal
from zeroshard.checkpoint.reshard import check_tiling
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import read_bytes

MANIFEST = "manifest.json"
DAMAGED_TODO = "take an older checkpoint, or restore this one from a copy"
ITEM_BYTES = {"C64": 8, "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2} | dict.fromkeys(
    ("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1
)  # bytes per element of safetensors' dtypes
_MOST_DIMENSIONS = 64  # the limit of torch and numpy
_MOST_NAME_BYTES = 255  # of a file's name
_LARGEST = 2**63 - 1

# What a file says is checked against these types, and by `check`.
Count = Annotated[int, Strict(), Field(ge=0, le=_LARGEST)]
Word = Annotated[str, Strict(), AfterValidator(text)]
Plain = Annotated[dict[Word, Any], AfterValidator(plain)]
Interval = tuple[Count, Count]  # [start, stop) in elements of the flattened unsharded tensor


class _Exact:
    """Refuses facts that a class does not have."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Piece(_Exact):
    """Where ``interval`` of a flattened tensor lies: under ``key`` in ``file``, one-dimensional."""

    interval: Interval  # ``[start, stop)`` in elements of the flattened unsharded tensor
    file: Word  # name of a file in the checkpoint's folder
    key: Word  # the piece's name in the safetensors file
    offset: Count  # position of the piece's first byte in the file
    xxh128: Word  # hash of the piece's bytes, in hex; `xxh128sum` prints the same


@dataclass(frozen=True)
class TensorEntry(_Exact):
    """An unsharded tensor and the pieces that tile it. ``dtype`` is safetensors' name (``"F32"``)."""

    name: Word
    kind: Word
    dtype: Word
    shape: tuple[Count, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class FileEntry(_Exact):
    """The size that a file must have, and the size and hash of the safetensors header that precedes its pieces."""

    num_bytes: Count
    header_bytes: Count
    header_xxh128: Word


class Region(NamedTuple):
    """A byte range of a file and its expected hash; ``tensor`` is the tensor it belongs to, None for the header."""

    file: str
    offset: int
    num_bytes: int
    xxh128: str
    tensor: TensorEntry | None
    interval: Interval

    @property
    def holds(self) -> str:
        """A description of the content, for messages."""
        if self.tensor is None:
            return "its header"
        return f"{self.tensor.kind} of {self.tensor.name}, elements [{self.interval[0]}, {self.interval[1]})"


@dataclass(frozen=True)
class Manifest(_Exact):
    """Everything that is known about a checkpoint without opening its files."""

    step: Count  # number of optimizer steps done
    world_size: Annotated[Count, Field(ge=1)]  # number of ranks that wrote it
    files: dict[Word, FileEntry]  # size and header of each file, by the file's name
    tensors: tuple[TensorEntry, ...]  # every tensor, and where its pieces lie
    # the caller's argument of `save`; for a training run, its configuration and its position in the data
    extra: Plain = field(default_factory=dict)
    versions: dict[Word, Word] = field(default_factory=dict)  # the versions of zeroshard, torch and Python, by name
    # the optimizer's param groups, with settings and names of ``params``; empty if the source reports none
    param_groups: tuple[Plain, ...] = ()
    # each further name of a tied tensor -> the name that it is saved under
    tied: dict[Word, Word] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(entry.num_bytes for entry in self.files.values())

    def header(self, file: str) -> dict[str, dict[str, Any]]:
        """Return what the file's safetensors header must say about each of its pieces, by key."""
        found: dict[str, dict[str, Any]] = {}
        for entry, piece in self._by_file.get(file, ()):
            start, stop = piece.interval
            begin = piece.offset - self.files[file].header_bytes
            found[key_of(entry.kind, entry.name, start)] = {
                "dtype": entry.dtype,
                "shape": [stop - start],
                "data_offsets": [begin, begin + (stop - start) * ITEM_BYTES[entry.dtype]],
            }
        return found

    @cached_property
    def _by_file(self) -> dict[str, list[tuple[TensorEntry, Piece]]]:
        found: dict[str, list[tuple[TensorEntry, Piece]]] = {}
        for entry in self.tensors:
            for piece in entry.pieces:
                found.setdefault(piece.file, []).append((entry, piece))
        return found

    def regions(self) -> list[Region]:
        """Return regions that cover every byte of every file exactly once, sorted by file and offset; none is empty."""
        return list(self._regions)

    @cached_property
    def _regions(self) -> tuple[Region, ...]:
        found = [
            Region(file, 0, entry.header_bytes, entry.header_xxh128, None, (0, 0)) for file, entry in self.files.items()
        ]
        for entry in self.tensors:
            size = ITEM_BYTES[entry.dtype]
            for piece in entry.pieces:
                num_bytes = (piece.interval[1] - piece.interval[0]) * size
                if num_bytes:
                    found.append(Region(piece.file, piece.offset, num_bytes, piece.xxh128, entry, piece.interval))
        return tuple(sorted(found, key=itemgetter(0, 1)))


_MANIFEST = TypeAdapter(Manifest)
_NOTE = TypeAdapter(tuple[FileEntry, list[TensorEntry]])


def key_of(kind: str, name: str, start: int) -> str:
    """Return the key, in its file, of the piece of a tensor that begins at element ``start``."""
    return f"{kind}:{name}:{start}"


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
    """Return the manifest as JSON that contains its own checksum.

    Raises:
        ValueError: JSON cannot represent ``extra`` or ``param_groups``.
    """
    facts = {each.name: getattr(manifest, each.name) for each in dataclass_fields(manifest)}
    facts["files"] = {name: vars(entry) for name, entry in manifest.files.items()}
    facts["tensors"] = [{**vars(entry), "pieces": list(map(vars, entry.pieces))} for entry in manifest.tensors]
    return "".join(seal(facts))


def parse(path: Path) -> Manifest:
    """Read and check ``manifest.json``. Inside `parsed_once`, unchanged content is not parsed again.

    Raises:
        UserError: the file cannot be read, is not JSON, does not match its own checksum, contradicts itself, or has an
            unknown version.
    """
    try:
        content = read_bytes(path, MOST_BYTES)
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from None
    known = _parsed.get()
    if known is None:
        return _of_content(path, content)
    key = hashlib.sha256(content).digest()
    if key not in known:
        manifest = _of_content(path, content)
        known.clear()  # remember only one, because manifests are large
        known[key] = manifest
    return known[key]


@contextmanager
def parsed_once() -> Generator[None]:
    """In this block, remember the last parsed manifest: a resumed run asks for the same one four times.

    The cache is keyed by the hash of the file's bytes, never by its name or date.
    """
    token = _parsed.set({} if (around := _parsed.get()) is None else around)
    try:
        yield
    finally:
        _parsed.reset(token)


_parsed: ContextVar[dict[bytes, Manifest] | None] = ContextVar("parsed", default=None)


def _of_content(path: Path, content: bytes) -> Manifest:
    try:
        facts = unseal(content)
    except ValueError as error:
        raise _damaged(path, f"is damaged: {error}") from None
    if (facts.get("format"), facts.get("version")) != (FORMAT, VERSION):
        raise UserError(
            str(path),
            f"is of format {facts.get('format')!r} version {facts.get('version')!r}, not {FORMAT!r} version {VERSION}",
            "read it with the zeroshard release that wrote it",
        )
    try:
        manifest = _of_facts({name: value for name, value in facts.items() if name not in ("format", "version")})
        check(manifest)
    except ValueError as error:
        raise _damaged(path, f"contradicts itself ({error})") from None
    return manifest


def _of_facts(facts: dict[str, Any]) -> Manifest:
    """Make a `Manifest` from its JSON form; raise ValueError for the first fact with a wrong type or out of range."""
    missing = sorted({each.name for each in dataclass_fields(Manifest)} - facts.keys())
    if missing:
        raise ValueError(f"it has no {missing[0]!r}")
    try:
        return _MANIFEST.validate_python(facts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{short('.'.join(map(str, first['loc'])))}: {first['msg']}") from None


def entries_of(note: Any) -> tuple[FileEntry, list[TensorEntry]]:
    """Return the entries in a rank's note: of its file, and of the tensors in it; raise ValueError if it is invalid."""
    return _NOTE.validate_python(note)


def check(manifest: Manifest) -> None:
    """Check that each tensor is listed once, that pieces tile every tensor, and headers and pieces every file.

    Raises:
        ValueError: one of these does not hold, or a file's name is invalid or leads out of the folder.
    """
    _check_names(manifest)
    for entry in manifest.tensors:
        _check_sizes(entry)
        _check_tiled(entry)
        for piece in entry.pieces:
            if piece.interval[0] > piece.interval[1]:
                raise ValueError(f"a piece of {entry.name} begins at {piece.interval[0]} and ends before")
            if piece.file not in manifest.files:  # regions leave out empty pieces, so check here
                raise ValueError(f"{piece.file!r} is not listed")
    by_file = {file: list(found) for file, found in groupby(manifest.regions(), lambda region: region.file)}
    for file, entry in manifest.files.items():
        is_name = file == Path(file).name and file not in ("", ".", "..", MANIFEST) and "\0" not in file
        if not is_name or len(file.encode()) > _MOST_NAME_BYTES:
            raise ValueError(f"{file!r} is no file of a checkpoint")
        regions = by_file.get(file, [])
        check_tiling([(region.offset, region.offset + region.num_bytes) for region in regions], entry.num_bytes)


def _check_sizes(entry: TensorEntry) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"the dtype of {entry.name} is {entry.dtype!r}")
    if len(entry.shape) > _MOST_DIMENSIONS or prod(size or 1 for size in entry.shape) > _LARGEST:
        raise ValueError(f"{entry.name} has more dimensions, or elements, than a tensor can have")


def _check_names(manifest: Manifest) -> None:
    """Check that each (name, kind) is listed once, and that tied names are not saved but refer to saved names."""
    seen: set[tuple[str, str]] = set()
    for entry in manifest.tensors:
        if (entry.name, entry.kind) in seen:
            raise ValueError(f"{entry.kind} of {entry.name} is there twice")
        seen.add((entry.name, entry.kind))
    names = {name for name, _ in seen}
    for group in manifest.param_groups:
        params = group.get("params", [])
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            raise ValueError("a param group's params are not a list of names")
    for name, first in manifest.tied.items():
        if name in names or first not in names:
            raise ValueError(f"{name} cannot be another name of {first}")


def _check_tiled(entry: TensorEntry) -> None:
    try:
        check_tiling([piece.interval for piece in entry.pieces], prod(entry.shape))
    except ValueError as error:
        raise ValueError(f"{entry.kind} of {entry.name} is not tiled: {error}") from None


def _damaged(path: Path, what: str) -> UserError:
    return UserError(str(path), what, DAMAGED_TODO)
