"""`ZeroPlugin`: how a model is to be sharded, told to a library that makes the engine itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.zero import MixedPrecision, Zero
from zeroshard.zero.engine import Accumulate
from zeroshard.zero.runtime.module_buffers import BufferSync
from zeroshard.zero.strategy import ShardingStrategy

_ENGINE = "_zeroshard_engine"  # on a model that has one, and lives as long as it
_COMPUTES = {"bf16": torch.bfloat16, "no": None, None: None}


@dataclass(frozen=True)
class ZeroPlugin:
    """What `zeroshard.Zero` is given for each model.

    Attributes:
        stage: 0, 1, 2 or 3, or a `ShardingStrategy`.
        units: as of `Zero`; ``"auto"``: a Hugging Face model's blocks.
        precision: None: with ``mixed_precision="bf16"`` weights are gathered and compute in bf16, with fp32 master
            weights; else they keep their dtype.
        prefetch: how many units ahead weights are gathered at stage 3.
        accumulate: how the backwards of one step add up; None: as the stage says.
        shard_size: over how many neighbouring ranks state is sharded; None: all.
        buffers: what becomes of buffers that a forward changes.
    """

    stage: int | ShardingStrategy = 3
    units: Any = "auto"
    precision: MixedPrecision | None = None
    prefetch: int = 1
    accumulate: Accumulate | None = None
    shard_size: int | None = None
    buffers: BufferSync = "broadcast"

    def engine(self, model: nn.Module, mixed_precision: str | None = None) -> Zero:
        """The engine of ``model``, made by the first call. Collective.

        Args:
            model: on the device where it trains.
            mixed_precision: of the library: ``"bf16"``, ``"no"``; where it is another, weights keep their dtype, and
                the library's autocast computes.
        """
        found = engine_of(model)
        if found is None:
            precision = self.precision or MixedPrecision(param_dtype=_COMPUTES.get(mixed_precision))
            found = Zero(
                model,
                self.stage,
                self.units,
                precision=precision,
                prefetch=self.prefetch,
                accumulate=self.accumulate,
                shard_size=self.shard_size,
                buffers=self.buffers,
            )
            vars(model)[_ENGINE] = found
        return found


def engine_of(model: nn.Module) -> Zero | None:
    """The engine that an integration made for ``model``."""
    return vars(model).get(_ENGINE)
