"""PyTorch's own stage 1: ``DistributedDataParallel`` with ``torch.distributed.optim.ZeroRedundancyOptimizer``.

Each rank updates some of the parameters, whole ones, and broadcasts them to the others; gradients are whole
everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.parallel.base import Setup
from zeroshard.parallel.replica import Replica, require_group
from zeroshard.zero.state.named_shards import NamedShard

with warnings.catch_warnings():  # the package compiles optimizers that nobody asked for, in a way it deprecates
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeroRedundancy(Replica):
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
        super().__init__(setup, "zero1-torch")
        require_group(self.comm, "zero1-torch")
        self._sharded = ZeroRedundancyOptimizer(
            setup.param_groups(self.module),
            optimizer_class=setup.optimizer_cls,
            parameters_as_bucket_view=True,  # one broadcast a rank, not one a parameter
            **setup.optimizer_kwargs,
        )
        self.optimizer = self._sharded

    @property
    def _local_optimizer(self) -> Optimizer:
        return self._sharded.optim

    def _state_pieces(self, name: str, kind: str, tensor: Tensor) -> Iterator[NamedShard]:
        yield NamedShard(name, kind, tuple(tensor.shape), (0, tensor.numel()), tensor.detach().reshape(-1))
