"""Before a read of weights that are stale, gathers them; before one of sharded weights, warns."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable

from torch import nn

from zeroshard.torch_internals import compiler_looks
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.reads import Reads
from zeroshard.zero.core.weights import SHARDED
from zeroshard.zero.guards.outdated import Watch, unmark
from zeroshard.zero.runtime.unsharded_weights import UnshardedWeights


class WatchedReads(Reads):
    """Watches reads of the weights of one engine: [Note: Read between steps] in `outdated`."""

    def __init__(self, weights: UnshardedWeights) -> None:
        self._weights = weakref.ref(weights)
        self._watches: weakref.WeakKeyDictionary[FlatParams, dict[bool, Watch]] = weakref.WeakKeyDictionary()
        self._warned = False

    def watch(self, weights: FlatParams) -> None:
        """Before a read of these parameters bring all weights up to date."""
        sharded, watches = weights.state is SHARDED, self._watches.setdefault(weights, {})
        if sharded not in watches:
            watches[sharded] = Watch(_reader(weakref.ref(self)), weights.changes.name_of if sharded else None)
        watches[sharded].mark(weights.params)

    def unwatch(self, params: Iterable[nn.Parameter]) -> None:
        """Watch reads of these parameters no more."""
        unmark(params)

    def bring_up_to_date(self) -> None:
        """Gather stale weights, because one of them is about to be read.

        These are the gathers, in their order, with which the next forward begins: a rank that reads alone blocks until
        the other ranks begin that forward. At stage 3 weights stay sharded, and a warning says so once.
        """
        weights = self._weights()
        if weights is None:
            return
        if not weights.shard_params:
            weights.unshard_all()
        elif compiler_looks():  # dynamo reads no values
            weights.show_as_current()
        elif not self._warned:
            self._warned = True
            warnings.warn(
                "model: weights are read outside of forward and backward, where they are sharded and show NaN; "
                "read them, and compute what depends on them (a penalty, say), inside zero.full_params()",
                stacklevel=5,
            )


def _reader(this: weakref.ref[WatchedReads]) -> Callable[[], None]:
    def read() -> None:
        reads = this()
        if reads is not None:
            reads.bring_up_to_date()

    return read
