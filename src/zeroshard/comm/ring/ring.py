"""Ring collectives, built on send and receive alone: each rank talks to two neighbours, and all links are busy at once.

A tensor of n elements is cut into W shards of ceil(n / W); the last ones may be shorter or empty. In a reduce-scatter
each shard travels once around the ring, and every rank that it visits adds its own values; in an all-gather the reduced
shard travels around once more:

    rank 0 --shard 3--> rank 1 --shard 3--> rank 2 --shard 3--> rank 3 (its owner)
              x0                x0 + x1           (x0 + x1) + x2        ((x0 + x1) + x2) + x3

So shard s is always reduced in the order of ranks s+1, s+2, ..., s (modulo W): the same bits on every rank, from run to
run, and from `all_reduce`, which is a reduce-scatter and an all-gather. A rank sends (W-1)/W of the tensor in each of
the two, the minimum (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
With two ranks the ring is a direct exchange of halves.

Small tensors take fewer rounds, with the same bits: `zeroshard.comm.ring.small`.

Shards travel in chunks: while one chunk is added, the next one arrives and the previous one leaves. All chunks travel
in the same direction, because a rank that sends and receives at once already uses both directions of its link. A rank
allocates two chunks beside the caller's tensors and nothing else: a reduce-scatter makes its partial sums in the input,
and gathered shards are received in place. With three ranks or more a large input that must stay intact is therefore
copied first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Groups, ReduceOp, Work
from zeroshard.comm.queued.messages import Transport
from zeroshard.comm.queued.pieces import copy, shard_interval
from zeroshard.comm.queued.queued import QueuedCommunicator
from zeroshard.comm.reductions import COMBINE
from zeroshard.comm.ring import small
from zeroshard.comm.ring.sockets import SocketTransport

MIN_CHUNK_BYTES = 256 << 10  # below it, a message costs more than its bytes
MAX_CHUNK_BYTES = 2 << 20
_CHUNKS_PER_SHARD = 4  # enough to overlap; more only adds messages

SendChunk = Callable[[Tensor], None]  # sends a chunk to the right neighbour


class RingCommunicator(QueuedCommunicator):
    """Ring collectives among the ranks of a process group, on CPU tensors of any dtype.

    Operations run in issue order on the communicator's own thread. Construction is collective over ``group``.

    Args:
        group: a process group that this rank belongs to; None: the default group.
        transport: sends and receives messages, in place of ``group``; None: TCP connections that are made here.
        timeout_s: seconds without data from a peer after which a collective raises; only for the transport made here.

    Raises:
        RuntimeError: as `TorchCommunicator`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, transport: Transport | None = None, timeout_s: float = 600.0
    ) -> None:
        self.transport: Transport = transport or SocketTransport(group, timeout_s=timeout_s)
        self.rank = self.transport.rank
        self.world_size = self.transport.world_size
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._open(f"ring-{self.rank}")

    def split(self, groups: Groups) -> RingCommunicator:
        """A ring for each group of ranks, with its own connections and its own thread."""
        part = RingCommunicator(transport=self.transport.split(groups))
        self._parts.add(part)
        return part

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the receive buffers of this ring and of the rings split from it."""
        return self._memory.nbytes + sum(part.buffer_bytes for part in self._parts)

    def _set_topic(self, topic: int) -> None:
        self.transport.topic = topic

    def _disconnect(self) -> None:
        self.transport.close()

    # -- the rings, on the worker's thread ----------------------------------------------------------------------

    def _shard(self, flat: Tensor, index: int) -> tuple[int, int]:
        """The interval of ``flat`` that is shard ``index`` (modulo the world)."""
        return shard_interval(flat.numel(), self.world_size, index % self.world_size)

    def _arrivals(self, flat: Tensor, chunk: int, first: int) -> list[list[Tensor]]:
        """For each step, the chunks of ``flat`` that the left neighbour sends; the first step has shard ``first``."""
        shards = (self._shard(flat, first - step) for step in range(self.world_size - 1))
        return [_chunks(flat, start, stop, chunk) for start, stop in shards]

    def _reduce(self, flat: Tensor, op: ReduceOp, output: Tensor, send: SendChunk, *, send_last: bool) -> None:
        """Reduce-scatter ``flat``, this rank's shard into ``output``; if ``send_last`` it is sent on too."""
        combine, chunk, left = COMBINE[op], self._chunk(flat), (self.rank - 1) % self.world_size
        *travelling, own = self._arrivals(flat, chunk, self.rank - 2)
        hops = [(part, part, True) for parts in travelling for part in parts]
        hops += [(part, out, send_last) for part, out in zip(own, _chunks(output, 0, len(output), chunk), strict=True)]
        buffers = self._landing(flat.dtype, chunk)

        def post(index: int) -> Work:
            return self.transport.recv(buffers[index % 2, : len(hops[index][0])], left)

        posted = [post(index) for index in range(min(2, len(hops)))]
        for part in _chunks(flat, *self._shard(flat, self.rank - 1), chunk):
            send(part)
        for index, (part, target, is_sent) in enumerate(hops):
            posted[index].wait()
            combine(part, buffers[index % 2, : len(part)], out=target)
            if index + 2 < len(hops):
                posted.append(post(index + 2))
            if is_sent:
                send(target)

    def _gather(self, flat: Tensor, send: SendChunk) -> None:
        """All-gather in ``flat``, once this rank's own shard has been sent."""
        left = (self.rank - 1) % self.world_size
        steps = self._arrivals(flat, self._chunk(flat), self.rank - 1)
        posted = [(step, part, self.transport.recv(part, left)) for step, parts in enumerate(steps) for part in parts]
        for step, part, work in posted:
            work.wait()
            if step < self.world_size - 2:
                send(part)

    def _reduce_scatter(self, unsharded: Tensor, op: ReduceOp, shard: Tensor) -> None:
        if self.world_size == 1:
            copy(shard, unsharded)
            return
        if small.is_small(unsharded.nbytes, self.world_size):
            start, stop = self._shard(unsharded, self.rank)
            shard.copy_(small.reduce_rows(small.gather_rows(unsharded, self.transport), op)[start:stop])
            return
        sends = _Sends(self)
        self._reduce(unsharded, op, shard, sends, send_last=False)
        sends.wait()

    def _writes_input(self, unsharded: Tensor) -> bool:
        return self.world_size > 2 and not small.is_small(unsharded.nbytes, self.world_size)

    def _all_gather(self, unsharded: Tensor, shard: Tensor) -> None:
        copy(unsharded[slice(*self._shard(unsharded, self.rank))], shard)
        if self.world_size > 1 and small.is_small(shard.nbytes, self.world_size):
            unsharded.copy_(small.gather_rows(shard, self.transport).view(-1))
        elif self.world_size > 1:
            sends = _Sends(self)
            for part in _chunks(shard, 0, len(shard), self._chunk(unsharded)):
                sends(part)
            self._gather(unsharded, sends)
            sends.wait()

    def _all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        if self.world_size > 1 and small.is_small(flat.nbytes, self.world_size):
            flat.copy_(small.reduce_rows(small.gather_rows(flat, self.transport), op))
        elif self.world_size > 1:
            sends = _Sends(self)
            start, stop = self._shard(flat, self.rank)
            self._reduce(flat, op, flat[start:stop], sends, send_last=True)
            self._gather(flat, sends)
            sends.wait()

    def _all_to_all(self, output: Tensor, parts: Tensor) -> None:
        """Exchange parts directly with every rank at once; nothing passes through a third rank."""
        mine, theirs = parts.view(self.world_size, -1), output.view(self.world_size, -1)
        theirs[self.rank].copy_(mine[self.rank])
        others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        heard = [self.transport.recv(theirs[source], source) for source in reversed(others)]
        told = [self.transport.send(mine[to], to) for to in others]
        for work in (*heard, *told):
            work.wait()

    def _broadcast(self, flat: Tensor, src: int) -> None:
        """Send chunks along the chain src, src + 1, ..., src - 1."""
        if small.is_small(flat.nbytes, 1):
            small.broadcast(flat, src, self.transport)
            return
        place = (self.rank - src) % self.world_size
        chunks = _chunks(flat, 0, flat.numel(), self._chunk(flat))
        sends = _Sends(self)
        posted = [self.transport.recv(part, (self.rank - 1) % self.world_size) for part in chunks] if place else []
        for index, part in enumerate(chunks):
            if place:
                posted[index].wait()
            if place < self.world_size - 1:
                sends(part)
        sends.wait()

    def _barrier(self) -> None:
        """Dissemination barrier: in round k, signal the rank 2^k to the right (Hensgen, Finkel and Manber, 1988)."""
        distance = 1
        while distance < self.world_size:
            token = torch.zeros(2, dtype=torch.uint8)
            heard = self.transport.recv(token[:1], (self.rank - distance) % self.world_size)
            told = self.transport.send(token[1:], (self.rank + distance) % self.world_size)
            heard.wait()
            told.wait()
            distance *= 2

    def _landing(self, dtype: torch.dtype, chunk: int) -> Tensor:
        """The receive buffer ``[2, chunk]``, which all operations share because they run one at a time."""
        num_bytes = 2 * chunk * dtype.itemsize
        if self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes].view(dtype).view(2, chunk)

    def _chunk(self, flat: Tensor) -> int:
        """Elements of a chunk: the same on every rank, because it depends only on the tensor's size."""
        return max(chunk_bytes(flat.nbytes, self.world_size) // flat.element_size(), 1)


def chunk_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes of a chunk of a tensor of ``num_bytes``, but for what is not a whole element."""
    shard_bytes = -(-num_bytes // world_size)
    return min(max(shard_bytes // _CHUNKS_PER_SHARD, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


class _Sends:
    """Sends chunks to the right neighbour, in the order of its calls."""

    def __init__(self, comm: RingCommunicator) -> None:
        self._transport = comm.transport
        self._right = (comm.rank + 1) % comm.world_size
        self._works: list[Work] = []

    def __call__(self, part: Tensor) -> None:
        self._works.append(self._transport.send(part, self._right))

    def wait(self) -> None:
        """Wait until all chunks have been sent."""
        for work in self._works:
            work.wait()


def _chunks(flat: Tensor, start: int, stop: int, chunk: int) -> list[Tensor]:
    return list(flat[start:stop].split(chunk)) if stop > start else []
