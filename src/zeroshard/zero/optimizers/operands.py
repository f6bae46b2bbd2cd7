"""Operands of a step that are elsewhere between steps: `zeroshard.zero.core.optimizer.StepOperands` says what that is.

A class of `torch.optim` steps unit by unit, so that only one unit's operands are brought at a time. A class from
elsewhere may count its steps, so it steps once, on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.optimizer import PieceOptimizer, StepOperands, pieces_in

Lists = list[list[nn.Parameter]]  # pieces, for each param group


class WidenedGrads(StepOperands):
    """Gradients are narrower than the weights that they update, and most optimizers need one dtype for both.

    With ``MixedPrecision(reduce_dtype=torch.bfloat16)`` reduced gradients stay in bfloat16 until the optimizer steps,
    which is shown copies in its pieces' own dtype.
    """

    def __init__(self) -> None:
        self._narrow: list[tuple[nn.Parameter, Tensor]] = []

    def elsewhere(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of which the gradient has another dtype than the piece."""
        return [piece for piece in pieces if piece.grad is not None and piece.grad.dtype != piece.dtype]

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
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


class Together(StepOperands):
    """Several members, each of which brings its own; an observer adds one when it hears of an optimizer."""

    def __init__(self, *members: StepOperands) -> None:
        self.members = list(members)

    def elsewhere(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of which any member must bring operands."""
        pieces = list(pieces)
        return list(dict.fromkeys(piece for member in self.members for piece in member.elsewhere(pieces)))

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Have each member bring its own."""
        for member in self.members:
            member.bring(member.elsewhere(pieces))

    def take_back(self) -> None:
        """Have each member take back its own, the last first."""
        for member in reversed(self.members):
            member.take_back()


class OperandsOfSteps:
    """Brings the operands of one optimizer: `begin` before its class's own code, and `end` after it."""

    def __init__(self, pieces: PieceOptimizer) -> None:
        self._of = pieces

    def begin(self, *, by_unit: bool) -> None:
        """Bring the operands; the param groups must hold pieces.

        ``by_unit``: run the class's step here for all units but the last; the groups then hold only that one's pieces.
        """
        if not self._of.operands.elsewhere(chain.from_iterable(self._of.pieces)):
            return
        step = _own_step(self._of.optimizer) if by_unit else None
        if step is None:
            self._bring(self._of.pieces)
            return
        units = self._by_unit()
        for pieces in units[:-1]:
            self._bring(pieces)
            step(self._of.optimizer)
            self.end()
        if units:
            self._bring(units[-1])

    def end(self) -> None:
        """Take back what was brought, also after a step that has raised."""
        self._of.operands.take_back()

    def _bring(self, by_group: Lists) -> None:
        for group, pieces in zip(self._of.optimizer.param_groups, by_group, strict=True):
            group["params"] = pieces
            self._of.operands.bring(self._of.operands.elsewhere(pieces))

    def _by_unit(self) -> list[Lists]:
        """The pieces that have gradients, flat group by flat group."""
        found: dict[FlatGroup, Lists] = {}
        for place, chosen in enumerate(self._of.by_group):
            for group, slot in (self._of.homes[param] for param in chosen):
                own = [piece for _, piece in pieces_in(group, slot) if piece.grad is not None]
                if own:
                    found.setdefault(group, [[] for _ in self._of.by_group])[place] += own
        return list(found.values())


def _own_step(optimizer: Any) -> Callable[[Any], Any] | None:
    """The ``step`` of a class of `torch.optim`, without hooks; None for other classes, or if torch hides it."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    return getattr(type(optimizer).step, "__wrapped__", None)
