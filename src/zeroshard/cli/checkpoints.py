"""``zeroshard checkpoint ls | show | verify | diff``: list checkpoints, show what is in one, verify, compare two.

A path is a checkpoint or a run folder. Of a run folder `ls` and `verify` take all checkpoints, the others the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from zeroshard import checkpoint
from zeroshard.checkpoint.diff import differences
from zeroshard.checkpoint.manifest import ITEM_BYTES, MANIFEST, Manifest
from zeroshard.host.columns import columns, printable
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.host.masked_addresses import masked
from zeroshard.settings.validate import nearest
from zeroshard.train.records.console import bytes_in_words
from zeroshard.train.state.folders import checkpoint_folder
from zeroshard.train.state.saved_run import newest_checkpoint


def run_checkpoint(words: Sequence[str]) -> int:
    """Run ``zeroshard checkpoint`` with the given arguments (``words``); returns the exit status.

    Raises:
        UserError: an unknown command, too few or too many paths, or a path without a checkpoint.
    """
    if not words:
        raise UserError("checkpoint", "what to do is missing", f"add one of {', '.join(_COMMANDS)}")
    word, *paths = words
    if word not in _COMMANDS:
        todo = nearest(word, _COMMANDS, f"choose one of {', '.join(_COMMANDS)}")
        raise UserError(word, "`zeroshard checkpoint` does not know it", todo)
    command = _COMMANDS[word]
    flag = next((path for path in paths if path.startswith("-")), None)
    if flag is not None:
        raise UserError(flag, f"`zeroshard checkpoint {word}` takes no flags", "leave it out")
    if len(paths) != command.num_paths:
        given = "1 path is" if len(paths) == 1 else f"{len(paths)} paths are"
        what = f"{given} given where {command.num_paths} {'is' if command.num_paths == 1 else 'are'} wanted"
        raise UserError(f"checkpoint {word}", what, f"write zeroshard checkpoint {word}{' PATH' * command.num_paths}")
    for path in paths:
        if not Path(path).is_dir():
            raise UserError(path, "there is no such folder", "give a run folder or a checkpoint")
    return int(command.run(*map(Path, paths)))


def _ls(path: Path) -> ExitStatus:
    rows = [("checkpoint", "step", "ranks", "strategy", "size", "state")]
    all_found = checkpoint.find(_folder_of_many(path))
    if not all_found and (path / MANIFEST).is_file():  # the path is itself a checkpoint
        all_found = [checkpoint.Found(path, 0, complete=True)]
    for found in all_found:
        try:
            folder, manifest = checkpoint.open_manifest(found.path)
        except UserError as error:
            state = error.what if found.complete else "incomplete"
            rows.append((str(found.path), f"{found.step:,}", "", "", "", state))
            continue
        size = bytes_in_words(manifest.num_bytes)
        cells = (f"{manifest.step:,}", str(manifest.world_size), _strategy(manifest), size, _state(folder, manifest))
        rows.append((str(found.path), *cells))
    print("\n".join(columns(rows)) if len(rows) > 1 else f"no checkpoints in {path}")
    return ExitStatus.OK


def _show(path: Path) -> ExitStatus:
    folder, manifest = checkpoint.open_manifest(_newest(path))
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    config = manifest.extra.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    facts = {
        "checkpoint": str(folder),
        "step": f"{manifest.step:,}",
        "written by": f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''} {_strategy(manifest)}",
        "model": str(model.get("name", "")) if isinstance(model, dict) else "",
        "versions": versions,
        "files": f"{len(manifest.files)}, {bytes_in_words(manifest.num_bytes)}",
        "state": _state(folder, manifest),
    }
    print("\n".join(columns([(name, value) for name, value in facts.items() if value.strip()])))
    kinds, numels, sizes = Counter[str](), Counter[str](), Counter[str]()
    for entry in manifest.tensors:
        kinds[entry.kind] += 1
        numels[entry.kind] += prod(entry.shape)
        sizes[entry.kind] += prod(entry.shape) * ITEM_BYTES[entry.dtype]
    rows = [(kind, f"{kinds[kind]:,}", f"{numels[kind]:,}", bytes_in_words(sizes[kind])) for kind in kinds]
    print("", *columns([("kind", "tensors", "elements", "size"), *rows]), sep="\n")
    pieces = [
        (entry.name, entry.kind, entry.dtype, "x".join(map(str, entry.shape)) or "scalar", str(len(entry.pieces)))
        for entry in manifest.tensors
    ]
    print("", *columns([("tensor", "kind", "dtype", "shape", "pieces"), *pieces]), sep="\n")
    return ExitStatus.OK


def _verify(path: Path) -> ExitStatus:
    paths = [path]
    if _is_run(path):
        paths = [found.path for found in checkpoint.find(_folder_of_many(path)) if found.complete]
    if not paths:
        raise UserError(str(path), "has no complete checkpoint", "let it train up to one first")
    status = ExitStatus.OK
    for each in paths:
        damages = checkpoint.verify(each)
        for damage in damages:
            print(printable(str(damage)))
        if damages:
            status = ExitStatus.CHECK_FAILED
        else:
            print(f"{each}: undamaged, {bytes_in_words(checkpoint.read_manifest(each).num_bytes)}")
    return status


def _diff(first: Path, second: Path) -> ExitStatus:
    one, other = (checkpoint.open_manifest(_newest(path)) for path in (first, second))
    num_lines = 0
    for line in differences(one, other):
        print(printable(masked(line)))
        num_lines += 1
    if not num_lines:
        print("no difference")
    return ExitStatus.CHECK_FAILED if num_lines else ExitStatus.OK


class _Command(NamedTuple):
    run: Callable[..., ExitStatus]
    num_paths: int


_COMMANDS = {
    "ls": _Command(_ls, 1),
    "show": _Command(_show, 1),
    "verify": _Command(_verify, 1),
    "diff": _Command(_diff, 2),
}


def _is_run(path: Path) -> bool:
    return checkpoint_folder(path).is_dir()


def _folder_of_many(path: Path) -> Path:
    return checkpoint_folder(path) if _is_run(path) else path


def _newest(path: Path) -> Path:
    if not _is_run(path):
        return path
    newest = newest_checkpoint(checkpoint_folder(path))
    if newest is None:
        raise UserError(str(path), "has no complete checkpoint", "let it train up to one first")
    return newest


def _strategy(manifest: Manifest) -> str:
    config = manifest.extra.get("config")
    return str(config.get("strategy", "")) if isinstance(config, dict) else ""


def _state(folder: Path, manifest: Manifest) -> str:
    """Check whether files are missing or have the wrong size, without reading them; ``verify`` reads them."""
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file():
            return f"damaged: {name} is missing"
        if file.stat().st_size != entry.num_bytes:
            return f"damaged: {name} has {file.stat().st_size} bytes of {entry.num_bytes}"
    return "complete"
