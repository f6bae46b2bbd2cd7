"""A strategy that is loaded without the states of its optimizer: to evaluate, or to begin a schedule of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor

from zeroshard.parallel import Strategy
from zeroshard.zero.state.named_shards import GATHERED, MODEL_KINDS, NamedShard, ShardReader


class WeightsAlone:
    """``checkpoint.load`` gives ``strategy`` what is of the model.

    Args:
        strategy: is loaded.
        kinds: of tensors: weights, buffers, averages.
        seen_as: what the checkpoint is seen as: from its reader to another.
    """

    def __init__(
        self,
        strategy: Strategy,
        kinds: Collection[str] = MODEL_KINDS - {GATHERED},
        seen_as: Callable[[ShardReader], ShardReader] = lambda reader: reader,
    ) -> None:
        self._strategy, self._kinds, self._seen_as = strategy, kinds, seen_as
        self.comm = strategy.comm

    def named_shards(self) -> Iterable[NamedShard]:
        """Nothing is saved from here."""
        return ()

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read what is of the model."""
        self._strategy.load_named_shards(_Reader(self._seen_as(reader), self._kinds))


class _Reader:
    """``reader``, of a checkpoint that seems to hold no more than ``kinds``."""

    def __init__(self, reader: ShardReader, kinds: Collection[str]) -> None:
        self._reader, self._kinds = reader, kinds

    def kinds(self, name: str) -> dict[str, tuple[int, ...]]:
        """What is saved of it."""
        return {kind: shape for kind, shape in self._reader.kinds(name).items() if kind in self._kinds}

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """As the reader does."""
        return self._reader.read(name, kind, interval)
