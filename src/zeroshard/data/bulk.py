"""Prepare corpora that are larger than memory, with several processes, so that an interrupted run can be resumed.

    corpus -> parts -> workers -> WORK/parts/00000017.bin -> joined in order -> WORK/draft/train/tokens-00000.bin

A part's tokens depend only on the part, and parts are joined in order. So the bytes are the same for any number of
workers and of interruptions. All files of the work are in WORK, a hidden folder beside the final one:

    lock          makes one process work at a time; the kernel releases it when that process ends, however it ends
    plan.json     the choices of the preparation; work that was begun with other choices is not resumed
    tokenizer.json  the tokenizer, if it is a file or was trained here
    parts/        finished parts that are not joined yet: a bounded number
    draft/        the folder that will be published
    state.json    how much of draft/ is valid: parts joined, tokens of each split. Anything beyond that is truncated

A part's file appears by a rename, and so does `state.json`, after everything that it counts is on the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.meta import DTYPES, SPLITS, ShardMeta, SplitMeta
from zeroshard.data.parts import MadePart, PartMaker, read_part, write_whole
from zeroshard.data.pool import Workers
from zeroshard.data.split import Holdout
from zeroshard.data.tables import Part, PartReader, Tables
from zeroshard.data.tokenizer import BpeTokenizer, Tokenizer, make_tokenizer, read_tokenizer
from zeroshard.errors import UserError
from zeroshard.regular_files import json_of, open_regular, read_text

TRAINING_BYTES = 256 << 20  # text on which a tokenizer is trained; a character counts as a byte
_SAVE_BYTES, _SAVE_S = 256 << 20, 10.0  # the state is saved after so many joined bytes or seconds


@dataclass(frozen=True)
class Told:
    """The progress of a preparation.

    Attributes:
        num_tokens: tokens of both splits that are joined.
        fraction: share of the work that is done, in [0, 1].
        tokens_per_s: rate since this process began.
    """

    num_tokens: int
    fraction: float
    tokens_per_s: float

    @property
    def left_s(self) -> float:
        """Estimated seconds until the end; 0 if no estimate is possible."""
        rate = self.num_tokens / self.fraction if self.fraction else 0.0
        return rate * (1 - self.fraction) / self.tokens_per_s if self.tokens_per_s else 0.0


@dataclass(frozen=True)
class Joined:
    """The content of ``WORK/draft``."""

    splits: dict[str, SplitMeta]
    num_documents: int
    num_bytes: int


@dataclass
class _State:
    """The content of `state.json`."""

    next_part: int = 0
    train: int = 0
    val: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    num_read: int = 0  # bytes read of the current file, as stored
    file: str = ""
    num_before: int = 0  # total bytes of the files before it


@contextmanager
def work_folder(out: Path, plan: dict[str, Any]) -> Generator[Path]:
    """Lock and yield the hidden work folder beside ``out``; begin it for ``plan``, or resume work with the same plan.

    Raises:
        UserError: another process has locked it, it was begun with another plan, or it cannot be written.
    """
    work = out.parent / f".{out.name}.partial"
    text = json.dumps(plan, indent=2, sort_keys=True) + "\n"
    try:
        (work / "parts").mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(open_regular(work / "lock", os.O_RDWR | os.O_CREAT, follow=False), "r+")
    except OSError as error:
        todo = "name a folder that can be written, by --data.dir"
        raise UserError("data.dir", f"cannot write {work}: {error.strerror}", todo) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            todo = "wait for it, or name another folder by --data.dir"
            raise UserError("data.dir", f"another process is preparing {out}", todo) from None
        begun = work / "plan.json"
        if begun.exists() and read_text(begun) != text:
            what = f"{work} has unfinished work with other settings: {_difference(_read_json(begun), plan)}"
            raise UserError("data.dir", what, "finish that, delete it, or name another folder by --data.dir")
        write_whole(begun, text.encode())
        yield work


@contextmanager
def removed_if_refused(work: Path, *, needed: bool) -> Generator[None]:
    """Inside, a UserError removes ``work``, because other data or settings cannot resume it; ``needed``: it stays."""
    try:
        yield
    except UserError:
        if not needed:
            remove(work)
        raise


def tokenizer_of(name: str, tables: Tables, holdout: Holdout, work: Path) -> Tokenizer:
    """Return the tokenizer; ``bpe:N`` is trained once, on the first `TRAINING_BYTES` of the training text."""
    kept = work / "tokenizer.json"
    if kept.exists():
        return read_tokenizer(kept, name if name.startswith("bpe:") else "json")
    tokenizer = make_tokenizer(name, at_most(_training_texts(tables, holdout), TRAINING_BYTES))
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.keep_special_tokens(work)
        write_whole(kept, tokenizer.to_json().encode())
    return tokenizer


def join_parts(
    tables: Tables,
    tokenizer_name: str,
    dtype: str,
    holdout: Holdout,
    max_tokens: int,
    shard_tokens: int,
    work: Path,
    *,
    num_workers: int,
    progress: Callable[[Told], None],
) -> Joined:
    """Write the shards of both splits into ``work/draft``, resuming from the state that an earlier process saved.

    Raises:
        UserError: a file or a row cannot be read.
        OSError: the disk failed or is full; finished work is kept and can be resumed.
    """
    draft = work / "draft"
    state = _read_state(work / "state.json")
    limits = token_limits(max_tokens, holdout.val_fraction)
    shards = {
        split: _Shards(draft, split, DTYPES[dtype], shard_tokens, limits[split], getattr(state, split))
        for split in SPLITS
    }
    make = (work, tables.column, tokenizer_name, dtype, holdout)
    began, began_with = time.monotonic(), state.train + state.val
    saved_at, unsaved = began, 0
    with ExitStack() as stack:
        for each in shards.values():
            stack.callback(each.close)
        is_full = max_tokens > 0 and all(each.is_full for each in shards.values())
        parts = islice(tables.parts() if not is_full else (), state.next_part, None)
        for part, file in _made(parts, make, num_workers, stack):
            state.next_part = part.index + 1
            if part.file.path != state.file:
                state.num_before += _size_of(tables, state.file)
                state.file = part.file.path
            unsaved += _join(read_part(file, DTYPES[dtype]), shards, state)
            now = time.monotonic()
            progress(_told(state, tables, max_tokens, began_with, now - began))
            if unsaved * DTYPES[dtype].itemsize > _SAVE_BYTES or now - saved_at > _SAVE_S:
                _save(state, shards, work)
                saved_at, unsaved = now, 0
            if max_tokens and all(each.is_full for each in shards.values()):
                break
        _save(state, shards, work)
    splits = {split: each.describe() for split, each in shards.items()}
    return Joined(splits, state.num_documents, state.num_bytes)


def token_limits(max_tokens: int, val_fraction: float) -> dict[str, int | None]:
    """Return the maximum tokens per split, out of ``max_tokens`` for both; None per split if that is 0."""
    num_val = int(max_tokens * val_fraction)
    return {"train": max_tokens - num_val, "val": num_val} if max_tokens else {"train": None, "val": None}


def remove(work: Path) -> None:
    """Delete the work folder once its result is published."""
    shutil.rmtree(work, ignore_errors=True)


class _Shards:
    """The files of one split: keeps the tokens that the state counts as valid, truncates the rest, and appends more."""

    def __init__(
        self, draft: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, limit: int | None, num_tokens: int
    ) -> None:
        self._folder, self._split, self._dtype = draft / split, split, dtype
        self._shard_tokens, self._limit, self.num_tokens = shard_tokens, limit, num_tokens
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file: Any = None
        num_files, in_last = divmod(num_tokens, shard_tokens)
        for path in sorted(self._folder.iterdir()):
            number = int(path.stem.removeprefix("tokens-"))
            if number > num_files or (number == num_files and not in_last):
                path.unlink()
            elif number == num_files:
                self._require(path, in_last)
                os.truncate(path, in_last * dtype.itemsize)
        for number in range(num_files + (in_last > 0)):
            self._require(self._path(number), shard_tokens if number < num_files else in_last)

    @property
    def is_full(self) -> bool:
        return self._limit is not None and self._limit <= self.num_tokens

    def write(self, ids: NDArray[np.unsignedinteger]) -> None:
        if self._limit is not None:
            ids = ids[: self._limit - self.num_tokens]
        while ids.size:
            number, at = divmod(self.num_tokens, self._shard_tokens)
            if self._file is None or at == 0:
                self.sync()
                self.close()
                self._file = self._path(number).open("ab")
            piece, ids = ids[: self._shard_tokens - at], ids[self._shard_tokens - at :]
            self._file.write(piece.data)
            self.num_tokens += piece.size

    def sync(self) -> None:
        """Block until all written bytes are on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def describe(self) -> SplitMeta:
        """Read all files again and hash them."""
        found = []
        for number in range(-(-self.num_tokens // self._shard_tokens)):
            count = min(self._shard_tokens, self.num_tokens - number * self._shard_tokens)
            with self._path(number).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found.append(ShardMeta(f"{self._split}/{self._path(number).name}", count, digest))
        return SplitMeta(self.num_tokens, tuple(found))

    def _require(self, path: Path, num_tokens: int) -> None:
        """Check that a file has at least the tokens that the state says are on the disk."""
        if not path.exists() or path.stat().st_size < num_tokens * self._dtype.itemsize:
            work = self._folder.parents[1]
            raise UserError("data.dir", f"{path} has lost what was written", f"delete the folder {work}")

    def _path(self, number: int) -> Path:
        return self._folder / f"tokens-{number:05d}.bin"


def _made(
    parts: Iterator[Part], make: tuple[Any, ...], num_workers: int, stack: ExitStack
) -> Iterator[tuple[Part, str]]:
    if num_workers == 1:
        maker = PartMaker(*make)
        stack.callback(maker.close)
        yield from ((part, maker(part)) for part in parts)
    else:
        workers: Workers[Part, str] = Workers(PartMaker, make, num_workers)
        stack.callback(workers.close)
        yield from workers.in_order(parts)


def _join(made: MadePart, shards: dict[str, _Shards], state: _State) -> int:
    """Append a part's tokens to the shards and count them; return how many tokens the part has."""
    for split in SPLITS:
        shards[split].write(made.tokens[split])
    state.train, state.val = shards["train"].num_tokens, shards["val"].num_tokens
    state.num_documents += made.num_documents
    state.num_bytes += made.num_bytes
    state.num_read = made.position
    return made.num_tokens


def _save(state: _State, shards: dict[str, _Shards], work: Path) -> None:
    """Flush the joined tokens to the disk, then save the state, then delete the parts that are joined."""
    for each in shards.values():
        each.sync()
    write_whole(work / "state.json", json.dumps(asdict(state)).encode())
    for path in (work / "parts").iterdir():
        if int(path.name.partition(".")[0]) < state.next_part:
            path.unlink(missing_ok=True)


def _told(state: _State, tables: Tables, max_tokens: int, began_with: int, elapsed_s: float) -> Told:
    num_tokens = state.train + state.val
    fraction = (state.num_before + state.num_read) / tables.num_bytes
    if max_tokens:
        fraction = max(fraction, num_tokens / max_tokens)
    return Told(num_tokens, min(fraction, 1.0), (num_tokens - began_with) / max(elapsed_s, 1e-9))


def _size_of(tables: Tables, path: str) -> int:
    return next((file.num_bytes for file in tables.files if file.path == path), 0)


def at_most(texts: Iterable[str], num_chars: int) -> Iterator[str]:
    """Yield the first texts until they have ``num_chars`` characters; the last one is not cut."""
    for text in texts:
        if num_chars <= 0:
            return
        num_chars -= len(text)
        yield text


def _training_texts(tables: Tables, holdout: Holdout) -> Iterator[str]:
    """Yield the text that a tokenizer may be trained on: no validation text."""
    reader = PartReader(tables.column)
    try:
        for part in tables.parts():
            for text in reader.texts(part):
                yield from (piece for split, piece in holdout.texts(text) if split == "train")
    finally:
        reader.close()


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if keys == ["files"]:
        return "other files"
    return ", ".join(f"{key} {before.get(key)!r} where {now.get(key)!r} is asked for" for key in keys if key != "files")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that an earlier process wrote; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        found = json_of(read_text(path))
    except ValueError as error:
        raise _damaged(path, error) from None
    if not isinstance(found, dict):
        raise _damaged(path, f"it holds a {type(found).__name__}")
    return found


def _read_state(path: Path) -> _State:
    try:
        state = _State(**_read_json(path))
    except TypeError as error:
        raise _damaged(path, error) from None
    for name, value in asdict(_State()).items():
        if type(getattr(state, name)) is not type(value):
            raise _damaged(path, f"{name} is {getattr(state, name)!r}")
    return state


def _damaged(path: Path, why: object) -> UserError:
    return UserError("data.dir", f"{path} is damaged ({why})", f"delete {path.parent}, and prepare anew")
