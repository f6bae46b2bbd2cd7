"""Collectives in shared memory, for CPU ranks of one host: data pass through neither sockets nor the kernel.

A large tensor that was allocated in shared memory (`SharedMemoryCommunicator.empty`; the engine's flat buffers are) is
read in place by the other ranks: a reduction adds directly from it, a gather copies directly from it. Other tensors are
copied through slots (`zeroshard.comm.shm.slots`). In a reduce-scatter a slot holds a piece of every other rank's shard;
in a gather or broadcast, a piece of its owner's data. Pieces are small enough to stay in the CPU's caches:

    publish piece 0 | publish piece 1, reduce piece 0 | publish piece 2, reduce piece 1 | ...

Sums run in the order of ranks, ``((x0 + x1) + x2) + ...``, for every shard and by both ways, and `all_reduce` is a
reduce-scatter followed by an all-gather. So results have the same bits on every rank, from run to run, and whether
`all_reduce` or `reduce_scatter` computed them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Groups, ReduceOp, own_group
from zeroshard.comm.queued.messages import members, own_store
from zeroshard.comm.queued.pieces import copy, shard_interval
from zeroshard.comm.queued.queued import QueuedCommunicator
from zeroshard.comm.reductions import COMBINE, Combine
from zeroshard.comm.shm.mapped import Segment
from zeroshard.comm.shm.slots import NUM_COUNTERS, NUM_SLOTS, SLOT_BYTES, Slots
from zeroshard.host.errors import UserError

DIRECT_BYTES = 256 << 10  # of the unsharded tensor; below it, an offer's two rounds of counters cost more than copies
_CACHED_BYTES = 256 << 10  # size of a partial sum that stays in the caches
_FAILED = "failed: "


class SharedMemoryCommunicator(QueuedCommunicator):
    """The CPU ranks of one host; tensors of any dtype.

    Operations run in issue order on the communicator's own thread. Its constructor is collective over ``group``. It
    maps ``NUM_SLOTS * SLOT_BYTES`` for each rank, and the memory that `empty` returns.

    Args:
        group: a process group that this rank belongs to; None: the default group.
        timeout_s: seconds after which a peer that does not answer counts as lost. The death of a peer's process is
            noticed within a second.

    Raises:
        RuntimeError: as `TorchCommunicator`.
        UserError: the ranks are not all on one host, or it has too little memory, or another system than Linux.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        parent, rank, world_size = members(group)
        self._join(own_store(parent), rank, range(world_size), timeout_s)

    def _join(self, store: dist.Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        """Map the segments and start the worker. ``names``: the numbers of the ranks in messages, by rank."""
        self.rank, self.world_size = rank, len(names)
        self._store, self._names, self._timeout_s, self._num_splits = store, names, timeout_s, 0
        segments = _map_segments(store, rank, names) if self.world_size > 1 else []
        self._slots = Slots(segments, rank, timeout_s)
        self._open(f"shm-{names[rank]}")

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised ``[numel]`` in memory that all ranks map, or in ordinary memory if that is full."""
        arena = self._slots.arena
        return torch.empty(numel, dtype=dtype) if arena is None else arena.empty(numel, dtype)

    def split(self, groups: Groups) -> SharedMemoryCommunicator:
        """Return the communicator of this rank's group, which has its own shared memory and thread."""
        index, ranks = own_group(groups, self.rank)
        part = object.__new__(SharedMemoryCommunicator)
        store = dist.PrefixStore(f"part/{self._num_splits}/{index}", self._store)
        self._num_splits += 1
        part._join(store, ranks.index(self.rank), [self._names[rank] for rank in ranks], self._timeout_s)
        self._parts.add(part)
        return part

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's slots, here and in each part; without the tensors that `empty` returned."""
        own = NUM_SLOTS * SLOT_BYTES if self.world_size > 1 else 0
        return own + sum(part.buffer_bytes for part in self._parts)

    def _set_topic(self, topic: int) -> None:
        self._slots.topic = topic

    def _disconnect(self) -> None:
        self._slots.close()

    # -- the collectives, on the worker's thread ----------------------------------------------------------------

    def _reduce_scatter(self, unsharded: Tensor, op: ReduceOp, shard: Tensor) -> None:
        if self.world_size == 1:
            copy(shard, unsharded)
        elif (offered := self._offer(unsharded, unsharded.nbytes)) is not None:
            self._reduce_where_they_lie(offered, op, shard)
            self._slots.done()
        else:
            self._reduce_in_slots(unsharded, op, shard)

    def _all_gather(self, unsharded: Tensor, shard: Tensor) -> None:
        start, stop = shard_interval(unsharded.numel(), self.world_size, self.rank)
        if self.world_size > 1 and (shards := self._offer(shard, unsharded.nbytes)) is not None:
            for peer in self._slots.peers:
                start_of, stop_of = shard_interval(unsharded.numel(), self.world_size, peer)
                copy(unsharded[start_of:stop_of], shards[peer])
            copy(unsharded[start:stop], shard)
            self._slots.done()
        else:
            copy(unsharded[start:stop], shard)
            self._gather_in_slots(unsharded, shard)

    def _all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        if self.world_size == 1:
            return
        start, stop = shard_interval(flat.numel(), self.world_size, self.rank)
        if (offered := self._offer(flat, flat.nbytes)) is not None:
            self._reduce_where_they_lie(offered, op, flat[start:stop])
            self._slots.done()  # now each shard is reduced, in its owner's tensor
            for peer in self._slots.peers:
                theirs = slice(*shard_interval(flat.numel(), self.world_size, peer))
                copy(flat[theirs], offered[peer][theirs])
            self._slots.done()
        else:
            self._reduce_in_slots(flat, op, flat[start:stop])
            self._gather_in_slots(flat, flat[start:stop])

    def _offer(self, tensor: Tensor, whole_bytes: int) -> list[Tensor] | None:
        """Return every rank's ``tensor`` to be read in place; None if it is too small or not all are in an arena."""
        return self._slots.offer(tensor) if whole_bytes >= DIRECT_BYTES else None

    def _reduce_where_they_lie(self, offered: list[Tensor], op: ReduceOp, shard: Tensor) -> None:
        start, stop = shard_interval(offered[0].numel(), self.world_size, self.rank)
        # With two ranks there are no partial sums, hence nothing to keep in the caches: one piece is enough.
        size = _CACHED_BYTES // shard.element_size() if self.world_size > 2 else stop - start
        partial = torch.empty(min(size, stop - start) if self.world_size > 2 else 0, dtype=shard.dtype)
        for first in range(start, stop, size):
            parts = [tensor[first : min(first + size, stop)] for tensor in offered]
            target = shard[first - start : first - start + parts[0].numel()]
            _combine_in_order(COMBINE[op], parts, target, self.rank, partial[: parts[0].numel()])

    def _reduce_in_slots(self, unsharded: Tensor, op: ReduceOp, shard: Tensor) -> None:
        slots, combine, rank = self._slots, COMBINE[op], self.rank
        starts, stops = zip(*(shard_interval(unsharded.numel(), self.world_size, r) for r in slots.ranks), strict=True)
        size = slots.numel(unsharded.dtype) // max(self.world_size - 1, 1)  # elements in a piece of one shard

        def publish(piece: int, slot: Tensor) -> None:
            for peer in slots.peers:
                start = min(starts[peer] + piece * size, stops[peer])
                part = unsharded[start : min(start + size, stops[peer])]
                place = (peer - (peer > rank)) * size
                slot[place : place + part.numel()].copy_(part)

        def read(piece: int, published: list[Tensor]) -> None:
            start = starts[rank] + piece * size
            own = unsharded[start : min(start + size, stops[rank])]
            target = shard[piece * size : piece * size + own.numel()]
            parts = []
            for peer, slot in enumerate(published):
                place = (rank - (rank > peer)) * size
                parts.append(own if peer == rank else slot[place : place + own.numel()])
            # partial sums go into the first part: nobody else reads this part of the slot
            _combine_in_order(combine, parts, target, rank, parts[0])

        slots.exchange(unsharded.dtype, -(-(stops[0] - starts[0]) // size), publish, read)

    def _gather_in_slots(self, unsharded: Tensor, shard: Tensor) -> None:
        slots, size = self._slots, self._slots.numel(unsharded.dtype)
        intervals = [shard_interval(unsharded.numel(), self.world_size, r) for r in slots.ranks]

        def publish(piece: int, slot: Tensor) -> None:
            part = shard[piece * size : (piece + 1) * size]
            slot[: part.numel()].copy_(part)

        def read(piece: int, published: list[Tensor]) -> None:
            for peer in slots.peers:
                start, stop = intervals[peer]
                target = unsharded[min(start + piece * size, stop) : min(start + (piece + 1) * size, stop)]
                target.copy_(published[peer][: target.numel()])

        slots.exchange(unsharded.dtype, -(-intervals[0][1] // size), publish, read)

    def _all_to_all(self, output: Tensor, parts: Tensor) -> None:
        mine, theirs = parts.view(self.world_size, -1), output.view(self.world_size, -1)
        theirs[self.rank].copy_(mine[self.rank])
        if self.world_size == 1:
            return
        if (tensors := self._offer(parts, parts.nbytes)) is not None:
            for peer in self._slots.peers:
                theirs[peer].copy_(tensors[peer].view(self.world_size, -1)[self.rank])
            self._slots.done()
            return
        size = self._slots.numel(parts.dtype) // (self.world_size - 1)  # elements in a piece of one part

        def publish(piece: int, slot: Tensor) -> None:
            for peer in self._slots.peers:
                part = mine[peer, piece * size : (piece + 1) * size]
                place = (peer - (peer > self.rank)) * size
                slot[place : place + part.numel()].copy_(part)

        def read(piece: int, published: list[Tensor]) -> None:
            for peer in self._slots.peers:
                target = theirs[peer, piece * size : (piece + 1) * size]
                place = (self.rank - (self.rank > peer)) * size
                target.copy_(published[peer][place : place + target.numel()])

        self._slots.exchange(parts.dtype, -(-mine.shape[1] // size), publish, read)

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


def _combine_in_order(combine: Combine, parts: list[Tensor], target: Tensor, own: int, partial: Tensor) -> None:
    """Combine ``parts`` in their order into ``target``, which may be part number ``own`` itself.

    So that ``target`` does not overwrite that part too early, the partial results before it go into ``partial``, which
    may be the first part.
    """
    total = parts[0]
    for index in range(1, len(parts)):
        total = combine(total, parts[index], out=target if index >= own else partial)


def ranks_share_host(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks of ``group`` (None: the default group) run on one host. Collective."""
    parent, rank, world_size = members(group)
    return len(set(_tell_all(own_store(parent), "host", rank, world_size, _host()))) == 1


def _host() -> str:
    """Return a unique name for this host: host name (a container has its own), boot id, and namespaces.

    Nodes that the launcher makes on one machine (``--link.mode netns``) differ only in the network namespace. Processes
    of two process namespaces cannot open each other's memory.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    words = [socket.gethostname(), boot.read_text().strip() if boot.exists() else ""]
    with contextlib.suppress(OSError):  # not on Linux, or not allowed to look
        words += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join(filter(None, words))


def _tell_all(store: dist.Store, what: str, rank: int, world_size: int, word: str) -> list[str]:
    """Exchange a string, ``word``, through the store; return every rank's, by rank."""
    store.set(f"{what}/{rank}", word)
    return [store.get(f"{what}/{r}").decode() for r in range(world_size)]


def _map_segments(store: dist.Store, rank: int, names: Sequence[int]) -> list[Segment]:
    """Map and return all ranks' segments. If one rank cannot take part, all raise."""
    world_size = len(names)
    hosts = _tell_all(store, "host", rank, world_size, _host())
    for name, host in zip(names, hosts, strict=True):
        if host != hosts[0]:
            what = f"shared memory joins ranks of one host, and rank {name} is on {host}, rank {names[0]} on {hosts[0]}"
            raise UserError("comm", what, "use ring")
    own: Segment | None = None
    segments: list[Segment] = []
    try:
        try:
            own = Segment.create(names[rank], NUM_COUNTERS, NUM_SLOTS * SLOT_BYTES)
            found = own.path
        except UserError as error:
            found = f"{_FAILED}{error.what}"
        paths = _agreed(_tell_all(store, "path", rank, world_size, found))
        try:
            for other, path in enumerate(paths):
                is_own = other == rank and own is not None
                segments.append(own if is_own else Segment.attach(path, names[other], NUM_COUNTERS))
            state = "mapped"
        except OSError as error:
            state = f"{_FAILED}rank {names[rank]} cannot open another rank's memory ({error})"
        _agreed(_tell_all(store, "state", rank, world_size, state))
    except BaseException:
        for segment in (own, *segments):
            if segment is not None:
                segment.close()
        raise
    return segments


def _agreed(words: list[str]) -> list[str]:
    """Return ``words``; raise UserError if one of them reports that its rank has failed."""
    for word in words:
        if word.startswith(_FAILED):
            raise UserError("comm", word.removeprefix(_FAILED), "use ring")
    return words
