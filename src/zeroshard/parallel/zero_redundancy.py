"""PyTorch's own stage 1: ``DistributedDataParallel`` with ``torch.distributed.optim.ZeroRedundancyOptimizer``.

Each rank updates some of the parameters, whole ones, and broadcasts them to the others; gradients are whole
everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm import Communicator
from zeroshard.parallel.base import Setup
from zeroshard.parallel.replica import Replica, require_group
from zeroshard.zero.ema import Ema
from zeroshard.zero.state import NamedShard, ShardReader

with warnings.catch_warnings():  # the package compiles optimizers that nobody asked for, in a way it deprecates
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeroRedundancy:
    """Whole weights and gradients on every rank, each parameter's optimizer state on one.

    Raises:
        ValueError: no process group (one of a single process will do), a model on the meta device, or an optimizer
            that is wrong on a part of the parameters.
    """

    def __init__(self, setup: Setup) -> None:
        if issubclass(setup.optimizer_cls, torch.optim.LBFGS):
            raise ValueError(
                "zero1-torch: LBFGS needs all parameters at once, and each rank would give it some of them"
            )
        self._replica = Replica(setup, "zero1-torch")
        require_group(self._replica.comm, "zero1-torch")
        self.model: nn.Module = self._replica.model
        self.optimizer = ZeroRedundancyOptimizer(
            setup.param_groups(self._replica.module),
            optimizer_class=setup.optimizer_cls,
            parameters_as_bucket_view=True,  # one broadcast a rank, not one a parameter
            **setup.optimizer_kwargs,
        )

    @property
    def ema(self) -> Ema | None:
        """The average of the weights, whole on every rank; None where none was asked for."""
        return self._replica.ema

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._replica.comm

    @property
    def _local(self) -> Optimizer:
        """The optimizer of the parameters that this rank updates."""
        return self.optimizer.optim

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication."""
        return self._replica.no_sync()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Communicate in the last micro-batch of a step only."""
        return nullcontext() if last else self.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the global norm; gradients are the same on every rank, so nothing is sent."""
        return self._replica.clip_grad_norm_(max_norm, norm_type)

    def full_params(self) -> AbstractContextManager[None]:
        """Weights are always whole."""
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """The model's weights, copied to the CPU, with ordinary names."""
        return self._replica.state_dict()

    def tied_names(self) -> dict[str, str]:
        """Each further name of a tied tensor -> the name that it is saved under."""
        return self._replica.tied_names()

    def named_shards(self) -> Iterator[NamedShard]:
        """An even share of the model, and the whole states of the parameters that this rank updates."""
        yield from self._replica.model_shards()
        for name, kind, tensor in self._replica.states(self._local.state):
            yield NamedShard(name, kind, tuple(tensor.shape), (0, tensor.numel()), tensor.detach().reshape(-1))

    def named_param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups, ``params`` by their ordinary names."""
        return self._replica.param_groups(self.optimizer)

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read the model whole, and the states of the parameters that this rank updates.

        Raises:
            ValueError: a tensor of the model was not saved, or has another shape.
        """
        self._replica.load_model(reader)
        self._replica.load_states(reader, self._local)

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes of this rank by category."""
        return self._replica.memory_bytes(self._local)
