"""Weights whose master is on the host: `HostParams`, and how their shards come to the device, `HostTransport`.

Frozen weights have no master. Where weights are streamed, `FrozenOnHost` has their shards of stage 3 on the host alone.

master    fp32, on the host; the update changes it there
  | cast on the host, one copy up after each step, by the thread that updates
shard     compute dtype: of stage 3, on the device, or (``weights="host"``) on the host and copied for each gather,
          or (``weights="disk"``) nowhere: each gather casts the master, which is in a file, or still in the slot in
          which it was updated; of other stages, this rank's slice of the unsharded weights itself
  | all-gather
full      unsharded weights, on the device

[Note: Host and device in one]
    On a CPU, fp32 weights whose master stays in memory are left as the core has them: the master is what is gathered,
    at stages 0 to 2 a part of the unsharded weights. No cast, no copy, and no search for writes. So between `step` and
    the next gather weights change in place, and are stale at any number of ranks.

[Note: One rank that streams]
    The core shards nothing where one rank has everything. If its weights come from the host or the file, that rank is a
    world of one shard, which is all of them: they are gathered and freed as among several ranks, so a model may be
    larger than the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm import Work, empty_for
from zeroshard.comm.base import DONE
from zeroshard.comm.streams import Mark, Streams
from zeroshard.host.slab import Slab, room
from zeroshard.zero.buffers.changed_values import bit_sums
from zeroshard.zero.buffers.flat_params import FlatParams, take_written
from zeroshard.zero.buffers.plain import BufferFacts
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.core.weights import STALE_VISIBLE, WeightTransport
from zeroshard.zero.offload.executor import Update
from zeroshard.zero.offload.on_disk import UnitOnDisk
from zeroshard.zero.offload.staging import Staging

HOST = torch.device("cpu")


class HostParams(FlatParams):
    """Weights with their master on the host. Who touches that waits for its update: [Note: Who waits] in `executor`.

    What a user writes into the weights is found by `bit_sums` of those that stay on the device: the master is another
    tensor, on another device, and a write through ``.data`` leaves no trace. They are compared on the device, and no
    step waits for the answer: the update does, before it reads the master, as does whoever else reads it.
    """

    transport: HostTransport

    def __init__(self, *args: Any, update: Update, stored: UnitOnDisk | None, **kwargs: Any) -> None:
        self.update, self._stored = update, stored if stored is not None and stored.masters else None
        self._shown: Tensor | None = None
        self._check: tuple[Tensor, Mark] | None = (
            None  # whether it was written into, 0-dim on the host; behind its copy
        )
        self._is_gathering = False
        super().__init__(*args, **kwargs)
        if not self.shard_optim:  # updates on the host have the bits of a sharded optimizer's there
            self.pieces = self.layout.updated_by_all(HOST)
        if not self.transport.sends_master:
            self._leave_device()
        if self.transport.streams:
            free_after_use(self)
        self._look()

    def _leave_device(self) -> None:
        """Move the master to memory of its own, or to the file."""
        self._aliased, self._always_compared = False, False
        there = self._master
        if self._stored is not None:
            self._master = self.transport.take_stored(self._stored, there)
        else:
            slab = Slab(room(there.nbytes), device=self.full.device, pinned=False)
            self._master = slab.take(there.numel(), there.dtype).copy_(there)

    @property
    def master(self) -> Tensor:  # an attribute of `Weights`, which waits here
        """The master, once no update of it is under way, and none is on its way to a file."""
        self.update.wait()
        if self._stored is not None and not (self._is_gathering and self._check is None):
            self._stored.wait()
        self.take_checked()
        return self._master

    @master.setter
    def master(self, tensor: Tensor) -> None:
        self._master = tensor

    @property
    def master_now(self) -> Tensor:
        """The master, which an update may be changing now."""
        return self._master

    def take_update(self, master: Tensor) -> None:
        """Cast ``master``, new and in memory, to where the next gather, which waits for this update, needs it."""
        full = self.full if self.full.untyped_storage().nbytes() else None
        self.transport.take_update(full, master, self._streams, self._written_at)

    def before_gather(self) -> None:
        """Wait for the update where nobody else does; from here on the transport reads the master from where it is."""
        if self._aliased:  # where nothing is sent, nobody reads the master
            self.update.wait()
        self._is_gathering = True
        super().before_gather()

    def _gather(self) -> None:
        try:
            super()._gather()
        finally:
            self._is_gathering = False  # the transport has read the master

    def arrived(self, *, hidden: bool) -> None:
        """Remember what the weights now are."""
        super().arrived(hidden=hidden)
        self._look()

    def stale_now(self) -> None:
        """As of `FlatParams`; weights that are the master change in place, and are stale all the same."""
        super().stale_now()
        if self._aliased and self.state.readable:
            self.state = STALE_VISIBLE
            self.watch_reads()

    def _look(self) -> None:
        if not self.shard_params and not self._aliased and self.state.readable:
            self._shown = bit_sums(self.full)

    def take_changes(self, *, waits: bool = True) -> None:
        """As of `FlatParams`; without ``waits``, `take_check` or `take_checked` follows."""
        super().take_changes()
        shown = self._shown if self.state.visible and not self.stale else None
        if shown is None:
            return
        sums = bit_sums(self.full)
        if not is_here(self.full.device):
            self._check = (sums != shown).any().to(HOST, non_blocking=True), self._streams.mark()
            if waits:
                self.take_checked()
        elif not torch.equal(sums, shown):
            self.write_back()

    def take_check(self) -> Callable[[], None]:
        """Return what waits for the comparison that is under way, and copies what was written; nobody else will."""
        check, self._check = self._check, None

        def apply() -> None:
            if check is not None:
                differs, known = check
                if known is not None:
                    known.synchronize()
                if is_set(differs):
                    with torch.no_grad():
                        take_written(self.transport, self._master, self._written())

        return apply

    def take_checked(self) -> None:
        """Wait for the comparison that is under way, and copy what was written."""
        if self._check is not None:
            self.take_check()()

    def write_back(self) -> None:
        """Copy values that were written into unsharded weights to the master."""
        super().write_back()
        self._look()

    def _written(self) -> Tensor:
        return super()._written().to(HOST)


class FrozenOnHost(FlatParams):
    """Frozen weights of which this rank's shard is on the host, in the compute dtype, and copied up for each gather.

    ``staging``: says whether it may be page-locked.
    """

    transport: HostTransport

    def __init__(self, *args: Any, staging: Staging, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        there, num_bytes = self.master, room(self.master.nbytes)
        slab = Slab(num_bytes, device=self.full.device, pinned=staging.pins(num_bytes))
        self.master = slab.take(there.numel(), there.dtype).copy_(there)
        self.transport.stream(self.master)
        free_after_use(self)

    def come_back(self) -> None:
        """Bring the shard to the device for good, as it is to be trained there."""
        self.transport.wait_for_sent()
        there = empty_for(self.comm, self.master.numel(), self.master.dtype, self.full.device)
        self.master, self.transport = there.copy_(self.master), self.transport.inner  # ty: ignore[invalid-assignment]
        self._written_at = self._streams.mark()

    def _written(self) -> Tensor:
        if isinstance(self.transport, HostTransport):
            self.transport.wait_for_sent()
        return super()._written().to(self.master.device)


def is_here(device: torch.device) -> bool:
    """Whether weights on ``device`` are in memory of the host, which reads them without waiting."""
    return device == HOST


def free_after_use(weights: FlatParams) -> None:
    """Shard weights that come from the host, if they are not: [Note: One rank that streams]."""
    if weights.shard_params:
        return
    weights.shard_optim = weights.shard_params = True
    weights._aliased = weights._always_compared = False
    weights.full = torch.empty_like(weights.full)  # memory of torch's own: the storage will be resized
    weights._views = weights.layout.views(weights.full)
    weights.free_memory()  # nothing was written to them yet


def is_set(flag: Tensor) -> bool:
    """The value of a flag, 0-dim, that has arrived on the host."""
    return bool(flag)


class HostTransport:
    """Brings a shard to the device, from where another transport gathers it.

    Args:
        inner: that transport.
        facts: of the buffer.
        place: of the shard in the compute dtype at stage 3: ``"device"``, ``"host"`` or ``"disk"``; ``"master"``: it is
            the master itself, see `stream`.
        staging: page-locked memory for what is copied up.
        stores: whether the master is in the file.

    Attributes:
        sends_master: whether the master is what is gathered: [Note: Host and device in one].
        streams: whether each gather brings the shard from the host or the file.
    """

    def __init__(
        self, inner: WeightTransport, facts: BufferFacts, *, place: str, staging: Staging, stores: bool = False
    ) -> None:
        comm = facts.rank_groups.shard_group
        self._own = slice(*facts.layout.interval(comm.rank))
        self.inner, self._staging = inner, staging
        self.form, self.in_flight, self.resident = inner.form, inner.in_flight, inner.resident
        self._shard: Tensor | None = None  # of stage 3, in the compute dtype
        self._is_outdated = True
        self._sent_at: Mark = None  # behind the last copy up of a shard that stays on the host
        self._is_cast = False  # whether the update has left its result where the next gather needs it
        self._cast_at: Mark = None  # behind its copy to a GPU
        self._stored: UnitOnDisk | None = None  # with a master in the file
        self._shards_optim = comm.world_size > 1 and facts.strategy.optim is SHARD
        self.streams = facts.strategy.params is SHARD and place != "device"
        dtype = facts.precision.compute_dtype(facts.dtype)
        as_it_is = is_here(facts.device) and dtype == facts.dtype and inner.form is None
        self.sends_master = as_it_is and place == "device" and not stores
        shards = self.streams or (facts.strategy.params is SHARD and comm.world_size > 1)
        if shards and inner.form is None and place in ("device", "host") and not self.sends_master:
            numel = self._own.stop - self._own.start
            if place == "host":
                num_bytes = room(numel * dtype.itemsize)
                slab = Slab(num_bytes, device=facts.device, pinned=staging.pins(num_bytes))
                self.on_host = [slab.take(numel, dtype)]
            else:
                self.resident = [*inner.resident, torch.empty(numel, dtype=dtype, device=facts.device)]
            self._shard = self.on_host[0] if place == "host" else self.resident[-1]

    def prepare(self, full: Tensor, master: Tensor, *, changed: bool) -> None:
        """Bring the shard to the device, if that is older than the master, and have it made ready there."""
        if self.sends_master:
            self.inner.prepare(full, master, changed=changed)
            return
        own, is_cast = full[self._own], self._take_cast(self._staging.streams)
        if self.form is not None:  # it is the wide values that are encoded
            with self._readable(master) as values:
                self.inner.prepare(full, values.to(full.device), changed=changed)
            return
        if self._shard is None:
            if changed and not is_cast:
                self._copy_up(own, master)
        elif self._is_outdated and not is_cast:
            self.wait_for_sent()
            self._copy_up(self._shard, master)
        self._is_outdated = False
        if self._shard is not None and self.on_host:
            own.copy_(self._shard, non_blocking=True)
            self._sent_at = self._staging.streams.mark()
        sent = own if self._shard is None or self.on_host else self._shard
        self.inner.prepare(full, sent, changed=False)

    def start(self, full: Tensor) -> Work:
        """Issue the collective."""
        return self.inner.start(full)

    def finish(self, full: Tensor) -> bool:
        """Complete ``full``."""
        return self.inner.finish(full)

    def copy(self, full: Tensor, master: Tensor, streams: Streams, *after: Mark) -> Work | None:
        """Copy ``master``, which is not sharded, to ``full``, on a GPU on the stream ``copy_in``."""
        if full.device == master.device and self._take_cast(streams):
            return None
        with streams.on("copy_in", *after):
            if not self._take_cast(streams):
                self._copy_up(full, master)
            return None if full.device == master.device else streams.issued(DONE)

    def invalidate(self) -> None:
        """Record that master weights have changed, on every rank."""
        self._is_outdated, self._is_cast = True, False
        self.inner.invalidate()

    def take_update(self, full: Tensor | None, master: Tensor, streams: Streams, after: Mark) -> None:
        """Cast the result of an update, on its thread, to where the next gather, which waits for it, needs it.

        Args:
            full: the unsharded weights, which nobody sees before that gather; None: they have no memory now.
            master: the result.
            streams: of the device.
            after: a mark behind all that reads the weights of before the step.
        """
        if self.form is not None or self.sends_master:  # of a format, it is the wide values that are encoded
            return
        target = self._shard
        if target is None and full is not None:
            target = full[self._own] if self._shards_optim else full
        if target is None:
            return
        if target.device == HOST:
            self.wait_for_sent()
            target.copy_(master)
        else:
            with streams.on("to_device", after):
                self._staging.copy(target, master)
                self._cast_at = streams.mark()
        self._is_cast = True

    def take_stored(self, stored: UnitOnDisk, master: Tensor) -> Tensor:
        """Keep the master in the file; return it there."""
        self._stored = stored
        return stored.take_master(master)

    @contextmanager
    def _readable(self, master: Tensor) -> Generator[Tensor]:
        """The values of the master; of one in the file, those that its update has in memory, if they are there yet."""
        if self._stored is None:
            yield master
        else:
            with self._stored.reading_master(master) as values:
                yield values

    def _copy_up(self, target: Tensor, master: Tensor) -> None:
        with self._readable(master) as values:
            self._staging.copy(target, values)

    def stream(self, shard: Tensor) -> None:
        """Have each gather copy up ``shard``, the master itself, on the host and in the compute dtype."""
        self.on_host = [shard]
        if self.form is None:
            self._shard = shard

    def wait_for_sent(self) -> None:
        """Wait until the host may write a shard that is streamed."""
        if self._sent_at is not None:
            self._sent_at.synchronize()  # the host would write what the device has not read

    def _take_cast(self, streams: Streams) -> bool:
        """Whether the update has left its result where it is needed; the current stream then waits for its copy."""
        is_cast, self._is_cast = self._is_cast, False
        if is_cast and self._cast_at is not None:
            streams.wait(self._cast_at)
        return is_cast

    def take_written(self, master: Tensor, written: Tensor) -> None:
        """As the transport that gathers."""
        take_written(self.inner, master, written)

    on_host: list[Tensor] = []  # noqa: RUF012 -- replaced, never changed
