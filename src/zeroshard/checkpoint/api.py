"""Save and load the sharded state of a run: `save`, `load`, `newest_valid`.

Every rank writes the pieces that it owns into one file and needs no other rank's pieces. The description of each rank's
file reaches rank 0 through small files in the same folder, not through collectives, so a save works under every
communicator. Loading asks for intervals of tensors, never for a rank's file, so the same code reads a checkpoint at any
world size and stage.

No call needs memory for the unsharded model: a save writes from the memory of the engine's state, and a load reads one
piece of one tensor at a time.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from math import prod
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import zeroshard
from zeroshard.checkpoint import folder as folders
from zeroshard.checkpoint import manifest as manifests
from zeroshard.checkpoint import store
from zeroshard.checkpoint.manifest import MANIFEST, FileEntry, Manifest, Piece, TensorEntry
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.verify import damages, share
from zeroshard.comm import Communicator, PeerError
from zeroshard.comm.agree import agreement, first_message, send_bytes
from zeroshard.comm.every_rank import call_of_every_rank
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import write_inside
from zeroshard.optim.named_shards import NamedShard, ShardReader


class Saveable(Protocol):
    """An object whose state can be saved.

    Three more members are used if it has them: ``named_param_groups()``, the optimizer's param groups in a form that
    JSON can represent, ``params`` by name, the same on every rank; ``tied_names()``, each further name of a tied tensor
    -> the name that it is saved under; and ``unsettled()``, lines that must be the same on every rank.
    """

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks that own the pieces."""

    def named_shards(self) -> Iterable[NamedShard]:
        """Return the pieces that this rank writes; over all ranks every tensor is tiled exactly once."""


class Shardable(Saveable, Protocol):
    """An object whose state can be saved and loaded: `Zero`, or any strategy.

    Two more members are used if it has them: ``load_param_groups(saved)`` restores the groups' settings, and
    ``resume_at(step)`` has it go on as if ``step`` optimizer steps were done.
    """

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read every piece that this rank needs from ``reader``."""


def save(path: str | PathLike[str], source: Saveable, *, step: int, extra: Mapping[str, Any] | None = None) -> None:
    """Save the state of ``source`` as the folder ``path``; collective, on a file system that all ranks share.

    The folder appears complete or not at all; a checkpoint that had this name stays until the new one is complete.
    `BackgroundSaver` does the same in a background thread while training continues.

    Args:
        path: the checkpoint's folder, for example ``runs/demo/checkpoints/step-00001000``.
        source: a `Zero` or a strategy.
        step: number of optimizer steps done.
        extra: any value that JSON can represent, without NaN or Inf; `load` returns it.

    Raises:
        OSError: some rank could not write; every rank raises, with the reason and the rank.
        ValueError: the ranks' pieces do not tile some tensor, JSON cannot represent ``extra``, it or the name of
            ``path`` has another ``step``, ``step`` is no whole number from 0 on, or ranks have changed weights or
            gradients in other ways.
    """
    path, comm = Path(path), source.comm
    call_of_every_rank(comm, "zeroshard.save")
    first = comm.rank == 0
    try:
        with making_folder(comm, source):
            facts = facts_of(path, source, step, extra)
            if first:
                store.begin(path)
        with agreement(comm, phase="writing"):
            write_rank(store.temporary(path), comm, collect(source))
        with agreement(comm, phase="completing"):
            if first:
                finish(path, facts)
    except (OSError, ValueError):
        if first:
            give_up(path)
        raise


def load(
    path: str | PathLike[str], target: Shardable, *, verified: bool = False, settings: bool = True
) -> dict[str, Any]:
    """Verify the checkpoint at ``path`` and load it into ``target``; collective.

    It loads weights, buffers, averages, the states of the optimizers that ``target`` has now, and, as
    ``optimizer.load_state_dict`` does, the settings of their param groups: ``lr``, ``weight_decay``, ``betas``.
    Everything is verified before anything in ``target`` changes; the ranks share that work.

    Args:
        path: the checkpoint's folder.
        target: a `Zero` or a strategy, of any kind, stage and world size.
        verified: True skips verification, because the checkpoint is known to be intact, as after `newest_valid`.
        settings: whether param groups get the saved settings, if a saved group has the same parameters; ``foreach``,
            ``fused`` and ``capturable`` are never changed. False: the optimizer keeps its own settings.

    Returns:
        The ``extra`` that was passed to `save`, and ``step``.

    Raises:
        UserError: there is no complete checkpoint, or a file does not match the manifest (the error names the file;
            every rank raises).
        ValueError: the checkpoint was saved from a model with other tensors.
    """
    comm = target.comm
    call_of_every_rank(comm, "zeroshard.load")
    with manifests.parsed_once():
        failure = None if verified else _open_and_verify(comm, Path(path))
        if failure is not None:
            raise failure
        folder, manifest = open_manifest(path)
    # All ranks leave together: nobody may overwrite the folder while others still read.
    with CheckpointReader(folder, manifest, settings=settings) as reader, agreement(comm, phase="loading"):
        target.load_named_shards(reader)
    if (resume_at := getattr(target, "resume_at", None)) is not None:
        resume_at(manifest.step)
    if settings and (load_groups := getattr(target, "load_param_groups", None)) is not None:
        load_groups(manifest.param_groups)
    return {**manifest.extra, "step": manifest.step}


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that cannot be resumed from: if ``complete``, it is damaged; otherwise it was never finished."""

    path: Path
    complete: bool
    why: str


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from, and the newer ones that cannot be used."""

    path: Path | None  # the newest checkpoint that is complete and valid; None if there is none
    passed_over: tuple[Rejected, ...]  # the newer checkpoints, newest first


def newest_valid(comm: Communicator, folder: str | PathLike[str]) -> Choice:
    """Find and verify the newest checkpoint ``step-N`` in ``folder`` that is complete and intact; collective.

    Rank 0 lists the folder, all ranks verify together, and all return the same.
    """
    call_of_every_rank(comm, "zeroshard.newest_valid")
    found = [[each.path.name, each.complete] for each in folders.find(folder)] if comm.rank == 0 else []
    names = json.loads(send_bytes(comm, json.dumps(found).encode(), src=0))
    passed_over: list[Rejected] = []
    for name, complete in names:
        path = Path(folder) / name
        failure: UserError | None = None
        if complete:
            failure = _open_and_verify(comm, path)
            if failure is None:
                return Choice(path, tuple(passed_over))
        why = f"{failure.field} {failure.what}" if failure else f"it was never completed (no {MANIFEST})"
        passed_over.append(Rejected(path, complete, why))
    return Choice(None, tuple(passed_over))


def open_manifest(path: str | PathLike[str]) -> tuple[Path, Manifest]:
    """Return the folder that holds the checkpoint ``path``, and its manifest, checked against its own sha256.

    Raises:
        UserError: there is no complete checkpoint, its manifest is damaged, or it is of another step than its name says
            or of another run than those beside it.
    """
    path = Path(path)
    folder = store.resolve(path)
    if folder is None:
        raise folders.no_checkpoint(path)
    manifest = manifests.parse(folder / MANIFEST)
    misplacement = folders.misplaced(path, manifest)
    if misplacement is not None:
        raise misplacement
    return folder, manifest


def read_manifest(path: str | PathLike[str]) -> Manifest:
    """Return the manifest of the checkpoint at ``path``; raises as `open_manifest` does."""
    return open_manifest(path)[1]


# -- the phases of a save, which `BackgroundSaver` runs in the background ----------------------------------------------


@dataclass(frozen=True)
class Facts:
    """The content of a manifest apart from its files, tensors and versions."""

    step: int
    world_size: int
    extra: dict[str, Any]
    param_groups: tuple[dict[str, Any], ...]
    tied: dict[str, str]


def facts_of(path: Path, source: Saveable, step: int, extra: Mapping[str, Any] | None) -> Facts:
    """Collect the manifest's facts as they are now, because ``extra`` and the optimizer's settings may change later.

    Raises:
        ValueError: as `save`.
    """
    if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
        raise ValueError(f"step: {step!r} is not a whole number from 0 on; give the number of optimizer steps done")
    if what := folders.other_step(path, int(step)):
        raise ValueError(f"path: the checkpoint {what}; name it {folders.step_name(int(step))}")
    try:
        as_json = json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra: {error}; JSON must be able to hold it") from None
    if as_json.get("step", step) != step:
        raise ValueError(f"extra: its step, {as_json['step']!r}, is not the step {step} of the save; rename the key")
    groups = getattr(source, "named_param_groups", list)()
    tied = getattr(source, "tied_names", dict)()
    return Facts(int(step), source.comm.world_size, as_json, tuple(groups), tied)


@contextmanager
def making_folder(comm: Communicator, source: Saveable) -> Generator[None]:
    """Compare, at the end of this block, what ranks have done to the source: see `Saveable`. Collective."""
    with agreement(comm, "save", "do the same on every rank before it", phase="making the folder") as compared:
        yield
        compared += getattr(source, "unsettled", list)()


def collect(source: Saveable) -> list[NamedShard]:
    """Return this rank's non-empty pieces, and those of empty tensors; they share the source's memory."""
    return [shard for shard in source.named_shards() if shard.interval[0] < shard.interval[1] or not prod(shard.shape)]


def write_rank(
    folder: Path,
    comm: Communicator,
    shards: Iterable[NamedShard],
    progress: Callable[[int], None] = lambda num_bytes: None,
    reading: store.Reading = nullcontext,
) -> None:
    """Write this rank's file, and beside it a note that describes it; `reading` as for `store.write_tensors`."""
    if comm.rank and not folder.is_dir():  # paths may differ, as where a file system is mounted elsewhere
        what = f"rank {comm.rank} does not find the folder {folder} that rank 0 has made"
        raise FileNotFoundError(f"{what}; give every rank the same path, on a file system that all ranks share")
    file = f"rank-{comm.rank:05d}-of-{comm.world_size:05d}.safetensors"
    by_key: dict[str, NamedShard] = {}
    for shard in shards:
        start, stop = shard.interval
        assert shard.tensor.shape == (stop - start,), f"{shard.name}: {shard.tensor.shape} for {shard.interval}"
        key = manifests.key_of(shard.kind, shard.name, start)
        assert key not in by_key, f"{key} is there twice"
        by_key[key] = shard
    tensors: dict[str, Tensor] = {key: shard.tensor for key, shard in by_key.items()}
    written = store.write_tensors(folder / file, tensors, progress, reading)
    entries = [
        TensorEntry(
            shard.name,
            shard.kind,
            store.DTYPES[shard.tensor.dtype],
            shard.shape,
            (Piece(shard.interval, file, key, *written.pieces[key]),),
        )
        for key, shard in by_key.items()
    ]
    note = {"file": file, "entry": asdict(written.file), "tensors": [asdict(entry) for entry in entries]}
    write_inside(folder, _rank_manifest_path(folder, comm.rank).name, json.dumps(note))


def finish(path: Path, facts: Facts, progress: Callable[[], None] = lambda: None) -> None:
    """On rank 0: gather the ranks' notes, write the manifest, and rename the folder to its final name.

    ``progress`` is called after each file that was read or written.
    """
    folder = store.temporary(path)
    files: dict[str, FileEntry] = {}
    entries: list[TensorEntry] = []
    for rank in range(facts.world_size):
        try:
            note = json.loads(_rank_manifest_path(folder, rank).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise OSError(f"{folder}: rank {rank}'s files are not here; all ranks must share the folder") from None
        files[note["file"]], own = manifests.entries_of((note["entry"], note["tensors"]))
        entries += own
        _rank_manifest_path(folder, rank).unlink()
        progress()
    versions = {
        "zeroshard": zeroshard.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    tensors = manifests.merge(entries)
    manifest = Manifest(
        facts.step, facts.world_size, files, tensors, facts.extra, versions, facts.param_groups, facts.tied
    )
    manifests.check(manifest)
    write_inside(folder, MANIFEST, manifests.dump(manifest))
    progress()
    store.commit(path)
    progress()


def give_up(path: Path) -> None:
    """On rank 0: delete what a failed save has written, as far as possible; otherwise the next save deletes it."""
    try:
        store.remove(store.temporary(path))
    except OSError:
        return  # the caller reports the failure of the save itself


# -- verifying together ----------------------------------------------------------------------------------------------


def _open_and_verify(comm: Communicator, path: Path) -> UserError | None:
    """Return what is wrong with a checkpoint, the same on every rank; None if it is intact. Collective."""
    opened: tuple[Path, Manifest] | None = None
    failure: UserError | None = None
    try:
        opened = open_manifest(path)
    except UserError as error:
        failure = error
    failure = _first_error(comm, failure)
    if failure is not None or opened is None:
        return failure
    return _first_damage(comm, *opened)


def _first_damage(comm: Communicator, folder: Path, manifest: Manifest) -> UserError | None:
    """Hash every region, each on one rank; return the first rank's first damage, the same on every rank. Collective."""
    regions = manifest.regions()
    own = [regions[index] for index in share(regions, comm.rank, comm.world_size)]
    found = damages(folder, manifest, own)
    return _first_error(comm, found[0].error() if found else None)


def _first_error(comm: Communicator, error: UserError | None) -> UserError | None:
    try:
        words = first_message(comm, json.dumps([error.field, error.what, error.todo]) if error else None)
    except PeerError:  # a peer that is lost does not hide this rank's own error
        if error is None:
            raise
        return error
    return UserError(*json.loads(words[1])) if words else None


def _rank_manifest_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"
