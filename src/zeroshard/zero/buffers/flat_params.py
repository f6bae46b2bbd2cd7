"""The weights of one group of a unit, and what a user does to them: writes, assignments to ``.data``, reads.

[Note: Changes in place]
    A user may write into weights: clip them, prune them, draw them anew. If the weights are (a view of) the master,
    nothing is left to do. Otherwise the engine compares them with the master before it uses the master, and copies the
    elements that differ. It always compares if the weights are rounded (the master is wider, or they have a wire
    format), because a write through ``.data`` leaves no trace. If they are not, and before sharded weights are freed,
    it compares only if autograd's version counters show a write. So what a module writes through ``.data`` in its own
    forward at stage 3 is lost: write under ``torch.no_grad()`` instead. After an assignment to ``param.data`` (as in
    `torch.nn.utils.vector_to_parameters`) the parameter shows another tensor: the engine copies its values to the
    parameter's place in the buffer, and makes the parameter a view of the buffer again.

[Note: Frozen]
    Parameters that are frozen when the engine is built and compute in another dtype need no master: they are kept only
    in the compute dtype, and `gather_master` returns them in their own. They get a master once they are to be trained.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zeroshard.comm import empty_for
from zeroshard.host.torch_internals import storage_id
from zeroshard.optim.named_shards import NamedShard, ShardReader, require_shape
from zeroshard.settings.wire_formats import DtypeFormat
from zeroshard.zero.buffers.changed_values import bit_sums, take_where_it_differs
from zeroshard.zero.buffers.param_changes import ParamChanges
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.core.weights import (
    SHARDED,
    STALE_VISIBLE,
    UNSHARDED,
    Weights,
    WeightTransport,
)
from zeroshard.zero.meta_models import Init, initial_values
from zeroshard.zero.precision import MixedPrecision


@runtime_checkable
class TakesWritten(Protocol):
    """A `WeightTransport` after which unsharded weights have other values than the master, rounded to their dtype."""

    def take_written(self, master: Tensor, written: Tensor) -> None:
        """As `take_written`."""


def take_written(transport: WeightTransport, master: Tensor, written: Tensor) -> None:
    """Copy to ``master [n]`` what a user has written into its part of the weights, ``written [n]``."""
    if isinstance(transport, TakesWritten):
        transport.take_written(master, written)
    elif written.dtype == master.dtype:
        master.copy_(written)
    else:
        take_where_it_differs(master, written)


class Reads:
    """Notified of the weights whose reads could be watched, it watches none; `zeroshard.zero.guards.outdated` does."""

    def watch(self, weights: FlatParams) -> None:
        """The parameters' values are stale or freed, and users may read them."""

    def unwatch(self, params: Iterable[nn.Parameter]) -> None:
        """The parameters' values are current, or about to be, or users cannot read them now."""


class FlatParams(Weights):
    """Weights that users may write into and read at any time; what would be lost or wrong is refused.

    Args:
        name, params, strategy, rank_groups, precision, layout, transport: as `Weights`.
        init: draws the initial values; None: rank 0's values of the parameters are broadcast.
        frozen: whether there is to be no master in the parameters' own dtype: [Note: Frozen].

    Attributes:
        changes: finds what a user has written into the parameters, or assigned to them.
        absent: those that have left the model, as far as `take_names` has noticed.
        has_pieces: whether ranks have pieces of them, which a checkpoint has; else it has a digest.
        reads: is told when the parameters' values become stale or freed, and when they are current again.
    """

    layout: FlatLayout
    reads: Reads = Reads()
    absent: frozenset[nn.Parameter] = frozenset()
    has_pieces = True

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        precision: MixedPrecision,
        init: Init | None,
        layout: FlatLayout,
        transport: WeightTransport,
        *,
        frozen: bool = False,
    ) -> None:
        dtype = params[0][1].dtype
        initial = partial(initial_values, init=init, dtype=precision.compute_dtype(dtype) if frozen else dtype)
        super().__init__(name, params, layout, strategy, rank_groups, precision, transport, initial)
        rounded = transport.form is not None or self.full.dtype.itemsize < self.master.dtype.itemsize
        self._always_compared = rounded and not self.shard_params
        self._is_exposed = False  # whether the user may keep views of `full`
        self._exposed_bits: Tensor | None = None  # `bit_sums` of `full` when it was exposed or written back
        self.changes = ParamChanges(layout, self.params)
        # Whether several ranks have unsharded weights that the host reads without waiting.
        several, on_host = self.comm.world_size > 1, self.full.device.type == "cpu" and type(self.full) is Tensor
        self._remembers = several and on_host and not self.shard_params
        if self._remembers:
            self._remember_values()
        self.watch = weakref.proxy(self)  # now that they are complete; a reference would wait for the collector

    # -- the life of weights ------------------------------------------------------------------------------------

    def before_gather(self) -> None:
        """Keep or refuse what was written, because the gather writes over it."""
        if not self.state.visible:
            self.changes.refuse_touched(self.name, self._hidden, self.placeholder)
        elif self.state.readable:
            self.take_changes()
        if self._remembers:
            self.changes.remember(None)

    def arrived(self, *, hidden: bool) -> None:
        """Count writes into the parameters from now on. Until now reads were watched: they found NaN, or old values."""
        self.show_as_current()
        if hidden:
            self.changes.accept()
        if self._remembers:
            self._remember_values()

    def before_free(self) -> None:
        """Keep what was written; leave the memory to views of the user's, which crash if it is freed under them."""
        self.take_changes()
        if self._is_exposed:
            self._is_exposed = False
            with torch.inference_mode(False):
                self.full = torch.empty_like(self.full)
                self._views = self.layout.views(self.full)

    def freed(self) -> None:
        """Have reads watched."""
        self.watch_reads()

    def before_stale(self) -> None:
        """What was written or assigned to the weights is older than the master, and is dropped."""
        self._drop_assigned()
        self.changes.accept()

    def stale_now(self) -> None:
        """Have reads watched, if parameters show old values."""
        if self._remembers:
            self._remember_values()
        self.watch_reads()

    def before_read(self) -> None:
        """Have the master take what was written into the weights."""
        self.take_changes()

    def widen_master(self) -> bool:
        """Make a master in the parameters' own dtype, because they will be trained; return whether it is new."""
        if self.master.dtype == self.dtype:
            return False
        self.take_changes()
        self.master = empty_for(self.comm, self.master.numel(), self.dtype, self.master.device).copy_(self.master)
        self._aliased, self._written_at = False, self._streams.mark()
        return True

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def beside_values(self, rank: int) -> Iterable[NamedShard]:
        """What the checkpoint's part of this rank of the shard group has beside values of pieces."""
        return ()

    def require_saved(self, reader: ShardReader) -> None:
        """Raise UserError for a parameter that the checkpoint does not have, or has with another shape."""
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            if param not in self.absent:
                require_shape(reader, slot.name, "param", slot.shape)

    def load_values(self, reader: ShardReader) -> None:
        """Take the values of weights without pieces, if they were saved. Collective."""

    # -- reads --------------------------------------------------------------------------------------------------

    def watch_reads(self) -> None:
        """Have reads of the parameters watched, if these are stale or freed."""
        if self.state.stale or self.state is SHARDED:
            self.reads.watch(self)

    def show_as_current(self) -> None:
        """Stop watching reads of the parameters."""
        self.reads.unwatch(self.params)

    # -- writes -------------------------------------------------------------------------------------------------

    def take_changes(self, *, waits: bool = True) -> None:
        """Copy values that were written into unsharded, current weights to the master.

        Every rank must call it, and must have written the same values: [Note: Changes in place].
        ``waits``: whether they are there on return, also if the master is on another device; else an update waits.
        """
        if not self.state.visible:
            self.changes.refuse_assigned(self._hidden)
            return
        assigned = self.changes.take_assigned(self._views)
        if (assigned or self._always_compared or self.changes.written) and not self.state.stale:
            self.write_back()

    @property
    def has_writes(self) -> bool:
        """Whether a user has written into visible weights, as far as it leaves a trace, or assigned to a ``.data``."""
        return self.state.visible and (self.changes.written or bool(self.changes.reassigned(self._views)))

    @property
    def has_untraced_writes(self) -> bool:
        """Whether a user has written through ``.data``: [Note: Writes without a trace] in `param_changes`."""
        return self.state is UNSHARDED and self.changes.differs(self.full)

    def take_compared(self) -> None:
        """Take writes that every rank has: their values were compared."""
        self.take_changes(waits=False)
        self.changes.accept()
        if self._remembers:
            self._remember_values()

    def _remember_values(self) -> None:
        """Remember some values of current weights, to find writes without a trace: see `param_changes`."""
        self.changes.remember(self.full if self.state is UNSHARDED else None)

    def write_back(self) -> None:
        """Copy values that were written into unsharded weights to the master; its other elements do not change."""
        assert self.state.visible, "hidden parameters show NaN"
        self.changes.take_assigned(self._views)
        if self._aliased:
            return
        with torch.no_grad():
            take_written(self.transport, self.master, self._written())
        self.changes.accept()
        if self._remembers:
            self._remember_values()
        self._exposed_bits = None if self._exposed_bits is None else bit_sums(self.full)
        self._written_at = self._streams.mark()
        self.transport.invalidate()

    def _written(self) -> Tensor:
        """The weights whose values the master is to take."""
        return self.full[slice(*self.layout.interval(self.comm.rank))] if self.shard_optim else self.full

    def expose(self) -> None:
        """Record that unsharded weights are exposed to the user, who may keep views of them, or write into them."""
        if not self._aliased:
            self._is_exposed, self._exposed_bits = True, bit_sums(self.full)

    def drop_changes(self) -> bool:
        """Have the next `unshard` undo writes into weights, unless the master is a view; return whether any were."""
        before, self._exposed_bits = self._exposed_bits, None
        lost = before is not None and not torch.equal(before, bit_sums(self.full))
        lost = lost and (self.shard_params or self.changes.written)
        if self._aliased:
            self.changes.take_assigned(self._views)
            return lost
        lost = self._drop_assigned() or lost
        if self.state.visible and self.changes.written:
            self.changes.accept()
            if self.shard_params:
                self.reshard()
            else:
                self.state = STALE_VISIBLE
                self._written_at = self._streams.mark()
        return lost

    def _drop_assigned(self) -> bool:
        """Undo assignments to the parameters' ``.data``; return whether visible weights had other values."""
        visible = self.state.visible
        return self.changes.drop_assigned(self._views if visible else self._hidden, visible=visible)

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether ``full`` has values that are older than the master."""
        return self.state.stale

    @property
    def is_rounded(self) -> bool:
        """Whether the transport may round weights more than their compute dtype does."""
        form = self.transport.form
        return form is not None and not (isinstance(form, DtypeFormat) and form.dtype in (self.dtype, self.full.dtype))

    @property
    def storages(self) -> set[int]:
        """The identities of the storages in which unsharded weights lie now."""
        return {storage_id(self.full)}

    @property
    def full_bytes(self) -> int:
        """Resident bytes of ``full`` now."""
        return self.full.untyped_storage().nbytes()

    @property
    def master_now(self) -> Tensor:
        """The master, whose values an update may be changing."""
        return self.master

    @property
    def master_bytes(self) -> int:
        """Bytes of the master; 0 if it is a view of ``full``."""
        return 0 if self._aliased else self.master_now.nbytes
