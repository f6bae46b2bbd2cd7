"""`LocalSteps`: the settings of replicas that take local steps, and the schedule of outer steps. Pure arithmetic.

Each replica takes ``every`` steps of its own (the *inner* optimizer). Then the replicas take an *outer
step*: the mean over replicas of the change by these steps, ``global - local``, is the gradient of an *outer* optimizer,
SGD with Nesterov momentum. It updates the *global weights*, the last that all replicas had in common::

    step        1   2   3   4   5   6   7   8
    replica 0   .   .   .   O   .   .   .   O       every=4: O is an outer step
    replica 1   .   .   .   O   .   .   .   O

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
https://arxiv.org/abs/2311.08105, algorithm 1; its numbers are the defaults here.

With ``fragments`` the units of the model take their outer steps at different times, each every ``every`` steps::

    step        1   2   3   4   5   6   7   8
    fragment 0  .   O   .   .   .   O   .   .       every=4, fragments=2
    fragment 1  .   .   .   O   .   .   .   O

Unit i (the root is unit 0) is in fragment ``i % fragments``, the strided pattern of Douillard et al. 2025, "Streaming
DiLoCo with overlapping communication", https://arxiv.org/abs/2501.18512, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import torch

from zeroshard.host.lazily import loaded
from zeroshard.settings.wire_formats import (
    BLOCK,
    FORMATS,
    SAME_AS,
    BlockFormat,
    FormatName,
    check_block,
    check_has_range,
)

if TYPE_CHECKING:
    from zeroshard.comm.module_buffers import BufferSync
    from zeroshard.zero.core.ranks import RankGroups
    from zeroshard.zero.optimizers.observer import Observer
    from zeroshard.zero.runtime.runtime import Runtime


@dataclass(frozen=True)
class LocalSteps:
    """How the replicas, groups of ranks that shard state among themselves, take local and outer steps.

    Attributes:
        every: steps from one outer step of a unit to the next, 1 or more.
        outer_lr: learning rate of the outer SGD; 1.0 with no momentum averages weights.
        outer_momentum: its Nesterov momentum, in [0, 1); 0.0: none.
        fragments: number of parts into which the units are divided; each takes its outer steps at other times.
        wire: format in which differences travel: a dtype, in which they are also summed, or a block format (``"int8"``,
            ``"int4"``, ``"e4m3"`` or ``"fp8"``), which is summed in fp32; None: the dtype of the
            global weights, usually fp32.
        block: elements that share a scale in a block format.
        rounding_seed: seed of the noise by which differences are rounded to a block format.

    Raises:
        ValueError: a number outside of its range.
    """

    every: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    wire: torch.dtype | str | None = None
    block: int = BLOCK
    rounding_seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every: {self.every!r} local steps for each outer step; give 1 or more")
        for field, kinds, what in (
            ("fragments", int, "whole number"),
            ("rounding_seed", int, "whole number"),
            ("outer_lr", (int, float), "number"),
            ("outer_momentum", (int, float), "number"),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise ValueError(f"{field}: {value!r} is no {what}; give one")
        if not (isfinite(self.outer_lr) and self.outer_lr > 0):
            raise ValueError(f"outer_lr: {self.outer_lr} is not above 0; DiLoCo's is 0.7")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum: {self.outer_momentum} is outside [0, 1); DiLoCo's is 0.9")
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"fragments: {self.fragments} fragments cannot synchronise at different steps of {self.every}; "
                f"give 1 to {self.every}"
            )
        is_dtype = isinstance(self.wire, torch.dtype) and self.wire.is_floating_point
        check_has_range("wire", self.wire)
        if self.wire is not None and not is_dtype and self.wire not in (*FORMATS, *SAME_AS):
            raise ValueError(
                f"wire: {self.wire!r} is not a wire format; give a floating-point dtype, or {', '.join(FORMATS)}"
            )
        check_block("block", self.block)

    @property
    def form(self) -> BlockFormat | None:
        """The block format in which differences travel; None if they travel in a dtype."""
        return BlockFormat(cast(FormatName, self.wire), self.block) if isinstance(self.wire, str) else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which differences travel, if ``wire`` is one; None: a block format, or as global weights."""
        return self.wire if isinstance(self.wire, torch.dtype) else None

    def attach(self, runtime: Runtime, rank_groups: RankGroups, buffers: BufferSync) -> tuple[Any, Observer]:
        """Return an engine's `OuterSteps`, and the observer by which its steps, saves and loads take them along.

        The engine is given these settings, and so need not import what takes outer steps; nor does this file, which
        that imports. Collective. ``buffers``: as for `zeroshard.Zero`; errors are
        those of `OuterSteps`.
        """
        return loaded("zeroshard.zero.local_steps.observer", "attached")(self, runtime, rank_groups, buffers)

    def fragments_at(self, num_steps: int) -> list[int]:
        """The fragments that take an outer step once ``num_steps`` steps are done; at most one."""
        offsets = [(fragment + 1) * self.every // self.fragments for fragment in range(self.fragments)]
        return [n for n, offset in enumerate(offsets) if num_steps > 0 and (num_steps - offset) % self.every == 0]

    def fragment_of(self, unit: int) -> int:
        """The fragment of the unit at this place, the root at 0."""
        return unit % self.fragments

    def check_units(self, num_units: int) -> None:
        """Raise ValueError if there are more fragments than units, including the root."""
        if self.fragments > num_units:
            raise ValueError(
                f"fragments: {self.fragments} are more than the {num_units} units of the model; give at most that many"
            )
