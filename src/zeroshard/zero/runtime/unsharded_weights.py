"""The unsharded weights of all units: gathered, freed unless still needed, pinned, and watched for reads."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from zeroshard.host.torch_internals import (
    is_functorch_wrapped_tensor,
    set_versions,
    storage_id,
    version_of,
)
from zeroshard.zero.buffers.flat_params import Reads
from zeroshard.zero.buffers.unit import Unit
from zeroshard.zero.runtime.agreement import Agreement

Replaced = Literal["for good", "for now", "back"]
"""How weights were replaced outside of a step: by others; by weights that are there for a block only (averages,
global weights); by the weights from before such a block."""

_FAR = 1 << 20  # added to versions in such a block: more than steps add while a graph from the block is still alive


class GraphVersions:
    """The version counters of one engine's parameters, by which autograd raises in a backward through replaced weights.

    A graph refers to parameters, and autograd compares their versions with those that it saw in forward. If weights are
    replaced for the length of a block only (by averages or global weights), their versions are restored with them: an
    evaluation may come between a forward and its backward, while a backward through the evaluation's own forward raises
    after the block.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, int]] = []

    def replaced(self, params: Iterable[Tensor], how: Replaced) -> None:
        """Set the versions of ``params``, whose values are being replaced; ``how``: see `Replaced`."""
        params = [param for param in params if not param.is_inference()]
        if how == "back":
            _set(self._before)
            self._before = []
        elif how == "for now":
            self._before = [(param, version_of(param)) for param in params]
            _set([(param, version + _FAR) for param, version in self._before])
        elif how == "for good":
            torch.autograd.graph.increment_version(params)


def _set(versions: list[tuple[Tensor, int]]) -> None:
    set_versions([param for param, _ in versions], [number for _, number in versions])


class UnshardedWeights:
    """The weights of all units of an engine.

    Args:
        units: all units, the root first.
        collectives: is notified of each gather, if weights are sharded.

    Attributes:
        shard_params: whether unsharded weights are freed after use.
        pinned: whether this is inside `pin`, which keeps all weights unsharded and current.
        keep_unsharded_for_graph: whether a backward ran with ``create_graph``: its graph may read weights without
            calling hooks.
        order: the units but the root, in the order in which a forward gathers them.
    """

    def __init__(self, units: Sequence[Unit], collectives: Agreement) -> None:
        self._units, self.collectives = units, collectives
        self.shard_params = False
        self.pinned = False
        self.keep_unsharded_for_graph = False
        self.order: Sequence[Unit] = units[1:]
        self._warned_of_loss = False
        self._reads = Reads()
        self._versions = GraphVersions()

    def unshard(self, unit: Unit, *, again: bool = False) -> None:
        """Issue the gather of the unit's weights; ``again``: even if they are current, as other ranks may lack them.

        Inside `pin` no rank does, and what the user has written there must neither be gathered over nor kept.
        """
        if unit.unshard(again=again and not self.pinned) and any(group.params.sends for group in unit.groups):
            self.collectives.note_gather(unit)

    def reshard_unless_needed(self, unit: Unit) -> None:
        """Free the unit's unsharded weights, unless they are pinned or a later backward needs them."""
        # A backward may run in the middle of a forward (forces as the gradient of an energy).
        needed = self.pinned or self.keep_unsharded_for_graph or unit.num_running_forwards or unit.keep_unsharded_after
        if self.shard_params and not needed:
            unit.reshard()
            for group in unit.groups:
                group.params.watch_reads()

    def views(self, unit: Unit, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the tensors that share storage with weights that are freed after forward."""
        if not self.shard_params:
            return []
        storages = {storage for group in unit.groups for storage in group.params.storages}
        return [tensor for tensor in tensors if _storage(tensor) in storages]

    @contextmanager
    def pin(self) -> Generator[None]:
        """Keep all weights unsharded and current in this block. Collective on entry."""
        if self.pinned:
            yield
            return
        for unit in self._units:
            for group in unit.groups:
                group.params.take_changes()  # keeps changes from before this block; changes inside it are dropped below
            unit.unshard()
        for unit in self._units:
            unit.wait_for_unshard()
        self._expose()
        self.pinned = True
        lost = False
        try:
            yield
        finally:
            self.pinned = False
            for unit in self._units:
                for group in unit.groups:
                    lost = group.params.drop_changes() or lost
                self.reshard_unless_needed(unit)
        if lost and not self._warned_of_loss:
            self._warned_of_loss = True
            warnings.warn(
                "full_params(): weights were written to in this block, and what was written is dropped at its end; "
                "write inside zero.full_params(write_back=True) to keep it",
                stacklevel=5,
            )

    def refresh_after_replacement(self, replaced: Replaced = "for good") -> None:
        """Refresh weights, because master weights were replaced outside of a step. Collective.

        Unsharded weights are gathered at once, in the same order on every rank: inside `pin` they must be current, and
        a backward whose forward is over would gather only those of the units that this rank runs.
        """
        params = (param for unit in self._units for group in unit.groups for param in group.params.params)
        self._versions.replaced(params, replaced)
        for unit in self._units:
            for group in unit.groups:
                group.params.mark_stale()
                if group.params.stale or self.pinned:
                    group.params.unshard()
        for unit in self._units:
            unit.wait_for_unshard()
        if self.pinned:
            self._expose()

    def _expose(self) -> None:
        for unit in self._units:
            for group in unit.groups:
                group.params.expose()

    def watch_reads(self, reads: Reads | None = None) -> None:
        """From now on tell ``reads`` (None: those told before) of weights that are stale or freed, in all groups."""
        self._reads = reads or self._reads
        for unit in self._units:
            for group in unit.groups:
                group.params.reads = self._reads
                group.params.watch_reads()

    def unshard_all(self) -> None:
        """Gather all weights that are stale, in the order of the next forward, and wait. Collective."""
        units = [self._units[0], *self.order]
        for unit in units:
            self.unshard(unit)
        for unit in units:
            unit.wait_for_unshard()

    def show_as_current(self) -> None:
        """Stop watching for reads of weights until the next step."""
        for unit in self._units:
            for group in unit.groups:
                group.params.show_as_current()

    @property
    def readable(self) -> bool:
        """Whether the module's parameters are unsharded and current now."""
        return all(unit.readable for unit in self._units)


def _storage(tensor: Tensor) -> int:
    """The identity of the tensor's storage; 0 if it has no storage that weights could be in."""
    if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor):
        return 0
    return storage_id(tensor)
