"""PyTorch's own stage 1: ``DistributedDataParallel`` with ``torch.distributed.optim.ZeroRedundancyOptimizer``.

The parameters are divided among the ranks, without cutting any. Each rank updates its own ones and broadcasts them to
the others. Gradients are replicated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.optim.named_shards import NamedShard
from zeroshard.parallel.base import Setup
from zeroshard.parallel.ddp import DdpStrategy, require_group

with warnings.catch_warnings():  # the import compiles torch's functional optimizers by torch.jit, which is deprecated
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeroRedundancy(DdpStrategy):
    """Replicates weights and gradients on every rank; each parameter's optimizer state is on one rank only.

    Raises:
        ValueError: there is no process group (a group of one process is enough), the model is on the meta device, or
            the optimizer (LBFGS) needs all parameters at once.
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
            parameters_as_bucket_view=True,  # one broadcast for each rank instead of one for each parameter
            **setup.optimizer_kwargs,
        )
        self.optimizer = self._sharded

    @property
    def _local_optimizer(self) -> Optimizer:
        return self._sharded.optim

    def _state_pieces(self, name: str, kind: str, tensor: Tensor) -> Iterator[NamedShard]:
        yield NamedShard(name, kind, tuple(tensor.shape), (0, tensor.numel()), tensor.detach().reshape(-1))
