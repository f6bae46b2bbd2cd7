"""PyTorch's own ``DistributedDataParallel`` behind our interface: the baseline for all other strategies."""

from __future__ import annotations

from zeroshard.parallel.base import Setup
from zeroshard.parallel.ddp_strategy import DdpStrategy


class Ddp(DdpStrategy):
    """Replicates weights, gradients and optimizer state on every rank; averages gradients while backward runs.

    Raises:
        ValueError: several ranks without ``torch.distributed``, or a model on the meta device.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "ddp")
        self.optimizer = setup.optimizer_cls(setup.param_groups(self.module), **setup.optimizer_kwargs)
