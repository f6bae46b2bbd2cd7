"""The forwards of a model whose backward may still come.

One backward may go through the graphs of several forwards (a preference loss, a discriminator of real and generated
samples), and the graph of a forward may be dropped without a backward. When a graph is garbage collected differs from
rank to rank, so no rank decides by itself: if several forwards are outstanding, ranks that shard weights agree first.
"""

from __future__ import annotations

import weakref

from zeroshard.zero.core.agreement import Agreement
from zeroshard.zero.core.forward import Forward


class SeveralForwards:
    """The forwards that have been run; `outstanding` has equally many entries on every rank.

    Attributes:
        current: the forward that is running, or the last one.
        outstanding: the numbers of the forwards whose backward may still come, in order.
    """

    def __init__(self) -> None:
        self.current = Forward(0)
        self.outstanding: list[int] = []
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

    def of_backward(self, begun: Forward | None, agree: Agreement | None) -> list[Forward]:
        """See `zeroshard.zero.core.forward.Forwards`. Collective if several may be and weights are sharded."""
        if begun is None:
            index = self.outstanding[-1] if self.outstanding else self.current.index
            begun = self.find(index) or Forward(index)
        if len(self.outstanding) <= 1:
            return [begun]
        votes = self.votes(begun.index)
        if agree is not None:
            votes = agree.agree_on_forwards(votes)
        return [self.find(index) or Forward(index) for index in self.by_votes(votes)] or [begun]

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
