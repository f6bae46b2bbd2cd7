"""The unsharded weights of all units: gathered, freed unless still needed, pinned, and watched for reads."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from zeroshard.host.torch_internals import (
    set_versions,
    version_of,
)
from zeroshard.zero.buffers.flat_params import Reads
from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.passes import Passes

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
    """The weights of all units of an engine; ``passes``: its own."""

    def __init__(self, passes: Passes[FlatGroup]) -> None:
        self._passes = passes
        self._warned_of_loss = False
        self._reads = Reads()
        self._versions = GraphVersions()

    @property
    def _units(self) -> list[FlatUnit]:
        return self._passes.all_units()

    @property
    def pinned(self) -> bool:
        """Whether this is inside `pin`, which keeps all weights unsharded and current."""
        return self._passes.pinned

    @contextmanager
    def pin(self) -> Generator[None]:
        """Keep all weights unsharded and current in this block. Collective on entry."""
        if self.pinned:
            yield
            return
        for unit in self._units:
            for group in unit.groups:
                group.params.take_changes()  # keeps changes from before this block; changes inside it are dropped below
                group.params.unshard()
        for unit in self._units:
            unit.wait_for_unshard()
        self._expose()
        self._passes.pinned = True
        lost = False
        try:
            yield
        finally:
            self._passes.pinned = False
            for unit in self._units:
                for group in unit.groups:
                    lost = group.params.drop_changes() or lost
                self._passes.free(unit)
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

    def refresh_in_wire_format(self) -> None:
        """If weights travel in a wire format, refresh unsharded weights with what that format delivers. Collective."""
        if any(group.params.transport.form is not None for group in self._passes.groups()):
            self.refresh_after_replacement()

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
        units = [self._passes.root, *self._passes.order]
        for unit in units:
            self._passes.unshard(unit)
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


def mark_unusable(buffers: Iterable[Gradients], whose: str | None, where: str) -> None:
    """Let no optimizer step by gradients that arrive while other values are in the weights' place for a block.

    ``whose``: the values whose gradients these are, such as "the global weights"; None: the weights are back.
    ``where``: the block, as the user writes it: ``ema.weights()`` or ``local_steps.global_weights()``.
    """
    why = (
        f"these are gradients of {whose}, from a backward inside {where}; call zero_grad() after reading them, and run "
        f"the backward of a step outside {where}"
    )
    for each in buffers:
        each.unusable_now = None if whose is None else why
