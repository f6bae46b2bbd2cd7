"""Collectives through memory that the CPU ranks of one host map together: no socket, no kernel, one copy.

Each rank owns a segment of a few slots that the others map. It *publishes* what they need in the next slot and
announces it in a counter; they read it where it lies (a reduction adds straight from there). A slot holds, for a
reduce-scatter, a piece of every other rank's shard; for a gather or broadcast, a piece of its owner's data. Pieces are
small enough to stay in the caches:

    publish piece 0 | publish piece 1, reduce piece 0 | publish piece 2, reduce piece 1 | ...

[Note: four slots need no second counter] Who publishes piece n has read piece n - 2 of every rank. That rank published
it after it had read piece n - 4, whose slot piece n now takes. So no slot is filled while somebody reads it.

Sums run in the order of ranks, ``((x0 + x1) + x2) + ...``, whoever owns the shard, and `all_reduce` is a reduce-scatter
and an all-gather: the same bits on every rank, from run to run, and from both.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import ReduceOp, Work, check_op, check_rank, check_shards
from zeroshard.comm.mapped import LOST, PeerLost, Segment
from zeroshard.comm.p2p import CPU, members, own_store, require_cpu
from zeroshard.comm.pieces import COMBINE, copy, on_flat, shard_interval
from zeroshard.comm.worker import Operation, Worker
from zeroshard.errors import UserError

SLOT_BYTES = 1 << 20
_AHEAD = 1  # pieces published before the first is read
NUM_SLOTS = 2 * (_AHEAD + 1)  # [Note: four slots need no second counter]
_PUBLISHED, _NUM_COUNTERS = LOST + 1, LOST + 2  # how many slots this rank has filled so far
_FAILED = "failed: "

Publish = Callable[[int, Tensor], None]  # lay piece number i into this rank's slot
Read = Callable[[int, list[Tensor]], None]  # take piece number i from the slots, by rank


class SharedMemoryCommunicator:
    """The CPU ranks of one host; tensors of any dtype.

    Operations run in issue order on a thread of their own. To build one is collective over ``group``. It maps
    ``NUM_SLOTS * SLOT_BYTES`` for each rank; the files behind them are gone before the constructor returns.

    Args:
        group: a process group that this rank belongs to; None: the default group.
        timeout_s: after which a peer that does not answer is given up. One that has died is noticed in a second.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside ``group``.
        UserError: the ranks are not all on one host, or it has too little memory to share.
    """

    uniform_order = True
    control_device = CPU

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        parent, self.rank, self.world_size = members(group)
        segments = _map_segments(parent, self.rank, self.world_size) if self.world_size > 1 else []
        self._slots = _Slots(segments, self.rank, timeout_s)
        self._worker = Worker(f"shm-{self.rank}")

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``tensor`` in place; any strides, at the cost of copies where its elements do not lie in order."""
        check_op(op)
        return self._submit(on_flat(tensor, lambda flat: self._all_reduce(flat, op)), tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce and keep this rank's slice; the rest of ``input`` stays as it is."""
        check_op(op)
        check_shards(input, output, self.world_size)
        whole, shard = input.detach().view(-1), output.detach().view(-1)
        return self._submit(lambda: self._reduce(whole, op, shard), input, output)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Gather every rank's shard."""
        check_shards(output, input, self.world_size)
        whole, shard = output.detach().view(-1), input.detach().view(-1)
        return self._submit(lambda: self._gather(whole, shard), output, input)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Take rank ``src``'s tensor; any strides."""
        check_rank(src, self.world_size)
        return self._submit(on_flat(tensor, lambda flat: self._broadcast(flat, src)), tensor)

    def barrier(self) -> None:
        """Return when every rank has called it and all that was issued before is done."""
        self._worker.submit(self._barrier).wait()

    def close(self) -> None:
        """Finish what was issued, end the thread and let the memory go; harmless twice."""
        self._worker.close()
        self._slots.close()

    def _submit(self, operation: Operation, *tensors: Tensor) -> Work:
        require_cpu("SharedMemoryCommunicator", *tensors)
        return self._worker.submit(operation)

    # -- the collectives, on the worker's thread ----------------------------------------------------------------

    def _reduce(self, whole: Tensor, op: ReduceOp, shard: Tensor) -> None:
        """``shard`` becomes this rank's shard of the reduction of ``whole``, of which it may be a part."""
        slots, combine, rank = self._slots, COMBINE[op], self.rank
        starts, stops = zip(*(shard_interval(whole.numel(), self.world_size, r) for r in slots.ranks), strict=True)
        size = slots.numel(whole.dtype) // max(self.world_size - 1, 1)  # of a piece of one shard

        def publish(piece: int, slot: Tensor) -> None:
            for peer in slots.peers:
                start = min(starts[peer] + piece * size, stops[peer])
                part = whole[start : min(start + size, stops[peer])]
                place = (peer - (peer > rank)) * size
                slot[place : place + part.numel()].copy_(part)

        def read(piece: int, published: list[Tensor]) -> None:
            start = starts[rank] + piece * size
            own = whole[start : min(start + size, stops[rank])]
            target = shard[piece * size : piece * size + own.numel()]
            parts = []
            for peer, slot in enumerate(published):
                place = (rank - (rank > peer)) * size
                parts.append(own if peer == rank else slot[place : place + own.numel()])
            total = parts[0]
            for peer in range(1, len(parts)):
                # until our own part, which may lie in `target`, is in: add up in the slot, where only we read
                total = combine(total, parts[peer], out=target if peer >= rank else total)

        if self.world_size == 1:
            copy(shard, whole)
        else:
            slots.exchange(whole.dtype, -(-(stops[0] - starts[0]) // size), publish, read)

    def _gather(self, whole: Tensor, shard: Tensor) -> None:
        """Every rank's shard goes into ``whole``; ``shard`` is this rank's, and may lie there already."""
        slots, size = self._slots, self._slots.numel(whole.dtype)
        intervals = [shard_interval(whole.numel(), self.world_size, r) for r in slots.ranks]

        def publish(piece: int, slot: Tensor) -> None:
            part = shard[piece * size : (piece + 1) * size]
            slot[: part.numel()].copy_(part)

        def read(piece: int, published: list[Tensor]) -> None:
            for peer in slots.peers:
                start, stop = intervals[peer]
                target = whole[min(start + piece * size, stop) : min(start + (piece + 1) * size, stop)]
                target.copy_(published[peer][: target.numel()])

        start, stop = intervals[self.rank]
        copy(whole[start:stop], shard)
        slots.exchange(whole.dtype, -(-intervals[0][1] // size), publish, read)

    def _all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        if self.world_size > 1:
            start, stop = shard_interval(flat.numel(), self.world_size, self.rank)
            self._reduce(flat, op, flat[start:stop])
            self._gather(flat, flat[start:stop])

    def _broadcast(self, flat: Tensor, src: int) -> None:
        size = self._slots.numel(flat.dtype)

        def publish(piece: int, slot: Tensor) -> None:
            part = flat[piece * size : (piece + 1) * size]
            if self.rank == src:
                slot[: part.numel()].copy_(part)

        def read(piece: int, published: list[Tensor]) -> None:
            part = flat[piece * size : (piece + 1) * size]
            if self.rank != src:
                part.copy_(published[src][: part.numel()])

        self._slots.exchange(flat.dtype, -(-flat.numel() // size), publish, read)

    def _barrier(self) -> None:
        self._slots.exchange(torch.uint8, 1, lambda piece, slot: None, lambda piece, published: None)


class _Slots:
    """The slots of all ranks. Every rank fills and reads its slots in step with the others: one count serves all."""

    def __init__(self, segments: list[Segment], rank: int, timeout_s: float) -> None:
        self.ranks = range(max(len(segments), 1))
        self.peers = [r for r in self.ranks if r != rank]
        self._rank = rank
        self._segments = segments
        self._timeout_s = timeout_s
        self._num_published = self._num_read = 0
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}

    def numel(self, dtype: torch.dtype) -> int:
        """Elements that a slot holds."""
        return SLOT_BYTES // dtype.itemsize

    def exchange(self, dtype: torch.dtype, num_pieces: int, publish: Publish, read: Read) -> None:
        """Publish pieces 0, 1, ... and read each when all ranks have published it.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        if not self._segments:
            return
        try:
            for index in range(num_pieces + _AHEAD):
                if index < num_pieces:
                    self._publish(dtype, lambda slot, piece=index: publish(piece, slot))
                if index >= _AHEAD:
                    self._read(dtype, lambda slots, piece=index - _AHEAD: read(piece, slots))
        except PeerLost as error:
            self._segments[self._rank].counters[LOST].advance(error.rank + 1)
            raise

    def _publish(self, dtype: torch.dtype, publish: Callable[[Tensor], None]) -> None:
        count = self._num_published
        publish(self._slots(dtype, count)[self._rank])
        self._num_published = count + 1
        self._segments[self._rank].counters[_PUBLISHED].advance(count + 1)

    def _read(self, dtype: torch.dtype, read: Callable[[list[Tensor]], None]) -> None:
        count = self._num_read
        for peer in self.peers:
            self._segments[peer].counters[_PUBLISHED].wait(count + 1, self._timeout_s)
        read(self._slots(dtype, count))
        self._num_read = count + 1

    def _slots(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """By rank, the slots of publication number ``count``."""
        views = self._views.get(dtype)
        if views is None:
            whole = [segment.data.view(dtype).view(NUM_SLOTS, -1) for segment in self._segments]
            views = self._views[dtype] = [[rows[slot] for rows in whole] for slot in range(NUM_SLOTS)]
        return views[count % NUM_SLOTS]

    def close(self) -> None:
        """Let go of the segments; the memory goes with the last view of it."""
        for segment in self._segments:
            segment.close()


def ranks_share_host(group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks of ``group`` (None: the default group) run on one host. Collective."""
    parent, rank, world_size = members(group)
    return len(set(_tell_all(own_store(parent), "host", rank, world_size, _host()))) == 1


def _host() -> str:
    """A name for this host that no other has: a container's own name, and the boot of the kernel beneath it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".strip()


def _tell_all(store: dist.Store, what: str, rank: int, world_size: int, word: str) -> list[str]:
    """Every rank's word, by rank."""
    store.set(f"{what}/{rank}", word)
    return [store.get(f"{what}/{r}").decode() for r in range(world_size)]


def _map_segments(parent: dist.ProcessGroup, rank: int, world_size: int) -> list[Segment]:
    """All ranks' segments, mapped here; no file is left behind. Every rank raises if one cannot take part."""
    store = own_store(parent)
    hosts = _tell_all(store, "host", rank, world_size, _host())
    for other, host in enumerate(hosts):
        if host != hosts[0]:
            what = f"shared memory joins ranks of one host, and rank {other} is on {host}, rank 0 on {hosts[0]}"
            raise UserError("comm", what, "use ring")
    own: Segment | None = None
    segments: list[Segment] = []
    try:
        try:
            own = Segment.create(rank, _NUM_COUNTERS, NUM_SLOTS * SLOT_BYTES)
            found = str(own.path)
        except UserError as error:
            found = f"{_FAILED}{error.what}"
        paths = _agreed(_tell_all(store, "path", rank, world_size, found))
        try:
            for other, path in enumerate(paths):
                segments.append(own if other == rank and own else Segment.attach(Path(path), other, _NUM_COUNTERS))
            state = "mapped"
        except OSError as error:
            state = f"{_FAILED}rank {rank} cannot open another rank's memory ({error})"
        _agreed(_tell_all(store, "state", rank, world_size, state))
    finally:
        if own is not None:
            own.unlink()
    return segments


def _agreed(words: list[str]) -> list[str]:
    """``words``, unless one of them says that its rank has failed."""
    for word in words:
        if word.startswith(_FAILED):
            raise UserError("comm", word.removeprefix(_FAILED), "use ring")
    return words
