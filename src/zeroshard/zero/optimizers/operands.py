"""Operands of a step that are elsewhere between steps: `StepOperands` says what that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.optimizer import State

Lists = list[list[nn.Parameter]]  # pieces, for each param group


class StepOperands(Protocol):
    """Where a step finds masters, gradients and states, if some are elsewhere between steps.

    Gradients may be there in a narrower dtype, states on the host, or on disk.
    """

    def to_bring(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of the pieces of which operands must be brought."""
        ...

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Bring the operands of these pieces, which `to_bring` has returned."""

    def take_back(self) -> None:
        """Take back what was brought, with the values that it has now; nothing, if nothing is there."""


class LaterUpdates(Protocol):
    """Updates the pieces of some groups after ``step()`` has returned: what places them on the host does."""

    def takes(self, group: FlatGroup) -> bool:
        """Whether it updates the pieces of this group."""

    def arm(self, of: Any, step: Callable[[Any], Any], units: Mapping[FlatGroup, Lists]) -> None:
        """Update these units by the class's own ``step``, with the settings that the optimizer has now."""

    def wait(self) -> None:
        """Wait until all updates are over."""

    def complete_grads(self) -> None:
        """Make all gradients final, for a step on this thread."""

    def states(self, content: Any) -> Any:
        """Return an optimizer's states, which from now on wait for updates when they are read."""

    def loaded(self, optimizer: Any, group: FlatGroup) -> None:
        """Have states of the group's pieces, which were just loaded, where they are between steps."""


class StateFormat(Protocol):
    """How states are kept between steps: `zeroshard.zero.state_formats.formats.StateFormat` is one."""

    @property
    def name(self) -> str:
        """Its name."""

    def blocks(
        self, optimizer_cls: type, settings: Mapping[str, Any], params: Mapping[nn.Parameter, torch.dtype]
    ) -> dict[nn.Parameter, int]:
        """Those of a group's parameters that may not be cut anywhere, with the elements of a block of each."""


class StatesInFormat(Protocol):
    """States that another format keeps between steps: `zeroshard.zero.state_formats.operands.FormattedStates` are."""

    def parts(self, by_group: Lists) -> list[Lists]:
        """Divide pieces into parts on which the class steps in turn, so that few states are wide at a time."""

    def to_bring(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those whose states it keeps."""

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Make these states as the class has them."""

    def take_back(self) -> None:
        """Make them as they are kept."""

    def loaded(self, pieces: Iterable[nn.Parameter]) -> None:
        """Have the states of these pieces, which were just loaded, in the format."""

    def kept(self, state: Mapping[str, Any]) -> State:
        """Return a state that the class has made, of any tensor, as it is kept."""


class WidenedGrads:
    """Gradients are narrower than the weights that they update, and most optimizers need one dtype for both.

    With ``MixedPrecision(reduce_dtype=torch.bfloat16)`` reduced gradients stay in bfloat16 until the optimizer steps,
    which is shown copies in its pieces' own dtype.
    """

    def __init__(self) -> None:
        self._narrow: list[tuple[nn.Parameter, Tensor]] = []

    def to_bring(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of which the gradient has another dtype than the piece."""
        return [piece for piece in pieces if piece.grad is not None and piece.grad.dtype != piece.dtype]

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Show wide copies of the gradients."""
        self._narrow = [*self._narrow, *((piece, piece.grad) for piece in pieces if piece.grad is not None)]
        for piece in pieces:
            piece.grad = None if piece.grad is None else piece.grad.to(piece.dtype)

    def take_back(self) -> None:
        """Show the narrow gradients again, in place of the copies, whose values are dropped."""
        for piece, grad in self._narrow:
            piece.grad = grad
        self._narrow = []


class CombinedOperands:
    """Several members, each of which brings its own; an observer adds one when it hears of an optimizer.

    Attributes:
        later: updates pieces after ``step()`` has returned; None: nothing does.
        formatted: the member that keeps states in another format between steps; None: they stay as they are.
    """

    later: LaterUpdates | None = None
    formatted: StatesInFormat | None = None

    def __init__(self, *members: StepOperands) -> None:
        self.members = list(members)

    def apart(self) -> CombinedOperands:
        """Return the same members for another thread: what is brought there, this object does not take back."""
        apart = CombinedOperands(*map(copy, self.members))
        if self.formatted is not None:
            number = next(number for number, member in enumerate(self.members) if member is self.formatted)
            apart.formatted = cast("StatesInFormat", apart.members[number])
        return apart

    def wait(self) -> None:
        """Wait until updates that run after ``step()`` has returned are over."""
        if self.later is not None:
            self.later.wait()

    def complete(self) -> None:
        """Wait as `wait` does, and until gradients are final."""
        if self.later is not None:
            self.later.complete_grads()

    def loaded(self, optimizer: Any, group: FlatGroup, pieces: Sequence[nn.Parameter]) -> None:
        """Have states of these pieces of the group, which were just loaded, as and where they are between steps."""
        if self.formatted is not None:
            self.formatted.loaded(pieces)
        if self.later is not None:
            self.later.loaded(optimizer, group)

    def to_bring(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of which any member must bring operands."""
        pieces = list(pieces)
        return list(dict.fromkeys(piece for member in self.members for piece in member.to_bring(pieces)))

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Have each member bring its own."""
        for member in self.members:
            member.bring(member.to_bring(pieces))

    def take_back(self) -> None:
        """Have each member take back its own, the last first."""
        for member in reversed(self.members):
            member.take_back()

    def bring_unit(self, optimizer: Any, step: Callable[[Any], Any], unit: Lists) -> None:
        """Bring a unit's operands; step on all of its parts but the last, which the param groups then hold.

        States in another format are brought for a part at a time, all else for the unit.
        """
        pieces, formatted = list(chain.from_iterable(unit)), self.formatted
        for member in self.members:
            if member is not formatted:
                member.bring(member.to_bring(pieces))
        for number, part in enumerate([unit] if formatted is None else formatted.parts(unit)):
            if formatted is not None and number:
                step(optimizer)
                formatted.take_back()
            for group, own in zip(optimizer.param_groups, part, strict=True):
                group["params"] = own
            if formatted is not None:
                formatted.bring(formatted.to_bring(chain.from_iterable(part)))
