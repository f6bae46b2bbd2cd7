"""Tokens of corpora that are larger than memory, by several processes, whatever interrupts them.

    corpus -> parts -> workers -> WORK/parts/00000017.bin -> joined in order -> WORK/draft/train/tokens-00000.bin

A part's tokens depend on nothing but the part, and parts are joined in their order, so the bytes are the same for any
number of workers and of interruptions. Everything lies in a hidden folder beside the one that is made:

    lock          one process at a time; the kernel lets go of it when that ends, however it ends
    plan.json     what is prepared: another plan never goes on with this work
    tokenizer.json  where the tokenizer is a file, or was trained here
    parts/        finished parts that are not joined yet: a bounded number
    draft/        the folder in the making
    state.json    how much of draft/ is good: parts joined, tokens of each split. What lies beyond is cut off

A part appears by a rename, and so does `state.json`, after what it speaks of is on the disk.
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

TRAINING_BYTES = 256 << 20  # of text that a tokenizer learns from, a character for a byte
_SAVE_BYTES, _SAVE_S = 256 << 20, 10.0  # of work that an interruption may cost, beside parts that are finished


@dataclass(frozen=True)
class Told:
    """How far it is.

    Attributes:
        num_tokens: of both splits, joined.
        fraction: of all there will be, in [0, 1].
        tokens_per_s: since this process began.
    """

    num_tokens: int
    fraction: float
    tokens_per_s: float

    @property
    def left_s(self) -> float:
        """Seconds until it is done at this pace; 0 where that is not known."""
        rate = self.num_tokens / self.fraction if self.fraction else 0.0
        return rate * (1 - self.fraction) / self.tokens_per_s if self.tokens_per_s else 0.0


@dataclass(frozen=True)
class Joined:
    """What lies in ``WORK/draft``."""

    splits: dict[str, SplitMeta]
    num_documents: int
    num_bytes: int


@dataclass
class _State:
    """What `state.json` says."""

    next_part: int = 0
    train: int = 0
    val: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    num_read: int = 0  # bytes of the current file, as it lies
    file: str = ""
    num_before: int = 0  # bytes of the files before it


@contextmanager
def work_folder(out: Path, plan: dict[str, Any]) -> Generator[Path]:
    """The hidden folder beside ``out``, held by this process; begun for ``plan`` or gone on with.

    Raises:
        UserError: another process works in it, it was begun for another plan, or it cannot be written.
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
            what = f"{work} holds the half of something else: {_difference(_read_json(begun), plan)}"
            raise UserError("data.dir", what, "finish that, delete it, or name another folder by --data.dir")
        write_whole(begun, text.encode())
        yield work


def tokenizer_of(name: str, tables: Tables, holdout: Holdout, work: Path) -> Tokenizer:
    """The tokenizer; ``bpe:N`` is trained once, on the first `TRAINING_BYTES` of what trains."""
    kept = work / "tokenizer.json"
    if kept.exists():
        return read_tokenizer(kept, name if name.startswith("bpe:") else "json")
    tokenizer = make_tokenizer(name, at_most(_training_texts(tables, holdout), TRAINING_BYTES))
    if isinstance(tokenizer, BpeTokenizer):
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
    """Write the shards of both splits into ``work/draft``, going on from where an earlier process was.

    Raises:
        UserError: a file or a row cannot be read.
        OSError: the disk failed or is full; what was done stays for the next time.
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
    """The most tokens of each split, where there are ``max_tokens`` of both; None of each where that is 0."""
    num_val = int(max_tokens * val_fraction)
    return {"train": max_tokens - num_val, "val": num_val} if max_tokens else {"train": None, "val": None}


def remove(work: Path) -> None:
    """Take the work folder away, when what it was for is in its place."""
    shutil.rmtree(work, ignore_errors=True)


class _Shards:
    """The files of a split: as many tokens as are known to be good, and room for more."""

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
        """Wait until all that was written is on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def describe(self) -> SplitMeta:
        """Read all files once more and hash them."""
        found = []
        for number in range(-(-self.num_tokens // self._shard_tokens)):
            count = min(self._shard_tokens, self.num_tokens - number * self._shard_tokens)
            with self._path(number).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found.append(ShardMeta(f"{self._split}/{self._path(number).name}", count, digest))
        return SplitMeta(self.num_tokens, tuple(found))

    def _require(self, path: Path, num_tokens: int) -> None:
        """See that a file has what was said to be on the disk."""
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
    """Write a part behind those before it, and count it; returns its tokens."""
    for split in SPLITS:
        shards[split].write(made.tokens[split])
    state.train, state.val = shards["train"].num_tokens, shards["val"].num_tokens
    state.num_documents += made.num_documents
    state.num_bytes += made.num_bytes
    state.num_read = made.position
    return made.num_tokens


def _save(state: _State, shards: dict[str, _Shards], work: Path) -> None:
    """Have the disk hold what was joined, then say so, then take away the parts that it was joined from."""
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
    """As many of ``texts`` as have ``num_chars`` characters, and the rest of the last one."""
    for text in texts:
        if num_chars <= 0:
            return
        num_chars -= len(text)
        yield text


def _training_texts(tables: Tables, holdout: Holdout) -> Iterator[str]:
    """What a tokenizer may learn from: never a word of validation."""
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
    """What an earlier start wrote; nothing where there was none."""
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
