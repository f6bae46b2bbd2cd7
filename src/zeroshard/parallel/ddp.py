"""PyTorch's own ``DistributedDataParallel`` behind our interface: the baseline for all other strategies.

`DdpStrategy` is the common base of `ddp` and `zero1-torch`, which differ only in their optimizer. Every rank has the
unsharded model. PyTorch's `DistributedDataParallel` averages gradients while backward runs.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zeroshard.comm import Communicator, LocalCommunicator, TorchCommunicator
from zeroshard.comm.rendezvous import joined
from zeroshard.optim.classes.saved_states import grouped_facts, kept_by, read_states
from zeroshard.optim.named_shards import (
    NamedShard,
    ShardReader,
    named_groups,
    named_state,
    persistent_buffers,
    read_whole,
    require_shape,
    restore_groups,
    tied_names,
)
from zeroshard.optim.state_conversion import as_kept
from zeroshard.parallel.base import Setup
from zeroshard.zero.ema.average import EMA, Ema


class DdpStrategy:
    """Replicates weights and gradients on every rank. A subclass makes `optimizer`.

    Without a process group, which one rank alone does not need, the model is the plain module and not in DDP.

    Attributes:
        module: the module of the `Setup`, on its device.
        model: the module that the training loop calls: ``module`` in DDP, under autocast if compute is not fp32.
        optimizer: the optimizer that the training loop steps.
        comm: the communicator of the ranks that train together.
        ema: moving average of the unsharded weights, the same on every rank; None if none was asked for.

    Raises:
        ValueError: several ranks without ``torch.distributed``, or a model on the meta device.
    """

    optimizer: Optimizer

    def __init__(self, setup: Setup, strategy: str) -> None:
        if any(param.is_meta for param in setup.model.parameters()):
            raise ValueError(f"{strategy} keeps unsharded weights on each rank: build the model on a real device")
        grouped = joined(setup.device) if setup.comm is None else is_grouped()
        self.comm: Communicator = setup.comm or (TorchCommunicator() if grouped else LocalCommunicator())
        if self.comm.world_size > 1:
            require_group(self.comm, strategy)
        self._make: partial[Optimizer] = partial(setup.optimizer_cls, **setup.optimizer_kwargs)
        self.module = setup.model.to(setup.device) if setup.device else setup.model
        self._ddp = None
        if grouped:
            self._ddp = DistributedDataParallel(
                self.module, gradient_as_bucket_view=True, find_unused_parameters=setup.find_unused_parameters
            )
            if not setup.find_unused_parameters:
                _settle_buckets(self._ddp)
        self.model: nn.Module = self._ddp or self.module
        if setup.compute_dtype != torch.float32:
            self.model = _Autocast(self.model, setup.compute_dtype)
        self.ema: Ema | None = None if setup.ema_decay is None else Ema(self.module.parameters(), setup.ema_decay)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication."""
        return self._ddp.no_sync() if self._ddp else nullcontext()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Wrap one micro-batch; only the last of a step reduces gradients."""
        return nullcontext() if last else self.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the global norm. Gradients are the same on every rank, so this needs no communication."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def full_params(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: weights are always unsharded."""
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the model's weights on the CPU, with ordinary names."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self.module.state_dict().items()}

    def named_shards(self) -> Iterator[NamedShard]:
        """Yield this rank's even share of each flattened parameter, buffer and average, and its part of the states."""
        if self.ema is not None:
            self.ema.require_away("named_shards")
        for name, kind, tensor in self._tensors():
            yield from self.even_share(name, kind, tensor)
        if self.ema is not None:
            for name, kind, tensor in self.states(self.ema.state):
                yield from self.even_share(name, kind, tensor)
        for name, kind, tensor in self.states(self._local_optimizer.state):
            yield from self._state_pieces(name, kind, tensor)

    @property
    def _local_optimizer(self) -> Optimizer:
        """The optimizer that has this rank's states."""
        return self.optimizer

    def _state_pieces(self, name: str, kind: str, tensor: Tensor) -> Iterator[NamedShard]:
        """Yield the pieces that this rank saves of one of its optimizer states."""
        yield from self.even_share(name, kind, tensor)

    def even_share(self, name: str, kind: str, tensor: Tensor) -> Iterator[NamedShard]:
        """Yield this rank's slice of a tensor that all ranks have; nothing if the slice of a short tensor is empty."""
        numel, rank, world_size = tensor.numel(), self.comm.rank, self.comm.world_size
        start, stop = numel * rank // world_size, numel * (rank + 1) // world_size
        if start < stop or (rank == 0 and numel == 0):
            piece = tensor.detach().reshape(-1)[start:stop]
            yield NamedShard(name, kind, tuple(tensor.shape), (start, stop), piece)

    def states(self, state: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield ``(parameter's name, kind, tensor)`` for each entry of ``state``, of an optimizer or an average."""
        for name, param in self.module.named_parameters():
            per_param = state.get(param, {})
            for kind, value in per_param.items():
                if isinstance(value, Tensor | int | float):
                    yield name, kind, torch.as_tensor(value)

    def named_param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's param groups, ``params`` by their ordinary names."""
        return named_groups(self.optimizer, dict(self.module.named_parameters()))

    def load_param_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Apply the settings of ``saved`` (see `named_param_groups`) to the groups that have the same parameters."""
        restore_groups(self.optimizer, dict(self.module.named_parameters()), saved)

    def tied_names(self) -> dict[str, str]:
        """Map each further name of a tied tensor to the name under which it is saved."""
        return tied_names(named_state(self.module))

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read parameters, buffers, averages and this rank's optimizer states, unsharded.

        An average that was not saved starts from the weights.

        Raises:
            ValueError: a tensor of the model was not saved, or has another shape.
        """
        if self.ema is not None:
            self.ema.require_away("load_named_shards")
        for name, kind, tensor in self._tensors():
            require_shape(reader, name, kind, tuple(tensor.shape))
            if kind == "param" and EMA in reader.kinds(name):
                require_shape(reader, name, EMA, tuple(tensor.shape))
        groups = grouped_facts(self.optimizer, dict(self.module.named_parameters()))
        reader = as_kept(self._make, groups, reader, say=self.comm.rank == 0)
        kept = kept_by(self._make, groups, reader)
        with torch.no_grad():
            for name, kind, tensor in self._tensors():
                tensor.copy_(read_whole(reader, name, kind, tuple(tensor.shape)))
        if self.ema is not None:
            named = self.module.named_parameters()
            load_average(self.ema, named, reader, lambda n: read_whole(reader, n, EMA, tuple(reader.kinds(n)[EMA])))
        optimizer, names = self._local_optimizer, {id(param): name for name, param in self.module.named_parameters()}
        members = [param for group in optimizer.param_groups for param in group["params"]]
        state = {
            index: read_states(reader, name, kept[name], tuple(param.shape), None)
            for index, param in enumerate(members)
            if (name := names[id(param)]) in kept
        }
        # torch's own load_state_dict casts each state and moves it to the right device
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def memory_bytes(self) -> dict[str, int]:
        """Return this rank's resident bytes by category."""
        params = list(self.module.parameters())
        states = [state for per_param in self._local_optimizer.state.values() for state in per_param.values()]
        total = {
            "params": sum(param.nbytes for param in params),
            "grads": sum(param.grad.nbytes for param in params if param.grad is not None),
            "master": 0,
            "optimizer": sum(state.nbytes for state in states if isinstance(state, Tensor)),
        }
        return total if self.ema is None else {**total, "ema": self.ema.num_bytes}

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        yield from ((name, "param", param) for name, param in self.module.named_parameters())
        yield from ((name, "buffer", buffer) for name, buffer in persistent_buffers(self.module).items())


class Ddp(DdpStrategy):
    """Replicates weights, gradients and optimizer state on every rank; averages gradients while backward runs.

    Raises:
        ValueError: several ranks without ``torch.distributed``, or a model on the meta device.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "ddp")
        self.optimizer = setup.optimizer_cls(setup.param_groups(self.module), **setup.optimizer_kwargs)


def load_average(
    ema: Ema, named: Iterable[tuple[str, Tensor]], reader: ShardReader, read: Callable[[str], Tensor]
) -> None:
    """Load ``read(name)``, the saved average of each parameter; one that was not saved starts from the weights."""
    names = {id(param): name for name, param in named}
    ema.load(lambda param: read(names[id(param)]) if EMA in reader.kinds(names[id(param)]) else None)


def is_grouped() -> bool:
    """Return whether `torch.distributed` has a default group."""
    return dist.is_available() and dist.is_initialized()


def require_group(comm: Communicator, strategy: str) -> None:
    """Raise ValueError unless `torch.distributed`'s default group has as many ranks as ``comm``."""
    if not is_grouped():
        raise ValueError(f"{strategy} trains over torch.distributed's default group: call init_process_group first")
    if dist.get_world_size() != comm.world_size:
        raise ValueError(
            f"{strategy} trains over torch.distributed's default group, which has {dist.get_world_size()} ranks where "
            f"comm has {comm.world_size}: call init_process_group with as many, or take another strategy"
        )


class _Autocast(nn.Module):
    """Runs a module's forward under autocast: fp32 weights, compute in ``dtype``."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module under `torch.autocast` of its device."""
        device_type = next(self.module.parameters()).device.type
        with torch.autocast(device_type, dtype=self._dtype):
            return self.module(*args, **kwargs)


def _settle_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP rebuild its buckets now, in the reversed order of parameters; collective.

    DDP rebuilds its buckets once, after the first backward, by the order in which that produced gradients. So the first
    step of a process sums gradients in another order than all later steps. With three ranks or more this changes bits:
    a resumed run would differ from one that was not interrupted. Here a backward of zeros takes the place of that step.
    """
    forward = ddp.module.forward

    def touch_all() -> Tensor:
        touched = [param.view(-1)[:0].sum() for param in ddp.module.parameters() if param.requires_grad]
        return torch.stack([value.float() for value in touched]).sum()

    ddp.module.forward = touch_all
    try:
        with torch.enable_grad():
            ddp().backward()
    finally:
        ddp.module.forward = forward
    ddp.zero_grad(set_to_none=True)
