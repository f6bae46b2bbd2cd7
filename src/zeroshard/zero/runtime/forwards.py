"""The forwards of a model whose backward may still come.

One backward may go through the graphs of several forwards (a preference loss, a discriminator of real and generated
samples), and the graph of a forward may be dropped without a backward. When a graph is garbage collected differs from
rank to rank, so no rank decides by itself: if several forwards are outstanding, ranks that shard weights agree first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial

from torch import Tensor

from zeroshard.host.torch_internals import version_of
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.core.passes import Forward


class ForwardRun(Forward):
    """One forward of the model. Hooks on the outputs of its units refer to it, so it is freed with its graph.

    Attributes:
        index: the number of the forward.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
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


class Forwards:
    """The forwards that have been run; `outstanding` has equally many entries on every rank.

    Attributes:
        current: the forward that is running, or the last one.
        outstanding: the numbers of the forwards whose backward may still come, in order.
    """

    def __init__(self) -> None:
        self.current = ForwardRun(0)
        self.outstanding: list[int] = []
        self._graphs: dict[int, weakref.ref[ForwardRun]] = {}

    def begin(self, *, grads: bool) -> ForwardRun:
        """Begin another forward, because the model is called; ``grads``: whether a backward may follow."""
        self.current.ends()
        self.current = ForwardRun(self.current.index + 1)
        if grads:
            self.outstanding.append(self.current.index)
            self._graphs[self.current.index] = weakref.ref(self.current)
        return self.current

    def find(self, index: int) -> ForwardRun | None:
        """The forward with that number, if its graph is left on this rank; `current` counts as having one."""
        return self.current if index == self.current.index else self._graphs.get(index, lambda: None)()

    def votes(self, begun: int) -> list[int]:
        """This rank's votes on a backward that began at the outputs of ``begun``; the maxima over ranks decide.

        The place of ``begun`` among the outstanding forwards (-1: none), then for each of these 1 if its graph is left.
        """
        first = self.outstanding.index(begun) if begun in self.outstanding else -1
        return [first, *(int(self.find(index) is not None) for index in self.outstanding)]

    def by_votes(self, votes: list[int]) -> list[int]:
        """The forwards that this backward goes through by the ranks' ``votes``, the latest first."""
        first, *flags = votes
        return [index for place, index in enumerate(self.outstanding) if place <= first and flags[place]][::-1]

    def forget(self, indices: list[int] | None = None) -> None:
        """Expect no backward of these forwards any more; None: of any forward."""
        gone = {self.current.index, *self.outstanding} if indices is None else set(indices)
        for forward in filter(None, map(self.find, gone)):
            forward.calls.clear()
        self.outstanding = [index for index in self.outstanding if index not in gone]
        self._graphs = {index: ref for index, ref in self._graphs.items() if index not in gone}
