"""`EmaObserver`: how an engine's steps, saves and loads take the average of its weights along."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroshard.zero.optimizers.ema import EMA, Ema
from zeroshard.zero.optimizers.state_dict import Stateful
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.state.named_shards import ShardReader
from zeroshard.zero.state.training_state import reader_of
from zeroshard.zero.stepping.observer import Observer


class EmaObserver(Observer):
    """Takes the average of an engine's weights along in its steps, saves and loads; ``runtime``: the engine's."""

    category = EMA

    def __init__(self, ema: Ema, runtime: Runtime) -> None:
        self._ema, self._runtime = ema, runtime

    def layout_changes(self) -> None:
        """Refuse it: averages have the present layout."""
        raise RuntimeError("optimizer: it needs a new layout, and an average has the old one; make ema() after it")

    def require_weights(self, what: str) -> None:
        """Raise RuntimeError while averages are in the place of the weights."""
        self._ema.require_away(what)

    def holders(self) -> Sequence[Stateful]:
        """The average."""
        return (self._ema,)

    def load(self, reader: ShardReader) -> None:
        """Load the average; without a saved one it starts from the weights."""
        self._ema.load(reader_of(self._runtime, reader, EMA))

    @property
    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The averages."""
        return [("", state[EMA]) for state in self._ema.state.values()]
