"""Training straight from tables, local or far: batches as a pure function of (seed, step), with nothing prepared.

A *block* is the tokens of one part (`tables`). Blocks are visited in a shuffled order, another one in each epoch
(`order`), and dealt out to *lanes* as cards are: lane ``l`` reads blocks ``l``, ``l + L``, ``l + 2L`` ... of that
order, the rows of each in a shuffled order of its own. A step of ``G`` rows takes ``G / L`` of them from each lane:

    global batch   | lane 0 | lane 1 | ... | lane L-1 |        rank r reads [r, r + 1) * G / world_size of it

``L`` depends on ``G`` alone, so the rows of a step are the same at any world size, and a rank reads and encodes the
blocks of its own lanes only. What a block gives is known when it has been read; the sizes of blocks are noted in the
run folder, so that a run which goes on at step k opens the blocks of step k and no others. Without the notes they are
counted again: slower, and the same batches.

A block's last tokens, too few for a row, are left out, and so are blocks of less than a row.
"""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.data import order
from zeroshard.data.files import patiently, suffix_of
from zeroshard.data.meta import DTYPES, dtype_for
from zeroshard.data.parts import document_ids
from zeroshard.data.tables import PART_BYTES, Part, PartReader, Tables, corpus_identity
from zeroshard.data.tokenizer import Tokenizer
from zeroshard.data.tokens import TokenDataset
from zeroshard.errors import UserError

MAX_LANES = 16  # blocks that a step mixes; each is held in memory by the rank that reads it, and the next one too
READ_THREADS = 2  # of a rank, that read and encode ahead


@dataclass(frozen=True)
class Blocks:
    """The parts of a corpus as token ids: which train, which validate, and how to make them.

    Attributes:
        parts: all of them, in order.
        tokenizer: makes ids.
        column: holds the text.
        identity: equal where all ids are.
        num_val: parts that validate, spread over the corpus.
    """

    parts: tuple[Part, ...]
    tokenizer: Tokenizer
    column: str
    identity: str
    num_val: int

    @property
    def val(self) -> list[Part]:
        """The parts that validate, in order; never trained on."""
        return [self.parts[place * len(self.parts) // self.num_val] for place in range(self.num_val)]

    @property
    def train(self) -> list[Part]:
        """The others, in order."""
        validates = {part.index for part in self.val}
        return [part for part in self.parts if part.index not in validates]

    def ids(self, part: Part) -> NDArray[np.unsignedinteger]:
        """All tokens of a part, [n], documents ended as `prepare` ends them. A UserError where it cannot be read."""
        dtype = DTYPES[dtype_for(self.tokenizer.vocab_size)]

        def read() -> NDArray[np.unsignedinteger]:
            reader = PartReader(self.column)
            try:
                pieces = [document_ids(self.tokenizer, text).astype(dtype) for text in reader.texts(part)]
            finally:
                reader.close()
            return np.concatenate(pieces) if pieces else np.empty(0, dtype)

        return patiently(read, part.file.path, "start again with --resume auto")

    def validation(self, num_tokens: int) -> TokenDataset:
        """At least ``num_tokens`` tokens of the parts that validate, or all of them."""
        pieces, have = [], 0
        for part in self.val:
            if have >= num_tokens:
                break
            pieces.append(self.ids(part))
            have += pieces[-1].size
        return TokenDataset(pieces, self.tokenizer.vocab_size)


def blocks_of(tables: Tables, tokenizer: Tokenizer, tokenizer_identity: str, val_fraction: float) -> Blocks:
    """Look at every file and cut it into parts.

    Raises:
        UserError: compressed lines, which can only be read from front to back; fewer than two parts.
    """
    for file in tables.files:
        if suffix_of(file.path) in (".gz", ".zst"):
            todo = "use `zeroshard prepare`, or write it as .parquet"
            raise UserError("data.streaming", f"{file.path} can only be read from its beginning", todo)
    parts = tuple(tables.parts())
    if len(parts) < 2:
        what = f"{len(parts)} part of about {PART_BYTES >> 20} MiB of text cannot both train and validate"
        raise UserError("data.streaming", what, "leave it out: so little text is prepared in seconds")
    choices = [corpus_identity(tables.files), tables.column, tokenizer_identity, val_fraction, len(parts)]
    digest = hashlib.sha256(json.dumps(choices).encode()).hexdigest()
    num_val = min(max(1, round(len(parts) * val_fraction)), len(parts) - 1)
    return Blocks(parts, tokenizer, tables.column, digest, num_val)


class BlockSizes:
    """Tokens of each block that any rank of a run has read: noted in its folder, one file a rank.

    Args:
        folder: of the notes; None to keep them in memory.
        identity: of the blocks; notes on others are passed over.
        rank: writes its own file.
    """

    def __init__(self, folder: Path | None, identity: str, rank: int = 0) -> None:
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._path, self._identity = (folder / f"sizes-{rank:05d}.jsonl" if folder else None), identity
        for path in sorted(folder.glob("sizes-*.jsonl")) if folder else ():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError):  # the last line may be torn; it is counted again
                    note = json.loads(line)
                    if note["blocks"] == identity:
                        self._sizes[int(note["part"])] = int(note["num_tokens"])

    def get(self, part: Part) -> int | None:
        """Tokens of a block; None where nobody has read it."""
        return self._sizes.get(part.index)

    def note(self, part: Part, num_tokens: int) -> None:
        """Remember a block's size."""
        with self._lock:
            if part.index in self._sizes:
                return
            self._sizes[part.index] = num_tokens
            if self._path is not None:
                line = json.dumps({"blocks": self._identity, "part": part.index, "num_tokens": num_tokens})
                with suppress(OSError):  # a note that is lost is counted again
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    with self._path.open("a", encoding="utf-8") as file:
                        file.write(f"\n{line}\n")  # a torn line before it stays alone


@dataclass
class _Lane:
    """One lane's visits so far: ``starts[k]`` is the first row of its k-th block; at the last it goes on."""

    starts: list[int] = field(default_factory=lambda: [0])
    opened: dict[int, Future[NDArray[np.unsignedinteger]]] = field(default_factory=dict)


class StreamBatches:
    """Training batches of one rank, read as they are needed; implements `zeroshard.data.Batches`.

    Raises:
        ValueError: a size below 1, or a rank outside its world.
    """

    def __init__(
        self,
        blocks: Blocks,
        sizes: BlockSizes,
        *,
        seq_len: int,
        micro_batch_size: int,
        grad_accum_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        if min(seq_len, micro_batch_size, grad_accum_steps, world_size) < 1 or not 0 <= rank < world_size:
            raise ValueError(f"sizes must be at least 1 and rank in [0, world_size), got rank {rank} of {world_size}")
        self._blocks, self._sizes, self._train = blocks, sizes, blocks.train
        self._seq_len, self._micro_batch_size, self._seed = seq_len, micro_batch_size, seed
        self._grad_accum_steps = grad_accum_steps
        rows_of_rank = micro_batch_size * grad_accum_steps
        self._first_slot = rank * rows_of_rank
        self.num_lanes = num_lanes(rows_of_rank * world_size)
        self._rows_of_lane = rows_of_rank * world_size // self.num_lanes
        self._lanes: dict[int, _Lane] = {}
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="stream")

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """``(tokens_BT, targets_BT)``, int64, on the CPU; the same for the same arguments, always.

        Raises:
            ValueError: ``micro_step`` is out of range.
            UserError: a file failed, or no block has as much as a row.
        """
        if not 0 <= micro_step < self._grad_accum_steps:
            raise ValueError(f"micro_step must be in [0, {self._grad_accum_steps}), got {micro_step}")
        first = self._first_slot + micro_step * self._micro_batch_size
        slots = range(first, first + self._micro_batch_size)
        for number in sorted({slot // self._rows_of_lane for slot in slots}):  # all at once, and then one by one
            lane = self._lanes.setdefault(number, _Lane())
            visit = len(lane.starts) - 1
            if lane.starts[-1] <= step * self._rows_of_lane and self._sizes.get(self._part(number, visit)) is None:
                self._open(number, lane, visit)
        rows = []
        for slot in slots:
            lane, place = divmod(slot, self._rows_of_lane)
            rows.append(self._row(lane, step * self._rows_of_lane + place))
        window = torch.from_numpy(np.stack(rows).astype(np.int64))  # [B, T + 1]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def close(self) -> None:
        """Let go of threads and blocks; what is being read is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._lanes.clear()

    def _row(self, number: int, row: int) -> NDArray[np.unsignedinteger]:
        """Row ``row`` of lane ``number``, [T + 1]."""
        lane = self._lanes.setdefault(number, _Lane())
        num_empty = 0
        while lane.starts[-1] <= row:
            visit = len(lane.starts) - 1
            num_rows = self._num_rows(number, lane, visit)
            num_empty = 0 if num_rows else num_empty + 1
            if num_empty > 2 * len(self._train):
                what = f"no part of the corpus has the {self._seq_len + 1} tokens of a row"
                raise UserError("data.streaming", what, "use `zeroshard prepare`, or lower seq_len")
            lane.starts.append(lane.starts[-1] + num_rows)
        visit = bisect_right(lane.starts, row) - 1
        ids = self._open(number, lane, visit).result()
        self._open(number, lane, visit + 1)  # read while this one is used
        for old in [each for each in lane.opened if not visit <= each <= visit + 1]:
            lane.opened.pop(old).cancel()
        start = lane.starts[visit]
        num_rows = lane.starts[visit + 1] - start
        seed = self._seed ^ (self._visited(number, visit) + 1) * 0x9E3779B97F4A7C15
        shuffled = int(order.rows(seed, [row - start], num_rows)[0])
        return ids[shuffled * self._seq_len : (shuffled + 1) * self._seq_len + 1]

    def _num_rows(self, number: int, lane: _Lane, visit: int) -> int:
        num_tokens = self._sizes.get(self._part(number, visit))
        if num_tokens is None:
            num_tokens = self._open(number, lane, visit).result().size
        return max(0, num_tokens - 1) // self._seq_len

    def _open(self, number: int, lane: _Lane, visit: int) -> Future[NDArray[np.unsignedinteger]]:
        if visit not in lane.opened:
            lane.opened[visit] = self._pool.submit(self._read, self._part(number, visit))
        return lane.opened[visit]

    def _read(self, part: Part) -> NDArray[np.unsignedinteger]:
        ids = self._blocks.ids(part)
        self._sizes.note(part, ids.size)
        return ids

    def _part(self, number: int, visit: int) -> Part:
        place = order.rows(self._seed, [self._visited(number, visit)], len(self._train))
        return self._train[int(place[0])]

    def _visited(self, number: int, visit: int) -> int:
        """The place of a lane's visit among those of all lanes."""
        return visit * self.num_lanes + number


def num_lanes(global_batch_size: int) -> int:
    """The largest divisor of a step's rows that is at most `MAX_LANES`."""
    return max(lanes for lanes in range(1, MAX_LANES + 1) if global_batch_size % lanes == 0)


def global_batch(ranks: Sequence[StreamBatches], step: int, grad_accum_steps: int) -> tuple[Tensor, Tensor]:
    """All rows of a step in order, [G, T] each, from the batches of every rank of a world: for tests."""
    micro = [batches(step, micro_step) for batches in ranks for micro_step in range(grad_accum_steps)]
    tokens, targets = zip(*micro, strict=True)
    return torch.cat(tokens), torch.cat(targets)
