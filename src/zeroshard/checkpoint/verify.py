"""Verify that a checkpoint matches its manifest: every byte is hashed, by one process or shared among ranks.

Files are read here, not mapped. If a mapped file is too short or its disk fails, the process is killed without a
message; a read gives an error that names the file. Verified files may be mapped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import xxhash

from zeroshard.checkpoint import store
from zeroshard.checkpoint.folder import misplaced, no_checkpoint
from zeroshard.checkpoint.manifest import DAMAGED_TODO, MANIFEST, Manifest, Region, parse
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import open_binary

_LENGTH_BYTES = 8  # size of the header length, which precedes the header
READ_BYTES = 1 << 18  # one reused buffer per region, small enough to be hashed from the CPU cache
READERS = 4  # at least so many threads, even if torch uses fewer: a disk serves several reads at once


@dataclass(frozen=True)
class Damage:
    """What is wrong with one file of a checkpoint, or with its folder."""

    file: Path
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"

    def error(self) -> UserError:
        """Return the damage as a one-line error for the user."""
        return UserError(str(self.file), self.what, DAMAGED_TODO)


def verify(path: str | PathLike[str]) -> tuple[Damage, ...]:
    """Return everything that is wrong with the checkpoint at ``path``; empty if it is intact. Needs one process only.

    A checkpoint of another step than its folder's name says, or of another run than those beside it, is damaged too.

    Raises:
        UserError: there is no complete checkpoint there (no manifest), or it has an unknown version.
    """
    folder = store.resolve(Path(path))
    if folder is None:
        raise no_checkpoint(path)
    try:
        manifest = parse(folder / MANIFEST)
    except UserError as error:
        if error.todo != DAMAGED_TODO:  # an unknown version
            raise
        return (Damage(folder / MANIFEST, error.what),)
    misplacement = misplaced(Path(path), manifest)
    found = (Damage(Path(path), misplacement.what),) if misplacement else ()
    return found + damages(folder, manifest, manifest.regions())


def damages(folder: Path, manifest: Manifest, regions: Sequence[Region]) -> tuple[Damage, ...]:
    """Return what is wrong with ``regions`` and with the sizes of their files, in the order of ``regions``."""
    look = partial(damage_of, folder, manifest)
    with ThreadPoolExecutor(max(READERS, store.num_threads()), "checkpoint-verify") as pool:
        found = [damage for damage in pool.map(look, regions) if damage]
    return tuple(dict.fromkeys(found))  # report a wrong file size once, not for each region


def damage_of(folder: Path, manifest: Manifest, region: Region) -> Damage | None:
    """Return what is wrong with a region, or with the size of its file; None if it is intact."""
    path, expected = folder / region.file, manifest.files[region.file].num_bytes
    digest = xxhash.xxh3_128()
    try:
        with open_binary(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected:
                return Damage(path, f"is damaged: it has {size} bytes of {expected}")
            position, end = region.offset, region.offset + region.num_bytes
            buffer = memoryview(bytearray(min(READ_BYTES, region.num_bytes)))
            while position < end:
                num_read = os.preadv(file.fileno(), [buffer[: end - position]], position)
                if not num_read:
                    return Damage(path, f"is damaged: it ends at byte {position} of {expected}")
                digest.update(buffer[:num_read])
                position += num_read
    except FileNotFoundError:
        return Damage(path, "is missing")
    except OSError as error:
        return Damage(path, f"cannot be read ({error.strerror})")
    if digest.hexdigest() != region.xxh128:
        return Damage(path, f"is damaged: {region.holds}, does not match the manifest")
    if region.tensor is None and header_of(path, region.num_bytes) != manifest.header(region.file):
        return Damage(path, "is damaged: its header describes other tensors than the manifest")
    return None


def header_of(path: Path, num_bytes: int) -> Any:
    """Return the parsed header in the first ``num_bytes`` of a safetensors file; None if it cannot be read."""
    try:
        with open_binary(path) as file:
            head = file.read(num_bytes)
        return json.loads(head[_LENGTH_BYTES:]) if len(head) == num_bytes else None
    except (OSError, ValueError, RecursionError):
        return None


def share(regions: Sequence[Region], rank: int, world_size: int) -> list[int]:
    """Return the indices of the regions that ``rank`` verifies: consecutive, and about as many bytes for every rank.

    The ranks that saved a checkpoint get their own files, which may still be in their machines' page cache.
    """
    total = sum(region.num_bytes for region in regions)
    chosen: list[int] = []
    before = 0
    for index, region in enumerate(regions):
        middle = 2 * before + region.num_bytes  # twice the region's middle, to stay in integers
        if min(middle * world_size // max(2 * total, 1), world_size - 1) == rank:
            chosen.append(index)
        before += region.num_bytes
    return chosen
