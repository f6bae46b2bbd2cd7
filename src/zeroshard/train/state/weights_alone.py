"""Loads a checkpoint into a strategy without the optimizer states: to evaluate, or to fine-tune from its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor

from zeroshard.parallel import Strategy
from zeroshard.zero.state.named_shards import MODEL_KINDS, NamedShard, ShardReader


class WeightsAlone:
    """A target for ``checkpoint.load`` that passes only the model's tensors on to ``strategy``.

    Args:
        strategy: the strategy to load into.
        kinds: kinds of tensors to load, such as weights, buffers and averages.
        seen_as: wraps the checkpoint's reader, to present the checkpoint in another form (as with adapters merged).
    """

    def __init__(
        self,
        strategy: Strategy,
        kinds: Collection[str] = MODEL_KINDS,
        seen_as: Callable[[ShardReader], ShardReader] = lambda reader: reader,
    ) -> None:
        self._strategy, self._kinds, self._seen_as = strategy, kinds, seen_as
        self.comm = strategy.comm

    def named_shards(self) -> Iterable[NamedShard]:
        """Return nothing: this object is only loaded, never saved."""
        return ()

    def load_named_shards(self, reader: ShardReader) -> None:
        """Load the tensors of the chosen kinds into the strategy."""
        self._strategy.load_named_shards(_Reader(self._seen_as(reader), self._kinds))


class _Reader:
    """Presents ``reader``'s checkpoint as if it contained only tensors of ``kinds``."""

    def __init__(self, reader: ShardReader, kinds: Collection[str]) -> None:
        self._reader, self._kinds = reader, kinds

    def kinds(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the saved kinds of the tensor that are to be loaded, with their shapes."""
        return {kind: shape for kind, shape in self._reader.kinds(name).items() if kind in self._kinds}

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """Read from the underlying reader."""
        return self._reader.read(name, kind, interval)
