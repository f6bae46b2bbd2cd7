"""Doubles of the engine's groups and units, without tensors: what of each is there, and what is under way.

They do what `zeroshard.zero.buffers.flat_params` and `zeroshard.zero.buffers.flat_grads` do, statement by statement,
with bytes in place of buffers; `tests/budgets/test_peak.py` holds them against these.
"""

from __future__ import annotations

from typing import Literal, Protocol

from zeroshard.lab.predict.actions import Settings
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.traffic import Message
from zeroshard.lab.predict.work import Work, dtype_name
from zeroshard.zero.strategy import SHARD


class Ledger(Protocol):
    """Who writes down what doubles do."""

    settings: Settings

    def change(self, category: str, num_bytes: int) -> None:
        """So many bytes more, or fewer."""
        ...

    def compute(self, *work: Work) -> None:
        """Something is computed."""
        ...

    def issue(self, message: Message, *, replicas: bool = False, control: bool = False) -> int:
        """A collective is started; its number is returned."""
        ...

    def nothing(self) -> int:
        """A collective of one rank; its number is returned."""
        ...

    def wait(self, number: int) -> None:
        """Nothing is computed until that collective is done."""
        ...


class GroupDouble:
    """A `FlatGroup` without tensors: what of it is there, and what is under way."""

    def __init__(self, buffer: Buffer, engine: Ledger) -> None:
        settings, layout = engine.settings, buffer.layout
        precision = settings.precision
        self.buffer, self.engine = buffer, engine
        self.world_size = layout.world_size
        several = self.world_size > 1
        self.shard_params = settings.strategy.params is SHARD and several
        self.shard_optim = settings.strategy.optim is SHARD and several
        self.compute = precision.compute_dtype(buffer.dtype)
        self.master = buffer.dtype if buffer.trained else self.compute
        self.reduce = precision.gradient_dtype(buffer.dtype)
        self.full_bytes = layout.padded_numel * self.compute.itemsize
        self.seen_numel = layout.shard_numel if self.shard_optim else layout.padded_numel
        self.local_bytes = layout.padded_numel * self.reduce.itemsize
        self.reduced_bytes = self.seen_numel * self.master.itemsize
        # weights
        self.whole = not self.shard_params
        self.copy_due = self.compute != self.master and not settings.fused_copies
        self.stale = buffer.trained and self.whole and (self.shard_optim or self.copy_due)
        self.work: int | None = None
        # gradients; "view" of the local buffer, or memory of its "own"
        self.keep_local = settings.strategy.grads is not SHARD or not several
        self.has_local = False
        self.written: set[int] = set()
        self.reduced: Literal["view", "own"] | None = None
        self.arriving: Literal["view", "own"] | None = None
        self.grads_work: int | None = None
        self.across = False
        scale_by = self.world_size * settings.num_replicas
        self.scale_is_exact = scale_by & (scale_by - 1) == 0

    @property
    def name(self) -> str:
        """The buffer's."""
        return self.buffer.name

    # -- weights: `zeroshard.zero.buffers.flat_params` ----------------------------------------------------------

    def gather(self, *, again: bool = False) -> None:
        """As `FlatParams.gather`."""
        if self.work is not None or (self.whole and not self.stale and not again):
            return
        if not self.whole:
            self.whole = True
            self.engine.change("unit_buffers", self.full_bytes)
        self.stale = False
        copies = (self.copy_due or self.shard_params) and self.compute != self.master
        self.copy_due = False
        if copies:
            numel = self.seen_numel
            self.engine.compute(
                Work(0, numel * (self.compute.itemsize + self.master.itemsize), dtype_name(self.compute))
            )
        if self.shard_optim:
            message = Message("all_gather", self.full_bytes, self.name, "weights", self.world_size)
            self.work = self.engine.issue(message)

    def wait(self) -> None:
        """As `FlatParams.wait`."""
        if self.work is not None:
            self.engine.wait(self.work)
            self.work = None

    def release(self) -> None:
        """As `FlatParams.release`."""
        if not self.shard_params or not self.whole:
            return
        self.wait()
        self.whole = False
        self.engine.change("unit_buffers", -self.full_bytes)

    def after_update(self) -> None:
        """`mark_stale`, and no gradients."""
        self.release()
        self.copy_due = self.compute != self.master and not self.engine.settings.fused_copies
        self.stale = self.whole and (self.shard_optim or self.copy_due)

    # -- gradients: `zeroshard.zero.buffers.flat_grads` ---------------------------------------------------------

    def accumulate(self, slot: int) -> None:
        """As `FlatGrads.accumulate`."""
        self._vacate_local()
        self.have_local()
        numel = self.buffer.layout.slots[slot].numel
        grad_bytes, view_bytes = numel * self.compute.itemsize, numel * self.reduce.itemsize
        if slot in self.written and not self.scale_is_exact:
            cast = view_bytes if self.compute != self.reduce else 0
            self.engine.change("temporaries", cast + view_bytes)
            self.engine.change("temporaries", -cast - view_bytes)
        passes = grad_bytes + view_bytes * (2 if slot in self.written else 1)
        self.engine.compute(Work(0, passes, dtype_name(self.reduce)))
        self.written.add(slot)

    def have_local(self) -> None:
        """Have the buffer of this rank's own sum."""
        if not self.has_local:
            self.has_local = True
            self.engine.change("grads" if self.keep_local else "unit_buffers", self.local_bytes)

    def _vacate_local(self) -> None:
        if self.across:
            assert self.grads_work is not None
            self.engine.wait(self.grads_work)
            if self.arriving == "view":
                self.arriving = "own"
                self.engine.change("grads", self.seen_numel * self.reduce.itemsize)
            return
        self.settle()
        if self.reduced == "view" and self.keep_local and not self.written:
            self.reduced = "own"
            self.engine.change("grads", self.reduced_bytes)

    def start_reduction(self) -> None:
        """As `FlatGrads.reduce`."""
        self.reduce_across()
        self._vacate_local()
        self.have_local()
        self.written.clear()
        self.arriving = "view"
        if self.reduced is None and not self.keep_local and self.reduce == self.master:
            self.arriving = "own"
            self.engine.change("grads", self.reduced_bytes)
        self.grads_work = self._collective()
        self.across = self.engine.settings.num_replicas > 1

    def reduce_across(self) -> None:
        """As `FlatGrads.reduce_across`."""
        if not self.across:
            return
        assert self.grads_work is not None
        self.engine.wait(self.grads_work)
        num_bytes = self.buffer.layout.shard_numel * self.reduce.itemsize
        message = Message("all_reduce", num_bytes, self.name, "grads", self.engine.settings.num_replicas)
        self.grads_work = self.engine.issue(message, replicas=True)
        self.across = False

    def _collective(self) -> int:
        def message(op: str) -> Message:
            return Message(op, self.local_bytes, self.name, "grads", self.world_size)

        settings = self.engine.settings
        if settings.strategy.optim is SHARD:
            if self.world_size == 1 and settings.num_replicas > 1:
                return self.engine.nothing()
            return self.engine.issue(message("reduce_scatter"))
        if settings.uniform_order:
            return self.engine.issue(message("all_reduce"))
        self.engine.wait(self.engine.issue(message("reduce_scatter")))
        return self.engine.issue(message("all_gather"))

    def settle(self) -> None:
        """As `FlatGrads.settle`."""
        if self.grads_work is None:
            return
        self.reduce_across()
        self.engine.wait(self.grads_work)
        arrived, self.grads_work, self.arriving = self.arriving, None, None
        arrived_bytes = self.seen_numel * self.reduce.itemsize
        if self.reduced is not None:
            self.engine.compute(Work(0, arrived_bytes + 2 * self.reduced_bytes, dtype_name(self.master)))
            if arrived == "own":
                self.engine.change("grads", -arrived_bytes)
        elif self.reduce != self.master:
            self.engine.compute(Work(0, arrived_bytes + self.reduced_bytes, dtype_name(self.master)))
            self.engine.change("grads", self.reduced_bytes)
            self.reduced = "own"
            if arrived == "own":
                self.engine.change("grads", -arrived_bytes)
        else:
            self.reduced = arrived
        if not self.keep_local and not self.written:
            if self.reduced == "view":
                self.reduced = "own"
                self.engine.change("grads", self.reduced_bytes)
            self._let_local_go()

    def _let_local_go(self) -> None:
        if self.has_local:
            self.has_local = False
            self.engine.change("grads" if self.keep_local else "unit_buffers", -self.local_bytes)

    def clear(self) -> None:
        """As `FlatGrads.clear`, of all slots."""
        if self.reduced == "own":
            self.engine.change("grads", -self.reduced_bytes)
        self.reduced = None
        self._let_local_go()


class UnitDouble:
    """`zeroshard.zero.buffers.unit.Unit`, of doubles."""

    def __init__(self, name: str, groups: list[GroupDouble]) -> None:
        self.name, self.groups = name, groups
        self.trained = [group for group in groups if group.buffer.trained]
        self.calls = self.active = 0
        self.kept = self.held = self.used = False

    def gather(self, *, again: bool = False) -> None:
        """As `Unit.gather`."""
        for group in self.groups:
            group.gather(again=again)

    def wait(self) -> None:
        """As `Unit.wait`."""
        for group in self.groups:
            group.wait()

    def unshard(self) -> None:
        """As `Unit.unshard`."""
        self.gather()
        self.wait()

    def release(self) -> None:
        """As `Unit.reshard`."""
        for group in self.groups:
            group.release()
