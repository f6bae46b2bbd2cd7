"""`Members`: which transport and which reducer a buffer gets. The plain ones are here; an engine is given all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.reduction import GradientReducer, PlainReducer
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.core.weights import PlainTransport, WeightTransport
from zeroshard.zero.precision import MixedPrecision

_LACKS = "members: PLAIN has no {}; use zeroshard.zero.transport.members.ALL"


@dataclass(frozen=True)
class BufferFacts:
    """A buffer's name and layout, its master's dtype and device, and the engine's settings: by these it is chosen."""

    name: str
    layout: FlatLayout
    dtype: torch.dtype
    device: torch.device
    rank_groups: RankGroups
    strategy: ShardingStrategy
    precision: MixedPrecision


class Members:
    """Chooses the members of the two seams, `WeightTransport` and `GradientReducer`, for one buffer.

    These are the plain ones: weights and gradients are sent in their own dtypes. What needs others raises ValueError.
    """

    def transport(self, buffer: BufferFacts) -> WeightTransport:
        """Return the transport of the buffer's weights."""
        form, size = buffer.precision.weights_format(buffer.dtype), buffer.strategy.secondary_shard_size
        if form is not None or size is not None:
            raise ValueError(_LACKS.format("wire format or second copy of weights"))
        return PlainTransport(buffer.rank_groups.shard_group, buffer.layout)

    def reducer(self, buffer: BufferFacts) -> GradientReducer:
        """Return the reducer of the buffer's gradients."""
        if buffer.precision.gradients_format(buffer.dtype) is not None or buffer.rank_groups.reproducible is not None:
            raise ValueError(_LACKS.format("wire format or exact sum of gradients"))
        return PlainReducer(buffer.layout, buffer.strategy, buffer.rank_groups)

    def kind(self, param: nn.Parameter) -> Hashable:
        """Return what parameters of one buffer have in common, beside dtype, device and whether they are trained."""
        return None

    def group_class(self, params: list[tuple[str, nn.Parameter]]) -> Callable[..., Any] | None:
        """Return the `FlatGroup` that these parameters are to have; None: the plain one."""
        return None


PLAIN = Members()
