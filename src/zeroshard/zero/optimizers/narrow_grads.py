"""Gradients that are narrower than the weights that they update, for optimizers that want both alike.

With ``MixedPrecision(reduce_dtype=torch.bfloat16)`` reduced gradients wait for the optimizer in bfloat16. An optimizer
that `SavesPasses` reads them so. Any other is shown copies in its pieces' own dtype while it steps: one of
`torch.optim` unit by unit, so that no more than one unit's copies are there at a time; one from elsewhere, which may
count its steps, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer, SavesPasses

Lists = list[list[nn.Parameter]]  # for each param group


class NarrowGrads:
    """Around the steps of one optimizer; `widen` before its class's own code, `restore` after it."""

    def __init__(self, piecewise: PiecewiseOptimizer) -> None:
        self._piecewise = piecewise
        self._narrow: list[tuple[nn.Parameter, Tensor]] = []

    def widen(self, *, by_unit: bool) -> None:
        """Show wide copies of narrow gradients; the param groups hold pieces.

        ``by_unit``: step here for all units but the last, whose pieces the param groups then hold alone.
        """
        if isinstance(self._piecewise.optimizer, SavesPasses):
            return
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
        """Show the gradients as they wait again."""
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
        """The pieces that have gradients, buffer by buffer."""
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
    """What a class of `torch.optim` does in a step, without hooks; None of others, and where torch hides it."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    return getattr(type(optimizer).step, "__wrapped__", None)
