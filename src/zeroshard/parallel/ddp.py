"""PyTorch's own ``DistributedDataParallel`` behind our interface: the yardstick that everything else is held to.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard.comm import Communicator, LocalCommunicator, TorchCommunicator
from zeroshard.parallel.base import Setup
from zeroshard.zero.state import NamedShard, ShardReader


class Ddp:
    """Whole weights, gradients and optimizer state on every rank; gradients averaged while backward runs.

    In a world of one process without a process group it is the plain module.

    Raises:
        ValueError: several ranks without ``torch.distributed``, or a model on the meta device.
    """

    def __init__(self, setup: Setup) -> None:
        if any(param.is_meta for param in setup.model.parameters()):
            raise ValueError("ddp keeps whole weights on each rank: build the model on a real device")
        grouped = dist.is_available() and dist.is_initialized()
        self.comm: Communicator = setup.comm or (TorchCommunicator() if grouped else LocalCommunicator())
        if self.comm.world_size > 1 and not (grouped and dist.get_world_size() == self.comm.world_size):
            raise ValueError("ddp trains over torch.distributed's default group: call init_process_group first")
        self._module = setup.model.to(setup.device) if setup.device else setup.model
        self._ddp = DistributedDataParallel(self._module, gradient_as_bucket_view=True) if grouped else None
        self.model: nn.Module = self._ddp or self._module
        if setup.compute_dtype != torch.float32:
            self.model = _Autocast(self.model, setup.compute_dtype)
        self.optimizer = setup.optimizer_cls(setup.param_groups(self._module), **setup.optimizer_kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication."""
        return self._ddp.no_sync() if self._ddp else nullcontext()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Communicate in the last micro-batch of a step only."""
        return nullcontext() if last else self.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the global norm; gradients are the same on every rank, so nothing is sent."""
        return nn.utils.clip_grad_norm_(self._module.parameters(), max_norm, norm_type)

    def full_params(self) -> AbstractContextManager[None]:
        """Weights are always whole."""
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """The model's weights, copied to the CPU, with ordinary names."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self._module.state_dict().items()}

    def named_shards(self) -> Iterator[NamedShard]:
        """An even share of every flattened tensor."""
        for name, kind, tensor in self._whole_tensors():
            interval = _share(tensor.numel(), self.comm.rank, self.comm.world_size)
            if interval[0] < interval[1] or (self.comm.rank == 0 and tensor.numel() == 0):
                piece = tensor.detach().reshape(-1)[slice(*interval)]
                yield NamedShard(name, kind, tuple(tensor.shape), interval, piece)

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read every tensor whole.

        Raises:
            ValueError: a tensor of the model was not saved, or has another shape.
        """
        with torch.no_grad():
            for name, kind, tensor in self._model_tensors():
                tensor.copy_(_read_whole(reader, name, kind, tuple(tensor.shape)))
        names = {id(param): name for name, param in self._module.named_parameters()}
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for index, param in enumerate(params):
            saved = {kind: shape for kind, shape in reader.kinds(names[id(param)]).items() if kind != "param"}
            if saved:
                name = names[id(param)]
                state[index] = {kind: _read_whole(reader, name, kind, shape) for kind, shape in saved.items()}
        # torch's own loading casts and places each state as this optimizer wants it
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes of this rank by category."""
        params = list(self._module.parameters())
        states = [state for per_param in self.optimizer.state.values() for state in per_param.values()]
        return {
            "params": _num_bytes(params),
            "grads": _num_bytes(param.grad for param in params if param.grad is not None),
            "master": 0,
            "optimizer": _num_bytes(state for state in states if isinstance(state, Tensor)),
        }

    def _model_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        parameters = dict(self._module.named_parameters())
        yield from ((name, "param", param) for name, param in parameters.items())
        # state_dict has a tied parameter under each of its names, named_parameters once: leave out the others
        known = {id(param) for param in self._module.parameters()}
        for name, value in self._module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and id(value) not in known:
                yield name, "buffer", value

    def _whole_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        yield from self._model_tensors()
        for name, param in self._module.named_parameters():
            per_param: Mapping[str, Any] = self.optimizer.state.get(param, {})
            for kind, value in per_param.items():
                if isinstance(value, Tensor | int | float):
                    yield name, kind, torch.as_tensor(value)


class _Autocast(nn.Module):
    """Runs a module's forward under autocast: fp32 weights, compute in ``dtype``."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device_type = next(self.module.parameters()).device.type
        with torch.autocast(device_type, dtype=self._dtype):
            return self.module(*args, **kwargs)


def _share(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    return numel * rank // world_size, numel * (rank + 1) // world_size


def _read_whole(reader: ShardReader, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    saved = reader.kinds(name).get(kind)
    if saved != shape:
        has = "nothing" if saved is None else f"shape {list(saved)}"
        raise ValueError(f"{kind} of {name} has shape {list(shape)} here, the checkpoint has {has}")
    return reader.read(name, kind, (0, prod(shape))).view(shape)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
