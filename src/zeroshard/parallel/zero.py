"""Our own engine, `zeroshard.zero.Zero`, at any ZeRO stage, behind the common interface."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from zeroshard.comm import Communicator
from zeroshard.parallel.base import Setup
from zeroshard.zero import STAGES, MixedPrecision, Zero
from zeroshard.zero.ema.average import Ema


class ZeroStrategy:
    """`Zero` with its optimizer. Its methods are the engine's own, so what the training loop measures is the engine."""

    def __init__(self, setup: Setup, stage: int) -> None:
        secondary = setup.secondary_shard_size if stage == 3 else None
        reshards = setup.reshard_after_forward
        param_dtype = setup.compute_dtype if setup.compute_dtype != torch.float32 else None
        self.zero = zero = Zero(
            setup.model,
            replace(STAGES[stage], reshard_after_forward=reshards, secondary_shard_size=secondary),
            units=setup.units,
            comm=setup.comm,
            precision=MixedPrecision(param_dtype, setup.reduce_dtype, **setup.wire),
            init=setup.init,
            device=setup.device,
            **setup.arguments,
        )
        self.model: nn.Module = setup.model
        self.comm: Communicator = zero.comm
        groups = setup.param_groups(setup.model)
        self.optimizer = zero.optimizer(setup.optimizer_cls, groups, **setup.optimizer_kwargs)
        self.ema: Ema | None = None if setup.ema_decay is None else zero.ema(setup.ema_decay)
        self.no_sync, self.micro_batch, self.clip_grad_norm_ = zero.no_sync, zero.micro_batch, zero.clip_grad_norm_
        self.full_params, self.state_dict, self.tied_names = zero.full_params, zero.state_dict, zero.tied_names
        self.named_shards, self.load_named_shards = zero.named_shards, zero.load_named_shards
        self.named_param_groups, self.load_param_groups = zero.named_param_groups, zero.load_param_groups
        self.memory_bytes, self.holdings, self.resume_at = zero.memory_bytes, zero.holdings, zero.resume_at


zero0, zero1, zero2, zero3 = (partial(ZeroStrategy, stage=stage) for stage in STAGES)
