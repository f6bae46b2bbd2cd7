"""Widens gradients that are narrower than the weights that they update, for optimizers that need one dtype for both.

With ``MixedPrecision(reduce_dtype=torch.bfloat16)`` reduced gradients stay in bfloat16 until the optimizer steps, which
is shown copies in its pieces' own dtype. A class of `torch.optim` steps unit by unit, so that only one unit's copies
are resident at a time. A class from elsewhere may count its steps, so it steps once on all copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer

Lists = list[list[nn.Parameter]]  # pieces, for each param group


class NarrowGrads:
    """Widens the gradients of one optimizer: call `widen` before its class's own code, and `restore` after it."""

    def __init__(self, piecewise: PiecewiseOptimizer) -> None:
        self._piecewise = piecewise
        self._narrow: list[tuple[nn.Parameter, Tensor]] = []

    def widen(self, *, by_unit: bool) -> None:
        """Show wide copies of narrow gradients; the param groups must hold pieces.

        ``by_unit``: run the class's step here for all units but the last; the groups then hold only that one's pieces.
        """
        if not any(_is_narrow(piece) for pieces in self._piecewise.pieces for piece in pieces):
            return
        step = _own_step(self._piecewise.optimizer) if by_unit else None
        if step is None:
            self._show(self._piecewise.pieces)
            return
        *units, last = self._by_unit()
        for pieces in units:
            self._show(pieces)
            step(self._piecewise.optimizer)
            self.restore()
        self._show(last)

    def restore(self) -> None:
        """Show the narrow gradients again, in place of the copies."""
        for piece, grad in self._narrow:
            piece.grad = grad
        self._narrow = []

    def _show(self, by_group: Lists) -> None:
        for group, pieces in zip(self._piecewise.optimizer.param_groups, by_group, strict=True):
            group["params"] = pieces
            for piece in filter(_is_narrow, pieces):
                assert piece.grad is not None
                self._narrow.append((piece, piece.grad))
                piece.grad = piece.grad.to(piece.dtype)

    def _by_unit(self) -> list[Lists]:
        """The pieces that have gradients, flat group by flat group."""
        found: dict[FlatGroup, Lists] = {}
        for place, home, piece in self._homes():
            found.setdefault(home, [[] for _ in self._piecewise.by_group])[place].append(piece)
        return list(found.values())

    def _homes(self) -> Iterator[tuple[int, FlatGroup, nn.Parameter]]:
        for place, chosen in enumerate(self._piecewise.by_group):
            for param in chosen:
                home, slot = self._piecewise.sharded.home(param)
                yield from ((place, home, piece) for _, piece in home.shards_of(slot) if piece.grad is not None)


def _is_narrow(piece: nn.Parameter) -> bool:
    return piece.grad is not None and piece.grad.dtype != piece.dtype


def _own_step(optimizer: Any) -> Callable[[Any], Any] | None:
    """The ``step`` of a class of `torch.optim`, without hooks; None for other classes, or if torch hides it."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    return getattr(type(optimizer).step, "__wrapped__", None)
