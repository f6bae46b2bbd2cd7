"""The weights of one group of a unit: a flat buffer that the model computes with, and master weights to be optimized.

    master    | shard of rank 0 | shard of rank 1 | ...     each rank has one; its optimizer updates it
                       |  `unshard`: an all-gather in the compute dtype
    full      |  slot 0  |     slot 1    | slot 2 | ...     parameters are views of it; stage 3 frees it by `reshard`

[Note: Storage and saved views]
    Autograd saves views of weights in forward (``weight.t()``, say) and reads them in backward. So freed weights must
    come back in the *same* storage: `reshard` resizes the flat buffer's storage to nothing and `unshard` resizes it
    back. While the storage is empty, each parameter's ``.data`` is one NaN expanded to its shape: who reads a freed
    weight sees NaN, never stray memory. ``param.data = view`` hides the refresh from autograd's version check: weights
    change only between steps. Stale weights are hidden alike, unless the master is a part of them.

[Note: One rank]
    In a world of one rank the shard is the entire buffer: nothing is freed, gathered or copied, at any stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator, Work, empty_for, labelled
from zeroshard.comm.streams import NO_STREAMS, Mark, Streams
from zeroshard.settings.wire_formats import Format
from zeroshard.zero.core.layout import FlatLayout, Piece, view_of
from zeroshard.zero.core.precision import Precision
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy


class WeightState(Enum):
    """What is in the memory of unsharded weights, and what the parameters show: views of it, or NaN.

    | parameters show | no memory | values before the last step | a gather writes | current     |
    |-----------------|-----------|-----------------------------|-----------------|-------------|
    | NaN             | `SHARDED` | `STALE_HIDDEN`              | `GATHERING`     |             |
    | views           |           | `STALE_VISIBLE`             | `REFRESHING`    | `UNSHARDED` |

    | method                  | from                                    | to                                           |
    |-------------------------|-----------------------------------------|----------------------------------------------|
    | `unshard`               | `SHARDED`, `STALE_HIDDEN`               | `GATHERING`                                  |
    |                         | `STALE_VISIBLE`; ``again``: `UNSHARDED` | `REFRESHING`; `UNSHARDED` if nothing is sent |
    | `wait_for_unshard`      | `GATHERING`, `REFRESHING`               | `UNSHARDED`; stale if the collective fails   |
    | `reshard`, `mark_stale` | any, where weights are sharded          | `SHARDED`                                    |
    | `mark_stale`            | any, where the master is another tensor | `STALE_HIDDEN`                               |
    |                         | any, where it is a part of the buffer   | `STALE_VISIBLE`; if it is all: `UNSHARDED`   |
    """

    SHARDED = "sharded"
    STALE_HIDDEN = "stale, hidden"
    STALE_VISIBLE = "stale, visible"
    GATHERING = "gathering"
    REFRESHING = "refreshing"
    UNSHARDED = "unsharded"

    in_flight: bool  # whether a gather was started that nobody has waited for
    readable: bool  # whether the weights are current now, or will be once it is waited for
    visible: bool  # whether parameters are views of the unsharded weights
    stale: bool  # whether these are older than the master


for _state in WeightState:  # plain attributes: a step asks for them some hundred times
    _state.in_flight = _state.name in ("GATHERING", "REFRESHING")
    _state.readable = _state.in_flight or _state.name == "UNSHARDED"
    _state.visible = _state.name in ("UNSHARDED", "REFRESHING", "STALE_VISIBLE")
    _state.stale = _state.name in ("STALE_HIDDEN", "STALE_VISIBLE")

SHARDED, GATHERING, REFRESHING = WeightState.SHARDED, WeightState.GATHERING, WeightState.REFRESHING
STALE_HIDDEN, STALE_VISIBLE, UNSHARDED = WeightState.STALE_HIDDEN, WeightState.STALE_VISIBLE, WeightState.UNSHARDED


class WeightTransport(Protocol):
    """How the unsharded weights of one buffer come to be from the shards of the ranks ``comm``.

    A gather has three steps: `prepare` makes this rank's shard ready to be sent (on a GPU on the stream ``copy_in``),
    `start` issues the collective, and `finish` does what is left once that is done. A new member is a class, and a
    line in `zeroshard.zero.transport.members`:

    | transport         | what is sent                                                                                 |
    |-------------------|----------------------------------------------------------------------------------------------|
    | `PlainTransport`  | each rank's shard, in the compute dtype                                                      |
    | `PackedTransport` | its codes and scales in a wire format, decoded by every rank                                 |
    | `NodeTransport`   | either of them once a step between nodes; later gathers are of a second copy inside the node |
    """

    @property
    def form(self) -> Format | None:
        """The wire format; None: weights are sent in the compute dtype."""
        ...

    @property
    def resident(self) -> list[Tensor]:
        """What stays from one gather to the next."""
        ...

    @property
    def in_flight(self) -> list[Tensor]:
        """What a gather in flight has, beside the unsharded weights."""
        ...

    def prepare(self, full: Tensor, master: Tensor, *, changed: bool) -> None:
        """Make the shard ``master [own_numel]`` ready; ``changed``: this rank's shard of ``full`` is older than it."""

    def start(self, full: Tensor) -> Work:
        """Issue the collective."""
        ...

    def copy(self, full: Tensor, master: Tensor, streams: Streams, *after: Mark) -> Work | None:
        """Copy ``master``, which is not sharded, to ``full`` after these marks; None: it is done."""
        ...

    def finish(self, full: Tensor) -> bool:
        """Complete ``full`` after the collective; return whether memory was written that `prepare` reads later."""
        ...

    def invalidate(self) -> None:
        """Record that master weights have changed, on every rank."""


class PlainTransport:
    """Sends each rank's shard in the compute dtype."""

    form: Format | None = None

    def __init__(self, comm: Communicator, layout: FlatLayout) -> None:
        self.comm, self.layout = comm, layout
        self._own = slice(*layout.interval(comm.rank))
        self._sent: Tensor | None = None
        self.resident: list[Tensor] = []
        self.in_flight: list[Tensor] = []

    def prepare(self, full: Tensor, master: Tensor, *, changed: bool) -> None:
        """Make the shard ``master [own_numel]`` ready; ``changed``: this rank's shard of ``full`` is older than it."""
        self._sent = master if master.dtype == full.dtype else full[self._own]
        if changed and self._sent is not master:
            self._sent.copy_(master)

    def start(self, full: Tensor) -> Work:
        """Issue the collective."""
        assert self._sent is not None
        sent, self._sent = self._sent, None
        return self.layout.gather(self.comm, full, sent)

    def copy(self, full: Tensor, master: Tensor, streams: Streams, *after: Mark) -> Work | None:
        """Copy ``master``, which is not sharded, to ``full`` after these marks; None: it is done."""
        full.copy_(master)

    def finish(self, full: Tensor) -> bool:
        """Complete ``full`` after the collective; return whether memory was written that `prepare` reads later."""
        return False

    def invalidate(self) -> None:
        """Record that master weights have changed, on every rank."""


class WeightWatch(Protocol):
    """Is told what happens to weights that users may read and write: `zeroshard.zero.buffers.flat_params` is."""

    def before_gather(self) -> None:
        """A gather is about to write over what is in the weights."""

    def arrived(self, *, hidden: bool) -> None:
        """The weights are current; ``hidden``: parameters still show NaN, and views of the weights from now on."""

    def before_free(self) -> None:
        """The memory of the weights is about to be freed."""

    def freed(self) -> None:
        """It is."""

    def before_stale(self) -> None:
        """The master has changed, and what is in the weights is older."""

    def stale_now(self) -> None:
        """Weights that were not freed are marked so."""

    def before_read(self) -> None:
        """The master is about to be read."""


class Weights:
    """Parameters of one dtype and device, as views of one buffer. Collective: rank 0's values are broadcast.

    Attributes:
        full: ``[padded_numel]`` in the compute dtype; empty storage while the weights are sharded and not in use.
        master: ``[padded_numel]`` if the optimizer is replicated, else ``[own_numel]``. If it has the compute dtype,
            weights are not sharded and there is no wire format, it is a view of ``full``.
        dtype, comm: the parameters' dtype before there was an engine; the ranks that hold the shards.
        pieces: the pieces of parameters that the optimizer on this rank updates.
        sends: whether ranks gather the weights from each other for each use.
        placeholder: the 0-dim NaN (0 for integers) that parameters show while their weights are hidden.
        watch: is told of all that happens to the weights.
    """

    watch: WeightWatch | None = None

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        layout: FlatLayout,
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        precision: Precision,
        transport: WeightTransport,
        initial: Callable[[Weights, Tensor], Tensor] | None = None,
    ) -> None:
        """``initial``: fills ``flat [padded_numel]``, and returns it in the dtype that the master is to have."""
        self.name, self.layout, self.transport = name, layout, transport
        self.params = [param for _, param in params]
        self.dtype, device = self.params[0].dtype, self.params[0].device
        self.rank_groups, self.comm = rank_groups, (comm := rank_groups.shard_group)
        several = comm.world_size > 1  # [Note: One rank]
        self.shard_optim, self.shard_params = several and strategy.optim is SHARD, several and strategy.params is SHARD
        self.sends = self.shard_params
        if self.shard_params:  # memory of torch's own: the storage will be resized
            flat = torch.empty(layout.padded_numel, dtype=self.dtype, device=device)
        else:
            flat = empty_for(comm, layout.padded_numel, self.dtype, device)
        layout.zero_padding(flat)
        flat = (initial or broadcast_values)(self, flat)
        self.full = flat.to(precision.compute_dtype(self.dtype))
        self._aliased = self.full.dtype == flat.dtype and not self.shard_params and transport.form is None
        own = slice(*layout.interval(comm.rank))
        self.master = flat[own] if self.shard_optim else flat
        if self.shard_optim and not self._aliased:
            self.master = empty_for(comm, self.master.numel(), flat.dtype, device).copy_(self.master)
        del flat
        self.pieces = layout.owned(comm.rank) if self.shard_optim else layout.updated_by_all(device)
        self.master_offset = own.start if self.shard_optim else 0
        self.placeholder = self.full.new_full((), float("nan") if self.full.is_floating_point() else 0)
        self._hidden = [self.placeholder.expand(slot.shape) for slot in layout.slots]
        self._views = layout.views(self.full)
        self._work: Work | None = None
        self.use_streams(NO_STREAMS)
        self.state = UNSHARDED
        self._show(self._views)
        self.reshard()

    def use_streams(self, streams: Streams) -> None:
        """Gather on these streams from now on."""
        self._streams, self._written_at = streams, streams.mark()  # a point in a stream where the master is complete

    def piece_of_master(self, piece: Piece) -> Tensor:
        """Return a view of the master, in the piece's shape."""
        return view_of(self.master, piece.offset - self.master_offset, piece.shape)

    def take_values(self, given: Mapping[nn.Parameter, Tensor]) -> None:
        """Copy this rank's pieces of the unsharded values ``given`` to the master; `mark_stale` follows. Collective."""
        for piece in self.pieces:
            if (source := given.get(self.params[piece.slot])) is not None:
                part = source.reshape(-1)[slice(*piece.interval)]
                self.piece_of_master(piece).copy_(part.view(piece.shape))

    def unshard(self, *, again: bool = False) -> bool:
        """Issue the gather of ``full``, unless it is current; ``again``: even so, as other ranks may lack theirs.

        Returns whether one was started.
        """
        if self._work is not None or (self.state.readable and not again):
            return False  # two gathers into one buffer could overtake each other
        if (watch := self.watch) is not None:
            watch.before_gather()
        self._gather()
        if self.state.in_flight:
            return True
        if watch is not None:
            watch.arrived(hidden=False)  # without a collective
        return False

    def _gather(self) -> None:
        current, visible = self.state.readable, self.state.visible
        changed = not current or self.shard_params  # whether this rank's shard of `full` must be written
        # On a GPU nothing here waits on the host: marks order the streams.
        read_at = self._streams.mark() if current else None  # by kernels that are queued already
        with torch.no_grad():
            if not self.shard_optim:
                if changed and not self._aliased:
                    self._work = self.transport.copy(self.full, self.master, self._streams, self._written_at)
                self.state = GATHERING if not visible else REFRESHING if self._work else UNSHARDED
                return
            # The copy reads the master, so it waits for the step that wrote it; it writes where kernels may still read.
            with self._streams.on("copy_in", self._written_at, read_at):
                if self.state is SHARDED:  # on this stream, which waits for the last use of the memory that it is given
                    self.full.untyped_storage().resize_(self.full.nbytes)
                self.state = REFRESHING if visible else GATHERING
                self.transport.prepare(self.full, self.master, changed=changed)
                copied_at = self._streams.mark()
            # The collective reads what the copy wrote. Nobody waits here: computation goes on until `wait_for_unshard`.
            with labelled(f"{self.name}/weights"), self._streams.on("gather", copied_at):
                self._work = self._streams.issued(self.transport.start(self.full))

    def wait_for_unshard(self) -> None:
        """Wait for the gather in flight, if there is one, and make the parameters views of ``full``."""
        if not self.state.in_flight:
            return
        work, visible = self._work, self.state.visible
        self._work, self.state = None, STALE_VISIBLE if visible else STALE_HIDDEN  # as it is if the collective fails
        if work is not None:
            work.wait()  # on a GPU the stream that computes waits, not the host
            if self.transport.finish(self.full):  # it has written the master's place: the next copy waits for that
                self._written_at = self._streams.mark()
        self.state = UNSHARDED
        if self.watch is not None:
            self.watch.arrived(hidden=not visible)  # before parameters change: their reads may be watched
        if not visible:
            self._show(self._views)

    def reshard(self) -> None:
        """Free the unsharded weights, if weights are sharded."""
        if not self.shard_params or self.state is SHARDED:
            return
        self.wait_for_unshard()  # a collective may still be writing to the memory
        if (watch := self.watch) is not None:
            watch.before_free()
        self.free_memory()
        if watch is not None:
            watch.freed()

    def free_memory(self) -> None:
        """Have parameters show NaN, and free the unsharded weights."""
        self._show(self._hidden)  # first: views of memory that is gone would crash
        self._streams.freed()  # not before kernels that read them are done
        self.full.untyped_storage().resize_(0)  # [Note: Storage and saved views]
        self.state = SHARDED

    def mark_stale(self) -> None:
        """Record that the master has changed, so that the next `unshard` refreshes ``full``."""
        if (watch := self.watch) is not None:
            watch.before_stale()
        self.reshard()  # sharded weights are gathered from the master at their next use, and show NaN until then
        self.transport.invalidate()
        if self.state is not SHARDED and (self.shard_optim or not self._aliased):
            self.wait_for_unshard()  # an exception may have ended a forward before it was waited for
            if self.state.visible and not self._aliased:
                self._show(self._hidden)
            self.state = STALE_VISIBLE if self._aliased else STALE_HIDDEN
        self._written_at = self._streams.mark()  # the next gather reads the master behind the step
        if watch is not None and self.state is not SHARDED:
            watch.stale_now()

    def _show(self, tensors: list[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor

    def gather_master(self) -> Tensor:
        """Gather every shard's master: a new tensor ``[padded_numel]`` in the parameters' own dtype. Collective."""
        if (watch := self.watch) is not None:
            watch.before_read()
        if not self.shard_optim:
            return self.master.to(self.full.device, self.dtype, copy=True)
        flat = torch.empty(self.layout.padded_numel, dtype=self.master.dtype, device=self.full.device)
        with labelled(f"{self.name}/state"):
            self.layout.gather(self.comm, flat, self.master.to(flat.device)).wait()
        return flat.to(self.dtype)


def broadcast_values(weights: Weights, flat: Tensor) -> Tensor:
    """Fill ``flat [padded_numel]`` with rank 0's values of the parameters, and return it. Collective."""
    with torch.no_grad():
        for param, view in zip(weights.params, weights.layout.views(flat), strict=True):
            view.copy_(param)
    with labelled(f"{weights.name}/start"):
        weights.rank_groups.world.broadcast(flat, src=0).wait()
    return flat
