"""`ZeroPlugin`: the sharding settings that a user passes to an integration, which then makes the engine itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.comm.module_buffers import BufferSync
from zeroshard.zero import FrozenFormat, MixedPrecision, Offload, Zero
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.engine import Accumulate

_ENGINE = "_zeroshard_engine"  # attribute of a model that has an engine; it lives as long as the model
_COMPUTES = {"bf16": torch.bfloat16, "no": None, None: None}


@dataclass(frozen=True)
class ZeroPlugin:
    """Arguments of `zeroshard.Zero` for each model that the library prepares.

    Attributes:
        stage: 0, 1, 2 or 3, or a `ShardingStrategy`.
        units: as in `Zero`; ``"auto"``: a Hugging Face model's blocks.
        precision: dtypes as in `Zero`. None: if the library's ``mixed_precision`` is ``"bf16"``, weights are gathered
            and compute in bf16, with fp32 master weights; else they keep their dtype.
        prefetch: how many units ahead weights are gathered at stage 3.
        accumulate: how gradients of several backwards before one step accumulate, as in `Zero`; None: by the stage.
        shard_size: number of neighbouring ranks over which training state is sharded; None: all ranks.
        buffers: how ranks synchronise buffers that a forward changes, as in `Zero`.
        offload: which state leaves the device, as in `Zero`; no bit changes.
        frozen_format: the format of frozen weights, as in `Zero`: of the base of adapters.
    """

    stage: int | ShardingStrategy = 3
    units: Any = "auto"
    precision: MixedPrecision | None = None
    prefetch: int = 1
    accumulate: Accumulate | None = None
    shard_size: int | None = None
    buffers: BufferSync = "broadcast"
    offload: Offload | None = None
    frozen_format: str | FrozenFormat | None = None

    def engine(self, model: nn.Module, mixed_precision: str | None = None) -> Zero:
        """The engine of ``model``, which the first call makes. Making it is collective.

        Args:
            model: the model, on the device where it trains.
            mixed_precision: the library's setting, ``"bf16"`` or ``"no"``. With any other, weights keep their dtype,
                and the library's autocast chooses the compute dtype.
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
                offload=self.offload,
                frozen_format=self.frozen_format,
            )
            vars(model)[_ENGINE] = found
        return found


def engine_of(model: nn.Module) -> Zero | None:
    """The engine that an integration made for ``model``; None if there is none."""
    return vars(model).get(_ENGINE)
