"""An exponential moving average of the weights, sharded as the masters are.

    average <- decay * average + (1 - decay) * master                   after each step, on each rank's own pieces

Averaged weights often evaluate better than the last ones (Polyak and Juditsky 1992). Nothing is sent to keep them;
to be used, they change places with the masters, and the engine gathers them as it gathers any weights.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zeroshard.zero.runtime import Runtime
from zeroshard.zero.state import ShardReader

EMA = "ema"  # the kind of its tensors in a checkpoint


class Ema:
    """The average of one engine's weights; made by `Zero.ema`.

    Attributes:
        decay: how much of the old average an update keeps, in [0, 1).
        state: this rank's averages, by the pieces of the masters that they belong to: ``{"ema": [numel]}``, laid out
            like an optimizer's state so that a checkpoint saves them alike.
        applied: whether the averages are in the place of the weights now.

    Raises:
        ValueError: a decay outside [0, 1).
    """

    def __init__(self, runtime: Runtime, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay: {decay} is outside [0, 1)")
        self._runtime = runtime
        self.decay = decay
        self.applied = False
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {
            shard: {EMA: shard.detach().clone()}
            for group in runtime.groups()
            for shard in group.shards
            if shard.dtype.is_floating_point
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average: once after each step.

        Raises:
            RuntimeError: inside `weights`.
        """
        self.require_away("update")
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for shard in self.state:
            by_dtype.setdefault(shard.dtype, []).append(shard)
        for shards in by_dtype.values():
            torch._foreach_lerp_([self.state[shard][EMA] for shard in shards], shards, 1.0 - self.decay)

    @contextmanager
    def weights(self) -> Generator[None]:
        """In this block the module computes with the averages: evaluate it, or take `Zero.state_dict`.

        Raises:
            RuntimeError: inside another such block.
        """
        self.require_away("weights")
        self._swap()
        self.applied = True
        try:
            yield
        finally:
            self._swap()
            self.applied = False

    def require_away(self, what: str) -> None:
        """Raise RuntimeError while the averages are in the place of the weights."""
        if self.applied:
            raise RuntimeError(f"{what}: the averages are in the place of the weights; leave ema.weights() first")

    def load(self, reader: ShardReader) -> None:
        """Read this rank's averages; where none were saved they start anew from the weights.

        Raises:
            RuntimeError: inside `weights`.
        """
        self.require_away("load")
        for group in self._runtime.groups():
            for piece, shard in zip(group.params.pieces, group.shards, strict=True):
                if shard in self.state:
                    name = group.params.layout.slots[piece.slot].name
                    saved = EMA in reader.kinds(name)
                    source = reader.read(name, EMA, piece.interval) if saved else shard.detach()
                    self.state[shard][EMA].copy_(source.view(shard.shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of the averages on this rank."""
        return sum(state[EMA].numel() * state[EMA].element_size() for state in self.state.values())

    @torch.no_grad()
    def _swap(self) -> None:
        for shard, state in self.state.items():
            weights = shard.detach().clone()
            shard.copy_(state[EMA])
            state[EMA].copy_(weights)
        for group in self._runtime.groups():
            group.params.mark_stale()
