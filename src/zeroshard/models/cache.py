"""Keys and values of the tokens that a model has seen, so that one more token costs one more token.

Shape legend: B batch, K key and value heads, T tokens of this call, S tokens so far, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Of one block; memory is taken when it is first used, for ``max_tokens``."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._keys, self._values = max_tokens, None, None
        self.num_tokens = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add keys and values [B, K, T, D].

        Returns:
            All of them [B, K, S, D], views of the cache; and who of the T sees whom of the S, [T, S], as
            `zeroshard.models.attention.attend` takes it: None for the first tokens, and for a single one.
        """
        batch, heads, num_new, width = k.shape
        if self._keys is None or self._values is None:
            self._keys, self._values = (x.new_empty(batch, heads, self._max_tokens, width) for x in (k, v))
        before, self.num_tokens = self.num_tokens, self.num_tokens + num_new
        assert self.num_tokens <= self._max_tokens, f"{self.num_tokens} tokens in a cache for {self._max_tokens}"
        self._keys[:, :, before : self.num_tokens] = k
        self._values[:, :, before : self.num_tokens] = v
        mask = None
        if num_new > 1 and before:
            mask = torch.ones(num_new, self.num_tokens, dtype=torch.bool, device=k.device).tril(before)
        return self._keys[:, :, : self.num_tokens], self._values[:, :, : self.num_tokens], mask


class KVCache:
    """Of a whole model, for sequences of at most ``max_tokens``; give it to ``forward`` with tokens that are new."""

    def __init__(self, num_layers: int, max_tokens: int) -> None:
        self.layers = [LayerCache(max_tokens) for _ in range(num_layers)]
        self.max_tokens = max_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that it has seen."""
        return self.layers[0].num_tokens
