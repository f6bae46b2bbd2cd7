"""PyTorch's own ``DistributedDataParallel`` behind our interface: the yardstick that everything else is held to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.parallel.base import Setup
from zeroshard.parallel.replica import Replica
from zeroshard.zero.ema import Ema
from zeroshard.zero.state import NamedShard, ShardReader


class Ddp:
    """Whole weights, gradients and optimizer state on every rank; gradients averaged while backward runs.

    In a world of one process without a process group it is the plain module.

    Raises:
        ValueError: several ranks without ``torch.distributed``, or a model on the meta device.
    """

    def __init__(self, setup: Setup) -> None:
        self._replica = Replica(setup, "ddp")
        self.model: nn.Module = self._replica.model
        self.optimizer = setup.optimizer_cls(setup.param_groups(self._replica.module), **setup.optimizer_kwargs)

    @property
    def ema(self) -> Ema | None:
        """The average of the weights, whole on every rank; None where none was asked for."""
        return self._replica.ema

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._replica.comm

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
        """An even share of every flattened tensor."""
        yield from self._replica.model_shards()
        for name, kind, tensor in self._replica.states(self.optimizer.state):
            yield from self._replica.even_share(name, kind, tensor)

    def named_param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups, ``params`` by their ordinary names."""
        return self._replica.param_groups(self.optimizer)

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read every tensor whole.

        Raises:
            ValueError: a tensor of the model was not saved, or has another shape.
        """
        self._replica.load_model(reader)
        self._replica.load_states(reader, self.optimizer)

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes of this rank by category."""
        return self._replica.memory_bytes(self.optimizer)
