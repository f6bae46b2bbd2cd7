"""The weights of one group of a unit: a flat buffer that the model computes with, and master weights to be optimized.

[Note: Storage and saved views]
    Autograd saves views of weights in forward (``weight.t()``, say) and reads them in backward. Freed weights must
    therefore come back in the *same* storage: `reshard` resizes the flat buffer's storage to nothing and `unshard`
    resizes it back, so that views from before are valid again. While the storage is empty, each parameter's ``.data``
    is one NaN expanded to its shape: code that reads a freed weight sees NaN, never stray memory. ``param.data = view``
    hides the refresh from autograd's version check: the engine guarantees that weights change only between steps.
    Weights whose compute dtype is not the master's are hidden in the same way from a step until they are refreshed,
    because values written into the old weights would be lost.

[Note: Frozen]
    Parameters that are frozen when the engine is built and compute in another dtype need no master: they are kept only
    in the compute dtype, and `gather_master` returns them in their own. They get a master once they are to be trained.

[Note: One rank]
    In a world of one rank the shard is the entire buffer: nothing is freed, gathered or copied, at any stage.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from zeroshard.comm import Work, empty_for, labelled
from zeroshard.comm.streams import NO_STREAMS, Mark, Streams
from zeroshard.torch_internals import storage_id
from zeroshard.zero.buffers import outdated
from zeroshard.zero.buffers.flat_layout import FlatLayout
from zeroshard.zero.buffers.initial import initial_values
from zeroshard.zero.buffers.param_views import ParamViews
from zeroshard.zero.buffers.partition import Init
from zeroshard.zero.buffers.transport import WeightTransport
from zeroshard.zero.buffers.written_weights import bit_sums
from zeroshard.zero.core.layout import ALIGNMENT, Piece, view_of
from zeroshard.zero.core.precision import MixedPrecision
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.rank_groups import RankGroups


class WeightState(Enum):
    """What is in the memory of unsharded weights, and what the parameters show.

    | from                 | by                                              | to           |
    |----------------------|-------------------------------------------------|--------------|
    | `SHARDED`, `STALE`   | `FlatParams.unshard`                            | `GATHERING`  |
    | `GATHERING`          | `FlatParams.wait_for_unshard`                   | `UNSHARDED`  |
    | any                  | `FlatParams.reshard`, where weights are sharded | `SHARDED`    |
    | any but `SHARDED`    | `FlatParams.mark_stale`, where they are not     | `STALE`      |

    A master that is all of the unsharded weights makes them never stale: `mark_stale` leaves them `UNSHARDED`.
    """

    SHARDED = "sharded"
    """The buffer has no memory; parameters show NaN."""

    GATHERING = "gathering"
    """The buffer has memory, into which a gather writes; parameters do not show it yet."""

    UNSHARDED = "unsharded"
    """The buffer has the values of the master weights, rounded to the compute dtype; parameters show it."""

    STALE = "stale"
    """The buffer has values from before the last change of the master weights. Parameters show NaN, or, if the part of
    this rank's shard is the master itself, the buffer."""


SHARDED, GATHERING = WeightState.SHARDED, WeightState.GATHERING
UNSHARDED, STALE = WeightState.UNSHARDED, WeightState.STALE


class FlatParams:
    """Parameters of one dtype and device, as views of one buffer.

    Attributes:
        full: ``[padded_numel]`` in the compute dtype; empty storage while the weights are sharded and not in use.
        master: ``[padded_numel]`` if the optimizer is replicated, else ``[shard_numel]``; in the parameters' own dtype,
            or the compute dtype by [Note: Frozen]. If it has the compute dtype, weights are not sharded and there is no
            wire format, it is a view of ``full``.
        dtype, comm: the parameters' dtype before there was an engine; the ranks that hold the shards.
        pieces: the pieces of parameters that the optimizer on this rank updates. If it is replicated on the CPU: those
            of every rank, so that vectorised bodies and scalar tails fall on the same elements at each stage.
        state: what is in ``full`` now.
        transport: how ``full`` comes to be from the shards of all ranks.
        param_views: what the parameters show.
        absent: those that have left the model, as far as `take_names` has noticed.
        on_read: called before a read of a parameter whose values are stale or freed, and ends in `show_as_current`;
            None: reads are not watched. See [Note: Read between steps] in `outdated`.
    """

    on_read: Callable[[], None] | None = None
    absent: frozenset[nn.Parameter] = frozenset()

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        precision: MixedPrecision,
        init: Init | None,
        layout: FlatLayout | None = None,
        *,
        frozen: bool = False,
        transport: WeightTransport | None = None,
    ) -> None:
        self.name = name
        self.params = [param for _, param in params]
        self.rank_groups, self.comm = rank_groups, (comm := rank_groups.shard_group)
        shapes = [(param_name, param.shape) for param_name, param in params]
        self.layout = layout or FlatLayout.of(shapes, comm.world_size, ALIGNMENT, rank_groups.parts)
        self.shard_optim = strategy.optim is SHARD and comm.world_size > 1
        self.shard_params = strategy.params is SHARD and comm.world_size > 1  # [Note: One rank]
        self.state = UNSHARDED
        self._watches: dict[tuple[WeightState, Callable[[], None]], outdated.Watch] = {}
        self._work: Work | None = None
        self._streams: Streams = NO_STREAMS
        self._written_at: Mark = None  # the point in a stream where the master was complete
        self.dtype = self.params[0].dtype
        initial = initial_values(name, params, init, self.layout, rank_groups, shard_params=self.shard_params)
        own = slice(*self.layout.interval(comm.rank))
        compute_dtype = precision.compute_dtype(self.dtype)
        same = frozen or compute_dtype == self.dtype
        self._own = own
        self.transport = transport or WeightTransport(comm, self.layout)
        packed = self.transport.form is not None
        self._aliased = same and not self.shard_params and not packed
        rounded = packed or (not same and compute_dtype.itemsize < self.dtype.itemsize)
        self._always_compared = rounded and not self.shard_params
        self.full = initial if compute_dtype == self.dtype else initial.to(compute_dtype)
        held = self.full if same else initial
        self.master = held[own] if self.shard_optim else held
        if self.shard_optim and not self._aliased:
            self.master = empty_for(comm, self.layout.own_numel(comm.rank), held.dtype, held.device).copy_(held[own])
        del initial, held
        self.transport.attach(self.full)
        self._views = self.layout.views(self.full)
        self._storage_bytes = self.full.untyped_storage().nbytes()
        self.param_views = ParamViews(self.layout, self.params, compute_dtype, self.full.device)
        self._is_exposed = False  # whether the user may keep views of `full`
        self._exposed_bits: Tensor | None = None  # `bit_sums` of `full` when it was exposed or written back
        self.param_views.show_weights(self._views)
        self.pieces = self.layout.owned(comm.rank) if self.shard_optim else self.layout.updated_by_all(self.full.device)
        self.master_offset = own.start if self.shard_optim else 0
        self.reshard()

    def widen_master(self) -> bool:
        """Make a master in the parameters' own dtype, because they will be trained; return whether it is new."""
        if self.master.dtype == self.dtype:
            return False
        self.take_changes()
        self.master = empty_for(self.comm, self.master.numel(), self.dtype, self.master.device).copy_(self.master)
        self._aliased, self._written_at = False, self._streams.mark()
        return True

    def piece_of_master(self, piece: Piece) -> Tensor:
        """Return a view of the master, in the piece's shape."""
        return view_of(self.master, piece.offset - self.master_offset, piece.shape)

    def unshard(self, *, again: bool = False) -> None:
        """Issue the all-gather that makes ``full`` unsharded and current, unless one is in flight.

        If ``full`` is unsharded and current, gather only with ``again``: other ranks may have freed theirs.
        """
        if self._work is not None or (self.readable and not again):
            return
        if not self.param_views.visible:
            self.param_views.refuse_touched(self.name)
        elif self.readable:
            self.take_changes()
        read_at = self._streams.mark() if self.readable else None  # by kernels already queued
        changed = not self.readable or self.shard_params  # the values of this rank's shard in `full`
        self.show_as_current()
        with torch.no_grad():
            if not self.shard_optim:
                if not self._aliased and changed:
                    self.full.copy_(self.master)
                self.state = UNSHARDED if self.param_views.visible else GATHERING
                return
            with self._streams.on("copy_in", self._written_at, read_at):
                if self.state is SHARDED:
                    self.full.untyped_storage().resize_(self._storage_bytes)
                self.state = GATHERING
                self.transport.prepare(self.full, self.master, changed=changed)
                copied_at = self._streams.mark()
            with labelled(f"{self.name}/weights"), self._streams.on("gather", copied_at):
                self._work = self._streams.issued(self.transport.start(self.full))

    def wait_for_unshard(self) -> None:
        """Wait for the gather in flight, and make the parameters views of ``full``."""
        self._finish_gather()
        if self.state is not SHARDED and not self.param_views.visible:
            self.param_views.show_weights(self._views)

    def _finish_gather(self) -> None:
        """Wait for the gather in flight, and complete ``full``."""
        work, self._work = self._work, None
        if self.state is GATHERING:
            self.state = UNSHARDED
        if work is None:
            return
        work.wait()
        if self.transport.finish(self.full):
            self._written_at = self._streams.mark()

    def reshard(self) -> None:
        """Free the unsharded weights, if weights are sharded."""
        if not self.shard_params or self.state is SHARDED:
            return
        self._finish_gather()
        self.take_changes()
        self.param_views.show_placeholder()
        self._streams.freed()
        if self._is_exposed:  # the old memory is left to the user's views, which crash if it is freed under them
            self._is_exposed, self._views = False, []
            with torch.inference_mode(False):
                self.full = torch.empty_like(self.full)
                self._views = self.layout.views(self.full)
        self.full.untyped_storage().resize_(0)  # [Note: Storage and saved views]
        self.state = SHARDED

    def expose(self) -> None:
        """Record that unsharded weights are exposed to the user, who may keep views of them, or write into them."""
        if not self._aliased:
            self._is_exposed, self._exposed_bits = True, bit_sums(self.full)

    def mark_stale(self) -> None:
        """Record that the master has changed, so that the next `unshard` refreshes ``full``."""
        self.param_views.drop_assigned()  # the assigned tensor is older than the master
        self.param_views.accept()  # writes into weights that are stale now are dropped
        self.reshard()
        self.transport.invalidate()
        if self.state is not SHARDED and (self.shard_optim or not self._aliased):
            self._finish_gather()  # an exception may have ended a forward before it was waited for
            self.state = STALE
            if not self._aliased and self.param_views.visible:
                self.param_views.show_placeholder()
        self.watch_reads()
        self._written_at = self._streams.mark()

    def watch_reads(self) -> None:
        """Call `on_read` before a read of the parameters, if they are stale or freed."""
        if self.on_read is None or self.state not in (STALE, SHARDED):
            return
        key = self.state, self.on_read
        if key not in self._watches:
            name_of = self.param_views.name_of if self.state is SHARDED else None
            self._watches[key] = outdated.Watch(self.on_read, name_of)
        self._watches[key].mark(self.params)

    def use_streams(self, streams: Streams) -> None:
        """Gather on these streams from now on."""
        self._streams, self._written_at = streams, streams.mark()

    def show_as_current(self) -> None:
        """Stop watching reads of the parameters."""
        outdated.unmark(self.params)

    def take_changes(self) -> None:
        """Copy values that were written into unsharded, current weights to the master.

        Every rank must call it, and must have written the same values: [Note: Changes in place] in `written_weights`.
        """
        if not self.param_views.visible:
            self.param_views.refuse_assigned()
        assigned = self.param_views.take_assigned()
        written = assigned or self._always_compared or self.param_views.written
        if self.param_views.visible and self.state is not STALE and written:
            self.write_back()

    def drop_changes(self) -> bool:
        """Have the next `unshard` undo writes into weights, unless the master is a view; return whether any were."""
        before, self._exposed_bits = self._exposed_bits, None
        lost = before is not None and not torch.equal(before, bit_sums(self.full))
        lost = lost and (self.shard_params or self.param_views.written)
        if self._aliased:
            self.param_views.take_assigned()
        else:
            lost = self.param_views.drop_assigned() or lost
        if not self._aliased and self.param_views.visible and self.param_views.written:
            self.param_views.accept()
            if self.shard_params:
                self.reshard()
            else:
                self.state = STALE
                self._written_at = self._streams.mark()
        return lost

    def write_back(self) -> None:
        """Copy values that were written into unsharded weights to the master; its other elements do not change."""
        self.param_views.take_assigned()
        if self._aliased:
            return
        with torch.no_grad():
            written = self.full[self._own] if self.shard_optim else self.full
            self.transport.take_written(self.master, written)
        self.param_views.accept()
        self._exposed_bits = None if self._exposed_bits is None else bit_sums(self.full)
        self._written_at = self._streams.mark()
        self.transport.invalidate()

    def gather_master(self) -> Tensor:
        """Gather every shard's master: a new tensor ``[padded_numel]`` in the parameters' own dtype. Collective."""
        self.take_changes()
        if not self.shard_optim:
            return self.master.to(self.dtype, copy=True)
        flat = torch.empty(self.layout.padded_numel, dtype=self.master.dtype, device=self.master.device)
        with labelled(f"{self.name}/state"):
            self.layout.gather(self.comm, flat, self.master).wait()
        return flat.to(self.dtype)

    @property
    def is_rounded(self) -> bool:
        """Whether the transport may round weights more than their compute dtype does."""
        return self.transport.is_rounded(self.dtype, self.full.dtype)

    @property
    def readable(self) -> bool:
        """Whether ``full`` is unsharded and current now, or will be after `wait_for_unshard`."""
        return self.state in (UNSHARDED, GATHERING)

    @property
    def gather_in_flight(self) -> bool:
        """Whether `unshard` was called without `wait_for_unshard` since."""
        return self._work is not None or self.state is GATHERING

    @property
    def storages(self) -> set[int]:
        """The identities of the storages in which unsharded weights lie now."""
        return {storage_id(self.full)}

    @property
    def full_bytes(self) -> int:
        """Resident bytes of ``full`` now."""
        return self.full.untyped_storage().nbytes()

    @property
    def master_bytes(self) -> int:
        """Bytes of the master; 0 if it is a view of ``full``."""
        return 0 if self._aliased else self.master.nbytes
