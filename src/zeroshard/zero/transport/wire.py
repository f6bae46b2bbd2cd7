"""Collectives in a wire format: the all-gather of weights, and the reduce-scatter and all-reduce of gradients.

    weights     each rank quantises its fp32 shard; codes and scales are gathered; every rank, the owner too, computes
                with the decoded values. The master is never rounded, so errors do not accumulate from step to step.
    gradients   one all-to-all of quantised shards; the owner sums them in fp32, in the order of ranks. (A ring would
                quantise a partial sum again at each hop.) The owner's own part is not sent, and so not quantised.
    replicas    each group reduces to shards without quantisation. Then replicas exchange quantised pieces of the shard
                in an all-to-all, each replica sums one piece, and the sums are quantised again and gathered.

Gradients are rounded stochastically, so that the mean over steps is right; weights are rounded to the nearest.

Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
https://arxiv.org/abs/2306.10209, section 3: qwZ and qgZ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work, all_to_all, empty_for
from zeroshard.comm.streams import Mark, Streams
from zeroshard.host.lazily import loaded
from zeroshard.settings.wire_formats import Format, Rounding
from zeroshard.zero.buffers.changed_values import bit_sums, take_where_it_differs
from zeroshard.zero.core.layout import FlatLayout


def _kernel(name: str) -> Callable[..., None]:
    """Load a function of `zeroshard.kernels`, on first use: without a wire format Triton is not imported."""
    return loaded("zeroshard.kernels", name)


def quantise(values: Tensor, packed: Tensor, form: Format, key: int | None = None) -> None:
    """`zeroshard.kernels.quantise`."""
    _kernel("quantise")(values, packed, form, key)


def dequantise(packed: Tensor, values: Tensor, form: Format) -> None:
    """`zeroshard.kernels.dequantise`."""
    _kernel("dequantise")(packed, values, form)


def dequantised_sum(rows: Tensor, own: Tensor, rank: int, target: Tensor, form: Format) -> None:
    """`zeroshard.kernels.dequantised_sum`."""
    _kernel("dequantised_sum")(rows, own, rank, target, form)


class PackedTransport:
    """Sends shards in a wire format.

    Args:
        comm, layout: as `WeightTransport`.
        form: the wire format.
        compares: whether a user's writes are looked for at each step, because weights stay unsharded.
    """

    def __init__(self, comm: Communicator, layout: FlatLayout, form: Format, *, compares: bool) -> None:
        self.comm, self.layout = comm, layout
        self._own = slice(*layout.interval(comm.rank))
        self.resident: list[Tensor] = []
        self.in_flight: list[Tensor] = []
        self.form, self._form, self._compares = form, form, compares
        self._digest: bytes | None = None  # `seen` of this rank's own part of the weights, as it arrived

    def prepare(self, full: Tensor, master: Tensor, *, changed: bool) -> None:
        """Quantise this rank's shard."""
        self.expect(full)
        quantise(master, self._rows[self.comm.rank], self._form)

    def expect(self, full: Tensor) -> None:
        """Allocate the packed shards."""
        numel = full.numel() // self.comm.world_size
        self.in_flight[:] = [rows_for(self.comm, self._form, numel, full.device)]

    @property
    def _rows(self) -> Tensor:
        """``[world_size, bytes]``: codes and scales of all shards, while they arrive."""
        return self.in_flight[0]

    def start(self, full: Tensor) -> Work:
        """Issue the all-gather of codes and scales."""
        return self.comm.all_gather(self._rows.view(-1), self._rows[self.comm.rank])

    def finish(self, full: Tensor) -> bool:
        """Decode all shards."""
        packed = self.in_flight.pop()
        for row, shard in by_rank(packed, full.view(self.comm.world_size, -1)):
            dequantise(row, shard, self._form)
        record_read(packed)
        self._digest = digest_of(full[self._own]) if self._compares else None
        return False

    def copy(self, full: Tensor, master: Tensor, streams: Streams, *after: Mark) -> None:
        """Copy ``master``, which is not sharded, to ``full``."""
        full.copy_(master)

    def invalidate(self) -> None:
        """Nothing: what is sent is made anew for each gather."""

    def take_written(self, master: Tensor, written: Tensor) -> None:
        """As `flat_params.take_written`, but compare with what was decoded.

        Afterwards ``written`` is quantised anew: a block's scale may have changed, and with it the values of other
        elements in the block.
        """
        if self._digest is not None and self._digest == digest_of(written):
            return
        if take_where_it_differs(master, written, quantise_roundtrip(master, self._form, written.dtype)):
            written.copy_(quantise_roundtrip(master, self._form, written.dtype))

    def arriving(self, full: Tensor) -> Tensor:
        """The packed shards."""
        return self._rows.view(-1)

    def arriving_kind(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        """Bytes, of all shards."""
        return torch.uint8, self.layout.world_size * self._form.num_bytes(self.layout.shard_numel)


class PackedReduce:
    """A reduce-scatter in a wire format: an all-to-all of quantised shards, and the sum in the order of ranks.

    Args:
        comm: the ranks that hold the shards.
        form: the wire format.
        local: ``[world_size * n]``: this rank's sum. Its own shard is read in `deliver`.
        rounding: rounding keys of this buffer.

    Attributes:
        packed: the quantised shards that arrive.
    """

    def __init__(self, comm: Communicator, form: Format, local: Tensor, rounding: Rounding) -> None:
        self._comm, self._form, self.num_left = comm, form, 1
        shards = local.view(comm.world_size, -1)
        self._own = shards[comm.rank]
        self._sent = rows_for(comm, form, self._own.numel(), local.device)
        pack_rows(self._sent, shards, form, rounding.keys(comm.world_size), but=comm.rank)
        self.packed = torch.empty_like(self._sent)

    def issue(self, target: Tensor) -> Work:
        """Issue the collective."""
        self.num_left -= 1
        return all_to_all(self._comm, self.packed.view(-1), self._sent.view(-1))

    def deliver(self, target: Tensor) -> None:
        """Write the sum to ``target [n]``, once the collective is done; it may be this rank's shard of ``local``."""
        dequantised_sum(self.packed, self._own, self._comm.rank, target, self._form)
        record_read(self.packed)


class AcrossReplicas:
    """The sum of a shard over replicas in a wire format: an all-to-all of pieces, then a gather of their sums.

    The second collective can be issued only when the first is done: see [Note: Several collectives] in `gradients`.
    Every replica decodes the same quantised sums, so that all have the same bits.

    Args:
        comm: the replicate group.
        form: the wire format.
        values: ``[n]``, this replica's shard; read by the constructor, and written by `deliver`.
        rounding: rounding keys of this buffer.

    Attributes:
        packed: the quantised pieces that arrive, then the quantised sums.
        num_left: number of collectives that are still to be issued.
    """

    def __init__(self, comm: Communicator, form: Format, values: Tensor, rounding: Rounding) -> None:
        self._comm, self._form, self.num_left = comm, form, 2
        self._length = -(-values.numel() // comm.world_size)
        *keys, self._key = rounding.keys(comm.world_size + 1)
        ranks = (comm.rank,) if values.is_meta else range(comm.world_size)  # memory plans (on meta) have large worlds
        pieces = [_padded(values, rank * self._length, self._length) for rank in ranks]
        self._own = pieces[comm.rank if len(pieces) > 1 else 0].to(torch.float32, copy=True)
        self._sent = rows_for(comm, form, self._length, values.device)
        pack_rows(self._sent, pieces, form, keys, but=comm.rank)
        self.packed = torch.empty_like(self._sent)

    def issue(self, target: Tensor) -> Work:
        """Issue the exchange of the pieces; once that is done, the gather of their sums."""
        self.num_left -= 1
        if self.num_left:
            return all_to_all(self._comm, self.packed.view(-1), self._sent.view(-1))
        return self._gather()

    def _gather(self) -> Work:
        """Add up this replica's piece, and issue the gather of the sums."""
        dequantised_sum(self.packed, self._own, self._comm.rank, self._own, self._form)
        own = self.packed[self._comm.rank]
        quantise(self._own, own, self._form, self._key)
        return self._comm.all_gather(self.packed.view(-1), own)

    def deliver(self, values: Tensor) -> None:
        """Write the sum over replicas to ``values [n]``, once both collectives are done."""
        for rank, (row, _) in enumerate(by_rank(self.packed, self.packed)):
            part = values[rank * self._length : (rank + 1) * self._length]
            piece = part if part.numel() == self._length else values.new_empty(self._length)
            dequantise(row, piece, self._form)
            if piece is not part:
                part.copy_(piece[: part.numel()])
        record_read(self.packed)


def digest_of(full: Tensor) -> bytes | None:
    """Return a hash of sums by which a write into ``full`` is detected; None on a GPU, because the host would block."""
    if full.device.type != "cpu":
        return None
    return hashlib.blake2b(bit_sums(full).numpy(), digest_size=8).digest()


def quantise_roundtrip(values: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """Quantise ``values [n]`` and decode them, as in an all-gather of weights: a new tensor of ``dtype``."""
    packed = torch.empty(form.num_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    quantise(values, packed, form)
    back = torch.empty_like(values, dtype=dtype)
    dequantise(packed, back, form)
    return back


def rows_for(comm: Communicator, form: Format, numel: int, device: torch.device) -> Tensor:
    """Allocate a buffer ``[world_size, bytes]`` for one packed shard of ``numel`` elements per rank."""
    num_bytes = form.num_bytes(numel)
    return empty_for(comm, comm.world_size * num_bytes, torch.uint8, device).view(comm.world_size, num_bytes)


def by_rank(rows: Tensor, parts: Tensor | Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each rank's row and part; [] on the meta device, whose memory plans have no values and large worlds."""
    return [] if rows.is_meta else list(zip(rows, parts, strict=True))


def pack_rows(rows: Tensor, parts: Tensor | Sequence[Tensor], form: Format, keys: Sequence[int], but: int) -> None:
    """Quantise each part into its row, except row ``but``, which nobody reads."""
    for rank, (row, part) in enumerate(by_rank(rows, parts)):
        if rank != but:
            quantise(part, row, form, keys[rank])


def record_read(packed: Tensor) -> None:
    """Record a read on the current stream of memory of another stream, which must not reuse it before the read ends."""
    if packed.is_cuda:
        packed.record_stream(torch.cuda.current_stream(packed.device))


def _padded(values: Tensor, start: int, length: int) -> Tensor:
    """Return ``values[start : start + length]``, padded with zeros to ``length``."""
    part = values[min(start, values.numel()) : start + length]
    return part if part.numel() == length else torch.cat([part, part.new_zeros(length - part.numel())])
