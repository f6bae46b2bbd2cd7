"""`StepOperands`: where an optimizer's step finds its operands: masters, gradients and states of this rank's pieces.

The plain member leaves them where they are. Another brings those of some pieces to where the class's own code can use
them, and takes them back after it. Then a class of `torch.optim` steps unit by unit, so that only one unit's operands
are brought at a time. A class from elsewhere may count its steps, so it steps once, on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer

Lists = list[list[nn.Parameter]]  # pieces, for each param group


class StepOperands:
    """The operands are on the pieces' device, and of dtypes that the class's own code takes."""

    def are_elsewhere(self, piece: nn.Parameter) -> bool:
        """Whether operands of the piece must be brought."""
        return False

    def bring(self, pieces: Iterable[nn.Parameter]) -> None:
        """Bring the operands of these pieces, which are elsewhere."""

    def take_back(self) -> None:
        """Take back what was brought, with the values that it has now; nothing, if nothing is there."""


class WidenedGrads(StepOperands):
    """Gradients are narrower than the weights that they update, and most optimizers need one dtype for both.

    With ``MixedPrecision(reduce_dtype=torch.bfloat16)`` reduced gradients stay in bfloat16 until the optimizer steps,
    which is shown copies in its pieces' own dtype.
    """

    def __init__(self) -> None:
        self._narrow: list[tuple[nn.Parameter, Tensor]] = []

    def are_elsewhere(self, piece: nn.Parameter) -> bool:
        """Whether the gradient has another dtype than the piece."""
        return piece.grad is not None and piece.grad.dtype != piece.dtype

    def bring(self, pieces: Iterable[nn.Parameter]) -> None:
        """Show wide copies of the gradients."""
        for piece in pieces:
            assert piece.grad is not None
            self._narrow.append((piece, piece.grad))
            piece.grad = piece.grad.to(piece.dtype)

    def take_back(self) -> None:
        """Show the narrow gradients again, in place of the copies, whose values are dropped."""
        for piece, grad in self._narrow:
            piece.grad = grad
        self._narrow = []


class OperandsOfSteps:
    """Brings the operands of one optimizer: `begin` before its class's own code, and `end` after it."""

    def __init__(self, piecewise: PiecewiseOptimizer, operands: StepOperands) -> None:
        self._piecewise, self._operands = piecewise, operands

    def begin(self, *, by_unit: bool) -> None:
        """Bring the operands; the param groups must hold pieces.

        ``by_unit``: run the class's step here for all units but the last; the groups then hold only that one's pieces.
        """
        if not any(self._operands.are_elsewhere(piece) for pieces in self._piecewise.pieces for piece in pieces):
            return
        step = _own_step(self._piecewise.optimizer) if by_unit else None
        if step is None:
            self._bring(self._piecewise.pieces)
            return
        *units, last = self._by_unit()
        for pieces in units:
            self._bring(pieces)
            step(self._piecewise.optimizer)
            self.end()
        self._bring(last)

    def end(self) -> None:
        """Take back what was brought, also after a step that has raised."""
        self._operands.take_back()

    def _bring(self, by_group: Lists) -> None:
        for group, pieces in zip(self._piecewise.optimizer.param_groups, by_group, strict=True):
            group["params"] = pieces
            self._operands.bring(filter(self._operands.are_elsewhere, pieces))

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


def _own_step(optimizer: Any) -> Callable[[Any], Any] | None:
    """The ``step`` of a class of `torch.optim`, without hooks; None for other classes, or if torch hides it."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    return getattr(type(optimizer).step, "__wrapped__", None)
