"""A forward of the model, and which forwards a backward goes through."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Protocol

from torch import Tensor

from zeroshard.host.torch_internals import version_of
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.core.agreement import Agreement


class Forward:
    """One forward of the model. Hooks on the outputs of its units refer to it, so it is freed with its graph.

    Attributes:
        index: the number of the forward.
        calls: for each unit, the number of its calls whose backward has not begun.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.calls: dict[Any, int] = {}
        self._hooked: dict[int, tuple[weakref.ref[Tensor], int, list[Callable[[Tensor], None]]]] = {}

    def hook(self, tensors: Iterable[Tensor], event: Callable[[Tensor], None]) -> None:
        """Call ``event`` when a gradient reaches one of the tensors. A tensor gets one hook for all of its events.

        A key-value cache goes through every block, and would otherwise get one hook from each of them.
        """
        for tensor in tensors:
            known = self._hooked.get(id(tensor))
            # after an in-place change an earlier hook sees the gradient of the old value only
            if known is not None and known[0]() is tensor and known[1] == version_of(tensor):
                known[2].append(event)
                continue
            events = [event]
            self._hooked[id(tensor)] = (weakref.ref(tensor), version_of(tensor), events)
            tensor.register_hook(partial(_teller(), events))

    def ends(self) -> None:
        """The model has returned: drop the list of hooked tensors, whose events refer back to this object."""
        self._hooked = {}


def _tell(events: list[Callable[[Tensor], None]], grad: Tensor) -> None:
    for event in events:
        event(grad)


@cache
def _teller() -> Callable[[list[Callable[[Tensor], None]], Tensor], None]:
    return uncompiled(_tell)


class Forwards(Protocol):
    """The forwards that have been run: `zeroshard.zero.runtime.forwards` has those of which several may be pending."""

    def begin(self, *, grads: bool) -> Forward:
        """Begin another forward, because the model is called; ``grads``: whether a backward may follow."""
        ...

    def of_backward(self, begun: Forward | None, agree: Agreement | None) -> list[Forward]:
        """The forwards that a backward goes through, the latest first.

        Args:
            begun: the forward whose outputs got gradients first, if known.
            agree: through what ranks agree on them; None: each may decide by itself.
        """
        ...

    def forget(self, indices: list[int] | None) -> None:
        """Expect no backward of these forwards any more, by their numbers; None: of any forward."""


class LastForward:
    """The plain member: a backward goes through one forward, if not known otherwise the last."""

    def __init__(self) -> None:
        self.current = Forward()

    def begin(self, *, grads: bool) -> Forward:
        """Begin another forward."""
        self.current = Forward(self.current.index + 1)
        return self.current

    def of_backward(self, begun: Forward | None, agree: Agreement | None) -> list[Forward]:
        """The one that is ``begun``."""
        return [begun or self.current]

    def forget(self, indices: list[int] | None) -> None:
        """Nothing, as nothing is kept."""
