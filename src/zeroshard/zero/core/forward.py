"""A forward of the model, and the forwards whose backward may still come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from zeroshard.comm import Communicator
from zeroshard.host.torch_internals import version_of
from zeroshard.host.uncompiled import made_once, uncompiled


class Event:
    """Takes place at the first gradient of each backward pass, ``passes.backward``: [Note: Which call] in `hooks`."""

    def __init__(self, passes: Any, take: Callable[[], None]) -> None:
        self._passes, self._take, self._last = passes, take, None

    def __call__(self, grad: Tensor) -> None:
        """A gradient has arrived."""
        if self._last is None or self._last is not self._passes.backward:
            self._take()
            self._last = self._passes.backward

    def cancel(self) -> None:
        """Do nothing from now on."""
        self._take = lambda: None


class _Hooked(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    events: list[Event]
    ends: dict[Any, Event]  # by unit, the end of its last call of which it is an input


class Forward:
    """One forward of the model. Hooks on the outputs of its units refer to it, so it is freed with its graph.

    Attributes:
        index: the number of the forward.
        calls: for each unit, the number of its calls whose backward has not begun.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.calls: dict[Any, int] = {}
        self._hooked: dict[int, _Hooked] = {}

    def hook_inputs(self, tensors: Iterable[Tensor], end: Event, unit: Any) -> None:
        """The inputs of a call of the unit: ``end`` its backward when a gradient reaches one of them."""
        for tensor in tensors:
            known = self._hook(tensor)
            known.events.append(end)
            known.ends[unit] = end

    def hook_outputs(self, tensors: Iterable[Tensor], begin: Event, unit: Any) -> bool:
        """The outputs: ``begin`` its backward when a gradient reaches one of them; return whether it may begin.

        An output that is an input, unchanged, begins nothing. If all are, as of a layer that is dropped, nothing ends.
        """
        begins, ends = False, []
        for known in map(self._hook, tensors):
            if unit in known.ends:
                ends.append(known.ends[unit])
            else:
                known.events.append(begin)
                begins = True
        for end in () if begins else ends:
            end.cancel()
        return begins

    def _hook(self, tensor: Tensor) -> _Hooked:
        """A tensor gets one hook for all of its events: a key-value cache goes through every block."""
        known = self._hooked.get(id(tensor))
        # after an in-place change an earlier hook sees the gradient of the old value only
        if known is None or known.tensor() is not tensor or known.version != version_of(tensor):
            self._hooked[id(tensor)] = known = _Hooked(weakref.ref(tensor), version_of(tensor), [], {})
            tensor.register_hook(partial(_teller(), known.events))
        return known

    def ends(self) -> None:
        """The model has returned: drop the list of hooked tensors, whose events refer back to this object."""
        self._hooked = {}


def _tell(events: list[Event], grad: Tensor) -> None:
    for event in events:
        event(grad)


@made_once
def _teller() -> Callable[[list[Event], Tensor], None]:
    return uncompiled(_tell)


OfSeveral = Callable[["Forwards", Forward, Communicator | None], list[Forward]]


class Forwards:
    """The forwards that have been run; `outstanding` has equally many entries on every rank.

    Attributes:
        current: the forward that is running, or the last one.
        outstanding: the numbers of the forwards whose backward may still come, in order.
        several: of several that are outstanding, those that a backward goes through, the latest first, by the one whose
            outputs got gradients first and, if ranks must agree, their communicator; None: that one alone.
    """

    def __init__(self) -> None:
        self.current = Forward()
        self.outstanding: list[int] = []
        self.several: OfSeveral | None = None
        self._graphs: dict[int, weakref.ref[Forward]] = {}

    def begin(self, *, grads: bool) -> Forward:
        """Begin another forward, because the model is called; ``grads``: whether a backward may follow."""
        self.current.ends()
        self.current = Forward(self.current.index + 1)
        if grads:
            self.outstanding.append(self.current.index)
            self._graphs[self.current.index] = weakref.ref(self.current)
        return self.current

    def find(self, index: int) -> Forward | None:
        """The forward with that number, if its graph is left on this rank; `current` counts as having one."""
        return self.current if index == self.current.index else self._graphs.get(index, lambda: None)()

    def of_backward(self, begun: Forward | None, comm: Communicator | None) -> list[Forward]:
        """The forwards that a backward goes through, the latest first. Collective if several may be, with ``comm``.

        Args:
            begun: the forward whose outputs got gradients first, if known.
            comm: the ranks that must agree; None: each may decide by itself.
        """
        if begun is None:
            index = self.outstanding[-1] if self.outstanding else self.current.index
            begun = self.find(index) or Forward(index)
        if len(self.outstanding) <= 1 or self.several is None:
            return [begun]
        return self.several(self, begun, comm)

    def forget(self, indices: list[int] | None = None) -> None:
        """Expect no backward of these forwards any more, by their numbers; None: of any forward."""
        gone = {self.current.index, *self.outstanding} if indices is None else set(indices)
        for forward in filter(None, map(self.find, gone)):
            forward.calls.clear()
        self.outstanding = [index for index in self.outstanding if index not in gone]
        self._graphs = {index: ref for index, ref in self._graphs.items() if index not in gone}
