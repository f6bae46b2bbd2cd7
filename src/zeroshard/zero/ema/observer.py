"""`EmaObserver`: how an engine's steps, saves and loads take the average of its weights along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from zeroshard.comm.every_rank import call_of_every_rank
from zeroshard.optim.named_shards import ShardReader
from zeroshard.zero.ema.average import EMA, Ema
from zeroshard.zero.optimizers.observer import Observer
from zeroshard.zero.optimizers.state_dict import Stateful
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.runtime.unsharded_weights import mark_unusable


def attached(runtime: Runtime, observers: list[Observer], decay: float) -> Ema:
    """Make the average of an engine's weights, and add its observer to the engine's; errors are those of `Zero.ema`."""
    if any(isinstance(observer, EmaObserver) for observer in observers):
        raise ValueError("ema: this engine keeps an average already")
    if any(observer.parts_weights for observer in observers):
        raise ValueError("ema: replicas with local steps have no weights in common to average; leave one of them out")
    observer = EmaObserver(runtime, decay)
    observers.append(observer)
    return observer.ema


class EmaObserver(Observer):
    """Takes the average of an engine's weights along in its steps, saves and loads; ``runtime``: the engine's."""

    category = EMA

    def __init__(self, runtime: Runtime, decay: float) -> None:
        self._runtime = runtime
        masters = [shard for group in runtime.groups() for shard in group.shards]

        def called(method: str) -> None:
            call_of_every_rank(runtime.comm, f"Ema.{method}")

        self.ema = Ema(masters, decay, self._came_or_went, lambda: runtime.complete_step(), called)

    def _came_or_went(self) -> None:
        """Averages and weights were swapped: gradients are of the others now, and weights are to be gathered."""
        whose = None if self.ema.applied else "the averages"
        mark_unusable((group.grads for group in self._runtime.groups()), whose, "ema.weights()")
        self._runtime.weights.refresh_after_replacement("back" if self.ema.applied else "for now")

    def layout_changes(self) -> None:
        """Refuse it: averages have the present layout."""
        raise RuntimeError("optimizer: it needs a new layout, and an average has the old one; make ema() after it")

    def require_weights(self, what: str) -> None:
        """Raise RuntimeError while averages are in the place of the weights."""
        self.ema.require_away(what)

    def holders(self) -> Sequence[Stateful]:
        """The average."""
        return (self.ema,)

    def load(self, reader: ShardReader) -> None:
        """Load the average; without a saved one it starts from the weights."""
        places = {
            shard: (group.params.layout.slots[piece.slot].name, piece.interval)
            for group in self._runtime.groups()
            for piece, shard in zip(group.params.pieces, group.shards, strict=True)
        }

        def read(shard: Tensor) -> Tensor | None:
            name, interval = places[cast("nn.Parameter", shard)]
            return reader.read(name, EMA, interval) if EMA in reader.kinds(name) else None

        self.ema.load(read)

    @property
    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The averages."""
        return [("", state[EMA]) for state in self.ema.state.values()]
