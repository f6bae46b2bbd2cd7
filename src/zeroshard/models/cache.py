"""Key-value cache: keys and values of earlier tokens, so that generating a token computes that token alone.

Shape legend: B batch, K key and value heads, T tokens of this call, S tokens so far with these, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Key-value cache of one block; the first use allocates memory for ``max_tokens`` tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._keys, self._values = max_tokens, None, None
        self.num_tokens = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append keys and values [B, K, T, D].

        Returns:
            All keys and values [B, K, S, D], views of the cache; and the mask [T, S] for
            `zeroshard.models.attention.attend`, which needs none (None) for the first tokens and for a single one.
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
    """Key-value cache of a model, for at most ``max_tokens`` tokens; ``forward`` takes it with the new tokens only."""

    def __init__(self, num_layers: int, max_tokens: int) -> None:
        self.layers = [LayerCache(max_tokens) for _ in range(num_layers)]
        self.max_tokens = max_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache."""
        return self.layers[0].num_tokens
