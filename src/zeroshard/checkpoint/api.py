"""Save and load the sharded state of a run: `save`, `load`, `latest`.

Every rank writes the pieces that it owns into one file, without asking for anyone else's. What each rank wrote
reaches rank 0 through small files beside, not through collectives, so a save works under every communicator.
Loading asks for intervals, never for a rank's file: the same code reads a checkpoint at any world size and stage.

A rank that fails does not leave the others waiting: after each phase all ranks agree whether it went well, and all
of them raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as manifests
from zeroshard.checkpoint import store
from zeroshard.checkpoint.manifest import DAMAGED_TODO, MANIFEST, FileEntry, Manifest, Piece, TensorEntry
from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.errors import UserError
from zeroshard.zero.state import NamedShard, ShardReader


class Shardable(Protocol):
    """What can be saved: `Zero`, or any strategy."""

    @property
    def comm(self) -> Communicator:
        """The ranks that hold the pieces."""
        ...

    def named_shards(self) -> Iterable[NamedShard]:
        """What this rank writes; over all ranks every tensor is tiled exactly once."""
        ...

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read whatever this rank holds."""
        ...


@runtime_checkable
class HasParamGroups(Protocol):
    """What can tell the settings of its optimizer too."""

    def named_param_groups(self) -> list[dict[str, Any]]:
        """Param groups as JSON can hold them, ``params`` by name; the same on every rank."""
        ...


@runtime_checkable
class HasTiedNames(Protocol):
    """What can tell which names are one tensor."""

    def tied_names(self) -> dict[str, str]:
        """Each further name of a tensor -> the name that it is saved under."""
        ...


def save(path: str | PathLike[str], source: Shardable, *, step: int, extra: Mapping[str, Any] | None = None) -> None:
    """Save the state of ``source`` as the folder ``path``; collective, on a file system that all ranks share.

    The folder appears whole or not at all; what was there under this name stays until the new one is complete.

    Args:
        path: the checkpoint's folder, for example ``runs/demo/checkpoints/step-00001000``.
        source: a `Zero` or a strategy.
        step: number of optimizer steps done.
        extra: whatever JSON can hold (finite numbers); `load` returns it.

    Raises:
        OSError: some rank could not write (every rank raises).
        ValueError: the pieces of the ranks do not tile some tensor, or ``extra`` is no JSON.
    """
    path, comm = Path(path), source.comm
    first = comm.rank == 0
    as_json = json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    _together(comm, "make the folder", path, lambda: store.begin(path) if first else None)
    _together(comm, "write", path, lambda: _write_rank(store.temporary(path), source))
    _together(comm, "complete", path, lambda: _finish(path, source, step, as_json) if first else None)


def load(path: str | PathLike[str], target: Shardable) -> dict[str, Any]:
    """Verify the checkpoint at ``path`` and load it into ``target``; collective.

    Every file is verified first, each by one rank.

    Returns:
        What was passed as ``extra``, and ``step``.

    Raises:
        UserError: there is no complete checkpoint, or a file does not match the manifest (the file is named;
            every rank raises).
    """
    comm = target.comm
    folder, manifest = open_manifest(path)
    _verify(comm, folder, manifest)
    with store.CheckpointReader(folder, manifest) as reader:
        target.load_named_shards(reader)
    with scope(CONTROL):
        comm.barrier()  # nobody may overwrite the folder while others still read
    return {**manifest.extra, "step": manifest.step}


def open_manifest(path: str | PathLike[str]) -> tuple[Path, Manifest]:
    """The folder that holds the checkpoint ``path``, and its manifest, checked against its own sha256.

    Raises:
        UserError: there is no complete checkpoint, or its manifest is damaged.
    """
    folder = store.resolve(Path(path))
    if folder is None:
        raise UserError(str(path), "is not a complete checkpoint: no manifest.json", "name another one")
    return folder, manifests.parse(folder / MANIFEST)


def latest(folder: str | PathLike[str]) -> Path | None:
    """The newest complete checkpoint ``step-N`` in ``folder``; None where there is none."""
    steps: dict[int, Path] = {}
    for entry in Path(folder).glob("*step-*"):
        name = entry.name.removeprefix(".").removesuffix(".old")  # an old one that a killed save left aside
        number = name.removeprefix("step-")
        if number.isdecimal() and store.resolve(entry.with_name(name)):
            steps[int(number)] = entry.with_name(name)
    return steps[max(steps)] if steps else None


def _write_rank(folder: Path, source: Shardable) -> None:
    rank, world_size = source.comm.rank, source.comm.world_size
    file = f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    entries: list[TensorEntry] = []
    for shard in source.named_shards():
        start, stop = shard.interval
        if start == stop and prod(shard.shape):
            continue  # this rank owns nothing of it
        assert shard.tensor.shape == (stop - start,), f"{shard.name}: {shard.tensor.shape} for {shard.interval}"
        key = f"{shard.kind}:{shard.name}:{start}"
        assert key not in tensors, f"{key} is there twice"
        tensors[key] = shard.tensor
        dtype = store.DTYPES[shard.tensor.dtype]
        entries.append(TensorEntry(shard.name, shard.kind, dtype, shard.shape, (Piece((start, stop), file, key),)))
    written = store.write_tensors(folder / file, tensors)
    note = {"file": file, "entry": asdict(written), "tensors": [asdict(entry) for entry in entries]}
    store.write_text(_note(folder, rank), json.dumps(note))


def _finish(path: Path, source: Shardable, step: int, extra: dict[str, Any]) -> None:
    """Rank 0: gather what the ranks wrote down, write the manifest, give the folder its name."""
    folder = store.temporary(path)
    files: dict[str, FileEntry] = {}
    entries: list[TensorEntry] = []
    for rank in range(source.comm.world_size):
        try:
            note = json.loads(_note(folder, rank).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise OSError(f"{folder}: rank {rank}'s files are not here; all ranks must share the folder") from None
        files[note["file"]] = FileEntry(**note["entry"])
        entries += [manifests.tensor_entry(entry) for entry in note["tensors"]]
        _note(folder, rank).unlink()
    groups = source.named_param_groups() if isinstance(source, HasParamGroups) else []
    manifest = Manifest(
        step,
        source.comm.world_size,
        files,
        manifests.merge(entries),
        extra,
        param_groups=tuple(groups),
        tied=source.tied_names() if isinstance(source, HasTiedNames) else {},
    )
    store.write_text(folder / MANIFEST, manifests.dump(manifest))
    store.commit(path)


def _verify(comm: Communicator, folder: Path, manifest: Manifest) -> None:
    """Hash every file, each on one rank; every rank raises when one of them found damage."""
    names = sorted(manifest.files)
    damaged = 0  # one more than the file's index
    for index in range(comm.rank, len(names), comm.world_size):
        if not store.matches(folder / names[index], manifest.files[names[index]]):
            damaged = index + 1
    if damaged := _largest(comm, damaged):
        raise UserError(str(folder / names[damaged - 1]), "is damaged: it does not match the manifest", DAMAGED_TODO)


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _together(comm: Communicator, phase: str, path: Path, work: Callable[[], object]) -> None:
    """Run this rank's part of a phase; raise on every rank when it failed on any."""
    failure: Exception | None = None
    try:
        work()
    except (OSError, ValueError) as error:
        failure = error
    failed_rank = comm.world_size - _largest(comm, comm.world_size - comm.rank if failure else 0)
    if failure is not None:
        raise failure
    if failed_rank < comm.world_size:
        raise OSError(f"{path}: rank {failed_rank} could not {phase} its part")


def _largest(comm: Communicator, number: int) -> int:
    """The largest of the ranks' numbers; also a barrier."""
    message = torch.tensor([number], device=comm.control_device)
    with scope(CONTROL):
        comm.all_reduce(message, op="max").wait()
    return int(message)
