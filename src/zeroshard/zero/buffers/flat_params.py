"""The weights of one unit: one flat buffer that the model computes with, and a master that the optimizer updates.

[Note: Storage and saved views]
    Autograd saves views of weights in forward (``weight.t()``, say) and reads them in backward. Freed weights must
    therefore come back at the *same* storage: `release` shrinks the flat buffer's storage to nothing and `gather` grows
    it again, so every view made in between is whole once more. While the storage is empty each parameter's ``.data`` is
    one NaN expanded to its shape: code that reads a freed weight sees NaN, never stray memory. ``param.data = view``
    hides the refresh from autograd's version check; that weights only change between steps is our invariant. Weights
    that compute in another dtype than their master has are hidden alike from a step until they are refreshed: what was
    written into the old ones would be lost.

[Note: Frozen]
    What is frozen when the engine is built, and computes in another dtype, needs no master: it is kept as it computes,
    and shown in its own dtype. It gets a master when it is trained after all.

[Note: One rank]
    A shard of a world of one is the whole. There nothing is freed, gathered or copied, at any stage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeroshard.comm import Work, empty_for, scope
from zeroshard.wire_formats import DtypeFormat
from zeroshard.zero.buffers import outdated
from zeroshard.zero.buffers.common_copy import CommonCopy, PackedDifferences, Replaced
from zeroshard.zero.buffers.differences import refuse_assigned, take_assigned, take_where_it_differs
from zeroshard.zero.buffers.initial import initial_values
from zeroshard.zero.buffers.layout import ALIGNMENT, FlatLayout, Piece
from zeroshard.zero.buffers.node_copy import NodeCopy
from zeroshard.zero.buffers.outside_views import OutsideViews
from zeroshard.zero.buffers.partition import Init
from zeroshard.zero.buffers.shards import gather_shards
from zeroshard.zero.buffers.wire import PackedGather, seen, take_written
from zeroshard.zero.levels import Levels
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.strategy import SHARD, ShardingStrategy
from zeroshard.zero.streams import NO_STREAMS, Mark, Streams


class FlatParams:
    """Parameters of one dtype and device, as views of one buffer.

    Attributes:
        full: ``[padded_numel]`` in the compute dtype; empty storage while the weights are sharded and not in use.
        master: ``[padded_numel]`` where the optimizer is replicated, else ``[shard_numel]``; the parameters' own
            dtype, or the compute dtype by [Note: Frozen]. Where it has the compute dtype and weights are whole it is a
            view of ``full``.
        dtype, comm: the parameters' own, from before there was an engine; the ranks that hold the shards.
        pieces: what of each parameter the optimizer on this rank updates. Where it is replicated on the CPU these are
            the pieces of every rank, so that vector bodies and scalar tails fall on the same elements at each stage.
        wire, packed_gather, node_copy: what weights travel in, None: the dtype that computes; their gather in it that
            is under way; the second copy of sharded weights, if there is one.
        common: what differences are to, where these travel; else None.
        stale, hidden: whether the master is newer than ``full``; the one number that weights which are not there show.
        on_read: called before a parameter is read whose values are not there, and ends in `show_as_current`; None:
            nobody is told. [Note: Read between steps] in `outdated`.
    """

    on_read: Callable[[], None] | None = None

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        strategy: ShardingStrategy,
        levels: Levels,
        precision: MixedPrecision,
        init: Init | None,
        layout: FlatLayout | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        self.name = name
        self.params = [param for _, param in params]
        self.levels, self.comm = levels, (comm := levels.shard)
        shapes = [(param_name, param.shape) for param_name, param in params]
        self.layout = layout or FlatLayout.of(shapes, comm.world_size, ALIGNMENT, levels.parts)
        self.shard_optim = strategy.optim is SHARD and comm.world_size > 1
        self.shard_params = strategy.params is SHARD and comm.world_size > 1
        self.stale = False
        self.whole = True
        self._copy_due = False  # whether `full` lacks what this rank's master holds
        self._shown = False  # whether the parameters are the views of `full`
        self._work: Work | None = None
        self.packed_gather: PackedGather | PackedDifferences | None = None
        self._seen: int | None = None  # this rank's own part of `full`, as it arrived
        self._streams: Streams = NO_STREAMS
        self._written_at: Mark = None  # where the master's values were complete
        self.dtype = self.params[0].dtype
        initial = initial_values(name, params, init, self.layout, levels, shard_params=self.shard_params)
        own = slice(*self.layout.interval(comm.rank))
        compute_dtype = precision.compute_dtype(self.dtype)
        same = frozen or compute_dtype == self.dtype
        self._own = own
        self.wire = precision.weights_format(self.dtype) if self.shard_optim else None
        self._aliased = same and not self.shard_params and self.wire is None
        self._thawed = False
        rounded = self.wire is not None or (not same and compute_dtype.itemsize < self.dtype.itemsize)
        self._always_compared = rounded and not self.shard_params
        self.full = initial if compute_dtype == self.dtype else initial.to(compute_dtype)
        held = self.full if same else initial
        self.master = held[own] if self.shard_optim else held
        if self.shard_optim and not self._aliased:
            self.master = empty_for(comm, self.layout.own_numel(comm.rank), held.dtype, held.device).copy_(held[own])
        del initial, held
        near = levels.node if self.shard_params and strategy.secondary_shard_size is not None else None
        self.node_copy = NodeCopy.of(near, self.full, self.layout, self.wire)
        self.common: CommonCopy | None = None
        if self.wire is not None and precision.gathers_differences:
            self.common = CommonCopy(name, self.wire, self.full[own])
        self._views = self.layout.views(self.full)
        self._storage_bytes = self.full.untyped_storage().nbytes()
        fill = float("nan") if compute_dtype.is_floating_point else 0
        self.hidden = torch.full((), fill, dtype=compute_dtype, device=self.full.device)
        self._freed = [self.hidden.expand(slot.shape) for slot in self.layout.slots]
        self._outside = OutsideViews()
        self._attach()
        self.pieces = self.layout.owned(comm.rank) if self.shard_optim else self.layout.updated_by_all(self.full.device)
        self.master_offset = own.start if self.shard_optim else 0
        self.release()

    def _attach(self) -> None:
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view
        self._shown = True
        self._versions = self._written()

    def _hide(self) -> None:
        for param, freed in zip(self.params, self._freed, strict=True):
            param.data = freed
        self._shown = False

    def _written(self) -> int:
        """Grows with each write into a parameter that autograd knows of."""
        return sum(param._version for param in self.params)

    def thaw(self) -> bool:
        """Keep a master in the parameters' own dtype from now on, since they are trained; whether it is new."""
        if self.master.dtype == self.dtype:
            return False
        self.take_changes()
        self.master = empty_for(self.comm, self.master.numel(), self.dtype, self.master.device).copy_(self.master)
        self._aliased, self._thawed, self._written_at = False, True, self._streams.mark()
        return True

    def piece_of_master(self, piece: Piece) -> Tensor:
        """View of the master, in the piece's shape."""
        start = piece.offset - self.master_offset
        return self.master[start : start + piece.numel].view(piece.shape)

    def place_in_full(self, piece: Piece) -> Tensor | None:
        """View, of the piece's shape, of the weights that compute, for an optimizer to write beside the master.

        None where there is nothing to write: the master is those weights, or they do not outlive a step.
        """
        if self._aliased or self.shard_params or self.wire is not None:
            return None
        return self.full[piece.offset : piece.offset + piece.numel].view(piece.shape)

    def gather(self, *, again: bool = False) -> None:
        """Issue the all-gather that makes ``full`` unsharded and current, unless one is under way.

        Where ``full`` is whole and current, only ``again`` gathers it: other ranks may have freed theirs.
        """
        if self._work is not None or (self.whole and not self.stale and not again):
            return
        if not self._shown:
            self._require_untouched()
        read_at = self._streams.mark() if self.whole and not self.stale else None  # by what was queued before
        self.stale = False
        self.show_as_current()
        copy_due = self._copy_due or self.shard_params
        self._copy_due = False
        with torch.no_grad():
            if not self.shard_optim:
                if not self._aliased and copy_due:
                    self.full.copy_(self.master)
                return
            near = self.node_copy.current
            with self._streams.on("copy_in", self._written_at, read_at):
                own = self._copied_in(copy_due=copy_due and self.wire is None and not near)
                if self.common is not None:
                    self.packed_gather = self.common.gather(self.comm, self.full, self.master)
                elif self.wire is not None:
                    self.packed_gather = PackedGather(self.comm, self.wire, self.full, None if near else self.master)
                copied_at = self._streams.mark()
            with scope(f"{self.name}/weights"), self._streams.on("gather", copied_at):
                self._work = self._streams.issued(self._collective(own, near=near))

    def _collective(self, own: Tensor, *, near: bool) -> Work:
        packed = self.packed_gather
        if near:
            return self.node_copy.gather(self.full if packed is None else packed.packed.view(-1))
        return gather_shards(self.comm, self.layout, self.full, own) if packed is None else packed.gather()

    def _copied_in(self, *, copy_due: bool) -> Tensor:
        """This rank's shard, for the all-gather into ``full``, which has memory from here on."""
        if not self.whole:
            self.full.untyped_storage().resize_(self._storage_bytes)
            self.whole = True
        if self.common is not None:
            return self.common.shard
        own = self.full[self._own]
        if not self._aliased and self.full.dtype == self.master.dtype:
            return self.master
        return own.copy_(self.master) if copy_due and not self._aliased else own

    def wait(self) -> None:
        """Finish what `gather` started and let the parameters see it."""
        self._finish()
        if self.whole and not self._shown:
            self._attach()

    def _finish(self) -> None:
        """Wait for the all-gather that is under way."""
        work, self._work = self._work, None
        packed, self.packed_gather = self.packed_gather, None
        if work is None:
            return
        work.wait()
        if self.node_copy.keep(self.full if packed is None else packed.packed.view(-1)):
            self._written_at = self._streams.mark()
        if packed is not None:
            packed.deliver()
        if self.wire is not None:
            self._seen = seen(self.full[self._own]) if self._always_compared else None

    def release(self) -> None:
        """Free the full weights, where they are sharded."""
        if not self.shard_params or not self.whole:
            return
        self._finish()
        self.take_changes()
        held = self._outside.hold(self.full)
        self._hide()
        self._streams.freed()
        if held:
            self.full = torch.empty_like(self.full)
            self._views = self.layout.views(self.full)
        self.full.untyped_storage().resize_(0)
        self.whole = False

    def hand_out(self) -> None:
        """The user is shown full weights from here on, and may keep views of them."""
        if self.shard_params:
            self._outside.may_come(self.full)

    def mark_stale(self, *, copied: bool = False, replaced: Replaced | None = None) -> None:
        """The master has changed: the next `gather` refreshes ``full``.

        ``copied``: this rank's own part of ``full`` has changed with it; see `place_in_full`. ``replaced``: it has not
        changed by a step; see `zeroshard.zero.buffers.common_copy`.
        """
        for _, param, view in self._elsewhere():
            param.data = view  # what it showed is older than the master
        self._versions = self._written()  # what was written into weights that are outdated now is not taken over
        self._outside.outdate(self.hidden)
        self.release()
        self.node_copy.current = False
        if self.common is not None and replaced is None:
            self.common.behind = True
        elif self.common is not None and replaced is not None:
            self.common.replace(self.master, replaced)
        copied = copied and not self._thawed  # which the optimizer has not heard of
        self._copy_due = self._copy_due or not copied
        if self.whole and (self.shard_optim or (not self._aliased and not copied)):
            self.stale = True
            if not self._aliased and self._shown:
                self._hide()
        self.watch_reads()
        self._written_at = self._streams.mark()

    def watch_reads(self) -> None:
        """Have `on_read` called when a parameter is read whose values are not there."""
        if self.on_read is not None and (self.stale or not self.whole):
            outdated.mark(self.params, self.on_read)

    def use_streams(self, streams: Streams) -> None:
        """Gather on these from now on."""
        self._streams, self._written_at = streams, streams.mark()

    def show_as_current(self) -> None:
        """Stop watching who reads the parameters."""
        outdated.unmark(self.params)

    def take_changes(self) -> None:
        """Take over into the master what was written into weights that are whole and current; [Note: Changes in place].

        On every rank alike, as the writes must have been.
        """
        if not self._shown:
            self._require_unassigned()
        assigned = self._take_assigned()
        written = assigned or self._always_compared or self._versions != self._written()
        if self._shown and not self.stale and written:
            self.write_back()

    def drop_changes(self) -> None:
        """Have the next `gather` undo what was written into the weights, where they are no view of the master."""
        if self._aliased:
            self._take_assigned()
        else:
            for _, param, view in self._elsewhere():
                param.data = view
        if not self._aliased and self._shown and self._versions != self._written():
            self._versions = self._written()
            if self.shard_params:
                self.release()
            else:
                self.stale = self._copy_due = True
                self._written_at = self._streams.mark()
                if self.common is not None:
                    self.common.whole_due = True

    def write_back(self) -> None:
        """Take what was written into the full weights over into the master, which else keeps its digits."""
        self._take_assigned()
        if self._aliased:
            return
        with torch.no_grad():
            written = self.full[self._own] if self.shard_optim else self.full
            if self.wire is not None:
                if self._seen is None or self._seen != seen(written):
                    shown = None if self.common is None else self.common.shard
                    take_written(self.master, written, self.wire, shown)
            elif written.dtype == self.master.dtype:
                self.master.copy_(written)
            else:
                take_where_it_differs(self.master, written)
        self._versions, self._written_at, self.node_copy.current = self._written(), self._streams.mark(), False

    def _elsewhere(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """``(name, parameter, what it should show)`` of those to whose ``.data`` somebody has assigned a tensor."""
        expected = self._views if self._shown else self._freed
        home = expected[0].untyped_storage()._cdata
        with torch._C.DisableTorchFunctionSubclass():
            triples = zip(self.layout.slots, self.params, expected, strict=True)
            return [(slot.name, p, view) for slot, p, view in triples if p.untyped_storage()._cdata != home]

    def _take_assigned(self) -> bool:
        """Have what was assigned to a parameter's ``.data`` be its values, in its place; whether there was any."""
        return take_assigned(self._elsewhere()) if self._shown else False

    def _require_unassigned(self) -> None:
        """Raise where a tensor was assigned to the ``.data`` of weights that are hidden."""
        refuse_assigned(self._elsewhere())

    def _require_untouched(self) -> None:
        """Raise where something was written into weights that were not there; on the CPU, for reading stops a GPU."""
        self._require_unassigned()
        if self.hidden.device.type != "cpu" or not self.hidden.is_floating_point() or self.hidden.isnan():
            return
        self.hidden.fill_(float("nan"))
        raise RuntimeError(
            f"{self.name}: weights were written to while they were sharded or older than the last step; "
            "do it inside zero.full_params(write_back=True)"
        )

    def gather_master(self) -> Tensor:
        """``[padded_numel]``: every shard's master, in the parameters' own dtype. Collective; a new tensor."""
        self.take_changes()
        if not self.shard_optim:
            return self.master.to(self.dtype, copy=True)
        flat = torch.empty(self.layout.padded_numel, dtype=self.master.dtype, device=self.master.device)
        with scope(f"{self.name}/state"):
            gather_shards(self.comm, self.layout, flat, self.master).wait()
        return flat.to(self.dtype)

    def common_copy(self) -> Tensor | None:
        """``[shard_numel]``, a new tensor: what every rank has of this rank's shard when it has the last step's."""
        self._finish()
        return None if self.common is None else self.common.current(self.master)

    @property
    def is_rounded(self) -> bool:
        """Whether the weights that compute have other digits than their dtype could hold of the master."""
        as_they_are = isinstance(self.wire, DtypeFormat) and self.wire.dtype in (self.dtype, self.full.dtype)
        return self.wire is not None and not as_they_are

    @property
    def on_its_way(self) -> bool:
        """Whether `gather` has started what nobody has waited for, so that parameters do not show it."""
        return self._work is not None or (self.whole and not self.stale and not self._shown)

    @property
    def full_bytes(self) -> int:
        """Bytes that full weights hold now."""
        return self.full.untyped_storage().nbytes()

    @property
    def master_bytes(self) -> int:
        """Bytes that the master holds beside the full weights; 0 where it is a view of them."""
        return 0 if self._aliased else self.master.nbytes
