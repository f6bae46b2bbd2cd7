"""`WirePolicy`: which tensors of a training run are sent in a wire format, and in which.

A dtype policy has these fields among its own (`zeroshard.zero.MixedPrecision`): here are their checks and meaning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, Self, cast

import torch

from zeroshard import rules
from zeroshard.errors import UserError
from zeroshard.wire_formats import (
    FORMATS,
    SAME_AS,
    BlockFormat,
    DtypeFormat,
    Format,
    FormatName,
    check_block,
    check_has_range,
)

EXACT_NUMEL = 4096
"""Elements of the smallest parameter that is sent in a wire format: a smaller one has few bytes to save."""


class WireFields(Protocol):
    """The fields of a policy that decide what is sent in a wire format; they are read alone."""

    @property
    def gather(self) -> torch.dtype | str | None:
        """The wire format of weights: a dtype, the name of a block format, or None."""
        ...

    @property
    def reduce(self) -> torch.dtype | str | None:
        """The wire format of gradients, as for `gather`."""
        ...

    @property
    def block(self) -> int:
        """Elements that share a scale in a block format."""
        ...

    @property
    def rounding_seed(self) -> int:
        """Seed of the noise by which gradients are rounded stochastically."""
        ...

    @property
    def node_size(self) -> int | None:
        """Number of ranks of a node, if gradients are summed inside nodes first; else None."""
        ...


class WirePolicy:
    """What a frozen dataclass with the `WireFields` sends in a wire format."""

    def check_wire(self: WireFields) -> None:
        """Raise ValueError unless each field has a value that it may have."""
        check_block("block", self.block)
        if self.node_size is not None:
            rules.check_count("node_size", self.node_size, at_least=2)
            if self.reduce is None:
                what = f"{self.node_size} is given, and gradients have no wire format"
                raise UserError("node_size", what, "add reduce='int8', or leave it out")
        if isinstance(self.rounding_seed, bool) or not isinstance(self.rounding_seed, int):
            raise ValueError(f"rounding_seed: {self.rounding_seed!r} is not a whole number; give an int")
        _check_travels("gather", self.gather)
        _check_travels("reduce", self.reduce)

    @property
    def has_wire(self: WireFields) -> bool:
        """Whether weights or gradients have a wire format."""
        return self.gather is not None or self.reduce is not None

    def weights_format(self: WireFields, master: torch.dtype) -> Format | None:
        """The wire format of weights with that master dtype; None: they are sent in the compute dtype."""
        return _format(self.gather, self.block) if master.is_floating_point else None

    def gradients_format(self: WireFields, master: torch.dtype) -> Format | None:
        """The wire format of gradients of weights with that master dtype; None: the dtype in which they accumulate."""
        return _format(self.reduce, self.block) if master.is_floating_point else None

    def is_exact(self: WireFields, shape: Sequence[int]) -> bool:
        """Whether a parameter of that shape is sent without the wire format: a norm's, a bias, or a small one."""
        has_wire = self.gather is not None or self.reduce is not None
        return has_wire and (len(shape) < 2 or math.prod(shape) < EXACT_NUMEL)

    def exactly(self) -> Self:
        """Return the same policy without wire formats."""
        return dataclasses.replace(cast(Any, self), gather=None, reduce=None, node_size=None)


def _format(wire: torch.dtype | str | None, block: int) -> Format | None:
    if wire is None:
        return None
    if isinstance(wire, torch.dtype):
        return DtypeFormat(wire)
    return BlockFormat(cast(FormatName, wire), block)


def _check_travels(field: str, wire: torch.dtype | str | None) -> None:
    """Raise UserError, a ValueError, unless ``wire`` is None, a floating-point dtype or a wire format."""
    if isinstance(wire, torch.dtype):
        check_has_range(field, wire)
    if wire is None or wire in (*FORMATS, *SAME_AS) or (isinstance(wire, torch.dtype) and wire.is_floating_point):
        return
    todo = f"choose a floating-point dtype, or {', '.join(FORMATS)}"
    raise UserError(field, f"{wire!r} is not a wire format", todo)
