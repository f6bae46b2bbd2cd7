"""Our own engine, `zeroshard.zero.Zero`, at any ZeRO stage, behind the common interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.parallel.base import Setup
from zeroshard.zero import STAGES, MixedPrecision, Zero
from zeroshard.zero.buffers.holdings import Holding
from zeroshard.zero.optimizers.ema import Ema
from zeroshard.zero.state.named_shards import NamedShard, ShardReader


class ZeroStrategy:
    """`Zero` with its optimizer. It only forwards calls, so what the training loop measures is the engine."""

    def __init__(self, setup: Setup, stage: int) -> None:
        secondary = setup.secondary_shard_size if stage == 3 else None
        reshards = setup.reshard_after_forward
        param_dtype = setup.compute_dtype if setup.compute_dtype != torch.float32 else None
        self.zero = Zero(
            setup.model,
            replace(STAGES[stage], reshard_after_forward=reshards, secondary_shard_size=secondary),
            units=setup.units,
            comm=setup.comm,
            precision=MixedPrecision(param_dtype, setup.reduce_dtype, **setup.wire),
            init=setup.init,
            device=setup.device,
            prefetch=setup.prefetch,
            accumulate=setup.accumulate,
            shard_size=setup.shard_size,
            replicas=setup.replicas,
            leaves=setup.leaves,
        )
        self.model: nn.Module = setup.model
        groups = setup.param_groups(setup.model)
        self.optimizer = self.zero.optimizer(setup.optimizer_cls, groups, **setup.optimizer_kwargs)
        self.ema: Ema | None = None if setup.ema_decay is None else self.zero.ema(setup.ema_decay)

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks that train together."""
        return self.zero.comm

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication."""
        return self.zero.no_sync()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Wrap one micro-batch; reduce its gradients if it is the last, or if the engine accumulates sharded ones."""
        return self.zero.micro_batch(last)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the averaged gradients by their global norm, over all shards."""
        return self.zero.clip_grad_norm_(max_norm, norm_type)

    def tied_names(self) -> dict[str, str]:
        """Map each further name of a tied tensor to the name under which it is saved."""
        return self.zero.tied_names()

    def named_shards(self) -> Iterable[NamedShard]:
        """Yield the pieces of tensors that this rank saves."""
        return self.zero.named_shards()

    def resume_at(self, step: int) -> None:
        """Continue after ``step`` optimizer steps: stochastic rounding then draws as in a run that took those steps."""
        self.zero.resume_at(step)

    def named_param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's param groups, ``params`` by their ordinary names."""
        return self.zero.named_param_groups()

    def load_param_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Apply the settings of ``saved`` param groups, as `named_param_groups` returned them, to the optimizer's."""
        self.zero.load_param_groups(saved)

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read this rank's part of every saved tensor."""
        self.zero.load_named_shards(reader)

    def full_params(self) -> AbstractContextManager[None]:
        """Return a context in which weights are unsharded; collective."""
        return self.zero.full_params()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's unsharded weights on the CPU, with ordinary names; collective."""
        return self.zero.state_dict()

    def memory_bytes(self) -> dict[str, int]:
        """Return this rank's resident bytes by category."""
        return self.zero.memory_bytes()

    def holdings(self) -> Iterator[Holding]:
        """Yield each tensor that the engine keeps on this rank now, with its category."""
        return self.zero.holdings()


def at_stage(stage: int) -> Callable[[Setup], ZeroStrategy]:
    """Return the factory of the strategy ``zero{stage}``."""
    return lambda setup: ZeroStrategy(setup, stage)


zero0, zero1, zero2, zero3 = (at_stage(stage) for stage in STAGES)
