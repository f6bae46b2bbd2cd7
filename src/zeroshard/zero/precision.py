"""Which dtype computes, what travels, which dtype is the truth.

Micikevicius et al. 2018, "Mixed Precision Training", https://arxiv.org/abs/1710.03740, section 3.1: weights and
activations may be 16 bits wide when a 32-bit master copy of the weights takes the updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from zeroshard.errors import UserError
from zeroshard.wire_formats import (
    BLOCK,
    DIFFERENCES,
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
"""Elements of the smallest parameter that travels in a wire format: a smaller one has few bytes to save."""


@dataclass(frozen=True)
class MixedPrecision:
    """A dtype policy. The default changes nothing: parameters compute and travel in the dtype that they have.

    Attributes:
        param_dtype: the dtype that forward and backward see; the parameter's own dtype becomes its master's, which
            the optimizer updates. None: the parameter's own, and then no second copy exists. Parameters that are
            frozen when the engine is built are kept in this dtype alone, rounded, until they are trained.
        reduce_dtype: the dtype in which gradients accumulate and are reduced. None: the master's. In bfloat16, which
            has the range of fp32, they also wait for the optimizer; else they are cast to the master's dtype for it.
        cast_forward_inputs: whether floating-point tensors given to the model are cast to ``param_dtype``.

        gather: what weights travel in: a dtype or a block format (``"int8"``, ``"int4"``, ``"e4m3"``, which is
            ``"fp8"`` too), in which each rank sends its shard of the fp32 masters; every rank computes with what
            arrives, in ``param_dtype``. None: ``param_dtype``. Stages 1, 2 and 3. ``"int4-delta"``, at stages 1 and 2:
            the difference to what every rank has already, in int4; see `zeroshard.zero.buffers.common_copy`.
        reduce: what gradients travel in, as ``gather``; they are summed in fp32 and accumulate in ``reduce_dtype``.
            With a ``shard_size`` it is what crosses between the replicas. None: ``reduce_dtype``. Stages 1, 2 and 3.
        block: elements that share a scale in a block format.
        node_size: ranks of a node, all neighbours. With it gradients are added up inside each node in
            ``reduce_dtype``, and the sums alone travel between nodes in ``reduce``: see
            `zeroshard.zero.buffers.node_reduce`. None: each rank sends its gradients to every other in that format.
        rounding_seed: of the noise by which gradients are rounded stochastically.

    Norms' weights and biases, and whatever else has one dimension or fewer than `EXACT_NUMEL` elements, travel as they
    are, in flat buffers of their own: there are few of them, and a block's scale would be set by its largest neighbour.

    Raises:
        ValueError: a dtype that is not a floating-point one; no such format; a block that does not pack; a
            ``node_size`` below 2, or without ``reduce``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    gather: torch.dtype | str | None = None
    reduce: torch.dtype | str | None = None
    block: int = BLOCK
    rounding_seed: int = 0
    node_size: int | None = None

    def __post_init__(self) -> None:
        check_block("block", self.block)
        self._check_nodes()
        for field in ("gather", "reduce"):
            _check_travels(field, getattr(self, field))
        for field in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, field)
            check_has_range(field, dtype)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{field}: {dtype} is not a floating-point dtype; use torch.bfloat16 or torch.float32")

    def _check_nodes(self) -> None:
        size = self.node_size
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int) or size < 2:
            raise ValueError(f"node_size: {size!r} are no ranks of a node; give 2 or more")
        if self.reduce is None:
            what = f"{size} is given, and gradients travel in no format of their own"
            raise ValueError(f"node_size: {what}; add reduce='int8', or leave it out")

    def compute_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype of full weights whose master is ``master``."""
        return self.param_dtype if self.param_dtype is not None and master.is_floating_point else master

    def gradient_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of weights with that master accumulate and travel."""
        return self.reduce_dtype if self.reduce_dtype is not None and master.is_floating_point else master

    @property
    def gathers_differences(self) -> bool:
        """Whether weights travel as differences to what every rank has."""
        return self.gather in DIFFERENCES

    @property
    def has_wire(self) -> bool:
        """Whether anything travels in a format of its own."""
        return self.gather is not None or self.reduce is not None

    def weights_format(self, master: torch.dtype) -> Format | None:
        """What weights with that master travel in; None: in the dtype that computes."""
        return self._format(self.gather) if master.is_floating_point else None

    def gradients_format(self, master: torch.dtype) -> Format | None:
        """What gradients of weights with that master travel in; None: in the dtype that they accumulate in."""
        return self._format(self.reduce) if master.is_floating_point else None

    def _format(self, wire: torch.dtype | str | None) -> Format | None:
        if wire is None:
            return None
        if isinstance(wire, torch.dtype):
            return DtypeFormat(wire)
        return BlockFormat(cast(FormatName, DIFFERENCES.get(wire, wire)), self.block)

    def is_exact(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of that shape travels as it is, though others have a wire format."""
        return self.has_wire and (len(shape) < 2 or math.prod(shape) < EXACT_NUMEL)

    def exactly(self) -> MixedPrecision:
        """The same without wire formats."""
        return replace(self, gather=None, reduce=None, node_size=None)

    def reduced_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which reduced gradients of weights with that master wait for the optimizer.

        That of the reduction where it is bfloat16, which has the range of fp32: nothing is wider than what was asked
        for. Of float16, whose gradients a `GradScaler` divides by its scale, the master's.
        """
        reduce = self.gradient_dtype(master)
        return reduce if reduce == torch.bfloat16 else master


def _check_travels(field: str, wire: torch.dtype | str | None) -> None:
    """Raise UserError, a ValueError, for what is neither a floating-point dtype nor a format that ``field`` has."""
    if isinstance(wire, torch.dtype):
        check_has_range(field, wire)
    if wire is None or wire in (*FORMATS, *SAME_AS) or (isinstance(wire, torch.dtype) and wire.is_floating_point):
        return
    if isinstance(wire, str) and wire in DIFFERENCES:
        if field == "gather":
            return
        raise UserError(field, f"{wire} is of weights alone", f"choose {DIFFERENCES[wire]} for gradients")
    known = [*FORMATS, *(DIFFERENCES if field == "gather" else ())]
    todo = f"choose a floating-point dtype, or {', '.join(known)}"
    raise UserError(field, f"{wire!r} is no format that travels", todo)
