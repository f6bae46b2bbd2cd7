"""Consolidate a checkpoint into unsharded tensors, in one process: no ranks, no process group, no model.

    pieces of rank 0  |-----|        |---|
    pieces of rank 1        |--|         |-----|
    consolidated      [a tensor]     [ another ]

Pieces are read through memory maps and copied to their places one by one, so the peak memory is the result and one
piece. If a folder to write to is given, not even the result is in memory: it is written as it is read, and the returned
tensors are memory maps of the written files.
"""

from __future__ import annotations

import json
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from zeroshard.checkpoint.api import open_manifest
from zeroshard.checkpoint.manifest import Manifest, TensorEntry
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.store import TORCH_DTYPES
from zeroshard.checkpoint.streamed_safetensors import StreamedTensor, drafted, intervals, write_streamed
from zeroshard.checkpoint.verify import damages
from zeroshard.optim.classes.plain_states import nested
from zeroshard.optim.named_shards import OUTER_KINDS, SCALAR_KINDS, is_of_optimizer, is_of_replica
from zeroshard.zero.ema.average import EMA

_METADATA = {"format": "pt"}


def consolidate(path: str | PathLike[str], out: str | PathLike[str] | None = None) -> dict[str, Any]:
    """Return a checkpoint's unsharded state, whatever strategy and number of ranks wrote it; offline, in one process.

    Every file is verified first.

    Args:
        path: the checkpoint.
        out: a new folder for ``model.safetensors``, ``optimizer.safetensors`` and ``ema.safetensors`` (the last two
            only if they would not be empty), written as they are read; the returned tensors are then memory maps of
            these files. None: the returned tensors are in memory.

    Returns:
        - ``"model"``: name -> tensor, for parameters and buffers, with tied ones under all of their names: the argument
            of ``model.load_state_dict`` of the unsharded model.
        - ``"optimizer"``: ``{"state": {name: {kind: tensor}}, "param_groups": [...]}``; in a group ``"params"`` are
            names. This is the form of `torch.distributed.checkpoint.state_dict`. The state is empty before the first
            step and for an optimizer that has none.
        - ``"ema"``: name -> averaged weight, if an average was saved.
        - ``"step"``: number of optimizer steps done.
        - ``"extra"``: the ``extra`` that was passed to `save`.

    Raises:
        UserError: there is no complete checkpoint, it is damaged, or ``out`` exists and is not empty, or cannot be
            written.
    """
    folder, manifest = verified_manifest(path)
    with CheckpointReader(folder, manifest) as reader:
        if out is None:
            tensors = {(entry.name, entry.kind): _read(reader, entry) for entry in _of_one_process(manifest)}
        else:
            tensors = _write_and_map(reader, manifest, Path(out))
    return _state(manifest, tensors)


def verified_manifest(path: str | PathLike[str]) -> tuple[Path, Manifest]:
    """Verify every byte of the checkpoint ``path`` in this process; return the folder that holds it, and its manifest.

    Raises:
        UserError: there is no complete checkpoint, or a file does not match the manifest; the error names the file.
    """
    folder, manifest = open_manifest(path)
    for damage in damages(folder, manifest, manifest.regions()):
        raise damage.error()
    return folder, manifest


def _streamed(reader: CheckpointReader, entry: TensorEntry, name: str) -> StreamedTensor:
    """Return a saved tensor as one to be written incrementally, read a few megabytes at a time."""

    def parts() -> Any:
        return (reader.read(entry.name, entry.kind, interval) for interval in intervals(prod(entry.shape)))

    return StreamedTensor(name, TORCH_DTYPES[entry.dtype], entry.shape, parts)


def _read(reader: CheckpointReader, entry: TensorEntry) -> Tensor:
    return reader.read(entry.name, entry.kind, (0, prod(entry.shape))).view(entry.shape)


def _of_one_process(manifest: Manifest) -> list[TensorEntry]:
    """Return the entries that a single-process run would have.

    This leaves out the state of the outer optimizer of replicas, the state of single replicas, and what is of the
    engine's own: numbers of roundings, digests of frozen weights.
    """
    others = OUTER_KINDS | SCALAR_KINDS
    return [entry for entry in manifest.tensors if entry.kind not in others and not is_of_replica(entry.name)]


def _write_and_map(reader: CheckpointReader, manifest: Manifest, out: Path) -> dict[tuple[str, str], Tensor]:
    files: dict[str, dict[str, TensorEntry]] = {"model": {}}
    for entry in _of_one_process(manifest):
        if entry.kind in ("param", "buffer"):
            files["model"][entry.name] = entry
        elif entry.kind == EMA:
            files.setdefault(EMA, {})[entry.name] = entry
        else:
            files.setdefault("optimizer", {})[f"{entry.name}:{entry.kind}"] = entry
    groups = {"param_groups": json.dumps(list(manifest.param_groups))}
    with drafted(out) as draft:
        for file, entries in files.items():
            metadata = {**_METADATA, **(groups if file == "optimizer" else {})}
            tensors = [_streamed(reader, entry, key) for key, entry in entries.items()]
            write_streamed(draft / f"{file}.safetensors", tensors, metadata)
    mapped: dict[tuple[str, str], Tensor] = {}
    for file, entries in files.items():
        with safe_open(out / f"{file}.safetensors", framework="pt", device="cpu") as opened:
            for key, entry in entries.items():
                mapped[entry.name, entry.kind] = opened.get_tensor(key)
    return mapped


def _state(manifest: Manifest, tensors: dict[tuple[str, str], Tensor]) -> dict[str, Any]:
    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, Tensor]] = {}
    averages: dict[str, Tensor] = {}
    for (name, kind), tensor in tensors.items():
        if kind in ("param", "buffer"):
            model[name] = tensor
        elif kind == EMA:
            averages[name] = tensor
        else:
            state.setdefault(name, {})[kind] = tensor
    beside = [nested(state.pop(name)) for name in sorted(filter(is_of_optimizer, state))]
    state = {name: nested(kinds) for name, kinds in state.items()}
    added: dict[str, Any] = {}
    for kept in beside:
        state.update(kept.get("state", {}))
        added.update(kept.get("added", {}))
    for whole in (model, averages):
        whole.update({name: whole[first] for name, first in manifest.tied.items() if first in whole})
    groups = [dict(group) for group in manifest.param_groups]
    return {
        "model": model,
        "optimizer": {"state": state, "param_groups": groups, **added},
        **({"ema": averages} if averages else {}),
        "step": manifest.step,
        "extra": manifest.extra,
    }
