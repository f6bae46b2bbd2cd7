"""PyTorch's own stage 3: ``torch.distributed.fsdp.fully_shard`` on each unit, then on the model.

A parameter is a `DTensor` that is sharded by rows: of n rows on W ranks, rank r has ``ceil(n / W)`` rows from row
``r * ceil(n / W)`` on; the last ranks may have fewer or none. In the flattened parameter these rows are one interval,
so a checkpoint saves them like any other piece.

Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277; its second version is described in
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from zeroshard.comm import Communicator, TorchCommunicator
from zeroshard.comm.rendezvous import joined
from zeroshard.optim.classes.kept_states import alike
from zeroshard.optim.classes.saved_states import grouped_facts, kept_by
from zeroshard.optim.named_shards import (
    MODEL_KINDS,
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
from zeroshard.parallel.ddp import load_average, require_group
from zeroshard.zero.ema.average import EMA, Ema
from zeroshard.zero.meta_models import DrawsParts, loaded_later


class Fsdp2:
    """Shards weights, gradients and optimizer state by rows; a unit's weights are unsharded while it runs.

    Training starts from rank 0's parameters and buffers; `fully_shard` by itself does not broadcast them. A model on
    the meta device is sharded first and filled afterwards, one parameter at a time.

    Raises:
        ValueError: there is no process group (a group of one process is enough); some but not all parameters, or a
            buffer, are on the meta device; meta parameters without ``init``.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.comm is None and not joined(setup.device):
            raise ValueError("fsdp2 trains over torch.distributed's default group: call init_process_group first")
        self.comm: Communicator = setup.comm or TorchCommunicator()
        require_group(self.comm, "fsdp2")
        model = setup.model
        on_meta = any(param.is_meta for param in model.parameters())
        if on_meta and not all(param.is_meta for param in model.parameters()):
            raise ValueError(
                "some parameters are on the meta device and some are not: build all of them on one or the other"
            )
        if any(buffer.is_meta for buffer in model.buffers()):
            raise ValueError("a buffer is on the meta device; build buffers on a real one")
        if on_meta and setup.init is None:
            raise ValueError("init: the model has parameters on the meta device; give a function that fills them")
        device = setup.device or next(model.parameters()).device
        if device.type == "meta":
            device = (
                torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            )
        if not on_meta:
            for tensor in [*model.parameters(), *model.buffers()]:
                self._take_from_rank_zero(tensor, device)

        mesh = init_device_mesh(device.type, (self.comm.world_size,))
        self._reshard_after_forward = setup.reshard_after_forward
        units = set(setup.units)
        # Backward begins with the unit that ended forward: resharding it in between would cost another exposed gather.
        self._kept = {model, *list(setup.units)[-1:]}
        for module in reversed(list(model.modules())):  # inner modules first
            if module in units and module is not model:
                policy = _policy(setup.compute_dtype, cast_inputs=False)
                frees = setup.reshard_after_forward and module not in self._kept
                fully_shard(module, mesh=mesh, reshard_after_forward=frees, mp_policy=policy)
        # Backward needs the root's weights at once: None keeps them unsharded.
        fully_shard(
            model,
            mesh=mesh,
            reshard_after_forward=None if setup.reshard_after_forward else False,
            mp_policy=_policy(setup.compute_dtype, cast_inputs=True),
        )
        self.model: nn.Module = model
        self._master_is_copy = setup.compute_dtype != torch.float32
        if on_meta:
            kept = {name: buffer.to(device) for name, buffer in model.named_buffers() if not buffer.is_meta}
            model.to_empty(device=device)  # it also replaces buffers, whose values we copy back below
            for name, buffer in kept.items():
                model.get_buffer(name).copy_(buffer)
        # While a unit runs, its module has unsharded tensors in place of the DTensors, so we keep those here.
        self._params: dict[str, DTensor] = dict(model.named_parameters())  # ty: ignore[invalid-assignment]
        self._by_every_name: dict[str, DTensor] = dict(model.named_parameters(remove_duplicate=False))  # ty: ignore[invalid-assignment]
        if on_meta and setup.init is not None:
            self._fill(setup.init, device)
        self._make = partial(setup.optimizer_cls, **setup.optimizer_kwargs)
        self.optimizer = self._make(setup.param_groups(model))
        decay = setup.ema_decay
        self.ema: Ema | None = None if decay is None else Ema(self._params.values(), decay, self._masters_replaced)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate unsharded gradients on each rank, without communication."""
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Wrap one micro-batch; each reduces its gradients into the shard, as our stages 2 and 3 do."""
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the averaged gradients by their global norm, over all shards; collective."""
        norm = nn.utils.clip_grad_norm_(self._params.values(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def full_params(self) -> Generator[None]:
        """Return a context in which weights are unsharded, in the compute dtype; collective."""
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self._root.set_reshard_after_forward(False)
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.set_reshard_after_forward(self._reshard_after_forward and unit not in self._kept, recurse=False)
                unit.reshard()

    def state_dict(self) -> OrderedDict[str, Tensor]:
        """Return the model's unsharded weights on the CPU, with ordinary names; gathers one at a time. Collective."""
        whole: dict[int, Tensor] = {}
        for param in self._params.values():
            whole[id(param)] = param.full_tensor().detach().to("cpu", copy=True)
        state: OrderedDict[str, Tensor] = OrderedDict()
        for name, tensor in named_state(self.model).items():
            param = self._by_every_name.get(name)
            state[name] = tensor.detach().to("cpu", copy=True) if param is None else whole[id(param)]
        return state

    def tied_names(self) -> dict[str, str]:
        """Map each further name of a tied tensor to the name under which it is saved."""
        return tied_names({**named_state(self.model), **self._by_every_name})

    def named_shards(self) -> Iterator[NamedShard]:
        """Yield this rank's rows of every tensor; on rank 0 also scalars and buffers."""
        averages: Mapping[Tensor, Mapping[str, Any]] = {}
        if self.ema is not None:
            self.ema.require_away("named_shards")
            averages = self.ema.state
        for name, param in self._params.items():
            yield from self._rows_of(name, "param", param)
            states: dict[str, Any] = {**self.optimizer.state.get(param, {}), **averages.get(param, {})}
            for kind, value in states.items():
                if isinstance(value, DTensor):
                    yield from self._rows_of(name, kind, value)
                elif isinstance(value, Tensor | int | float) and self.comm.rank == 0:
                    yield _whole(name, kind, torch.as_tensor(value))
        if self.comm.rank == 0:
            for name, buffer in persistent_buffers(self.model).items():
                yield _whole(name, "buffer", buffer)

    def named_param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's param groups, ``params`` by their ordinary names."""
        return named_groups(self.optimizer, self._params)

    def load_param_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Apply the settings of ``saved`` (see `named_param_groups`) to the groups that have the same parameters."""
        restore_groups(self.optimizer, self._params, saved)

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read this rank's rows of every tensor; an average that was not saved starts from the weights.

        Raises:
            ValueError: a parameter was not saved, or has another shape; a state is neither a scalar nor of its
                parameter's shape.
        """
        if self.ema is not None:
            self.ema.require_away("load_named_shards")
        for name, param in self._params.items():
            for kind in ("param", EMA) if EMA in reader.kinds(name) else ("param",):
                require_shape(reader, name, kind, tuple(param.shape))
        groups = grouped_facts(self.optimizer, self._params)
        reader = as_kept(self._make, groups, reader, say=self.comm.rank == 0)
        kept = kept_by(self._make, groups, reader)
        states: dict[DTensor, dict[str, Any]] = {}
        with torch.no_grad():
            for name, param in self._params.items():
                param.to_local().copy_(self._read(reader, name, "param", param))
                states[param] = {
                    kind: self._read_state(reader, name, kind, shape, param, kept[name].get(kind))
                    for kind, shape in reader.kinds(name).items()
                    if kind not in MODEL_KINDS and name in kept
                }
            for name, buffer in persistent_buffers(self.model).items():
                if "buffer" in reader.kinds(name):
                    buffer.copy_(read_whole(reader, name, "buffer", tuple(buffer.shape)))
        self._masters_replaced()
        if self.ema is not None:
            load_average(self.ema, self._params.items(), reader, lambda n: self._read(reader, n, EMA, self._params[n]))
        members = [param for group in self.optimizer.param_groups for param in group["params"]]
        state = {index: states[param] for index, param in enumerate(members) if states[param]}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def memory_bytes(self) -> dict[str, int]:
        """Return this rank's resident bytes by category, including the padding of shards that have fewer rows.

        As in our stages, shards count as ``master`` if computation uses another dtype, else as ``params``. Unsharded
        weights that outlive a forward count as ``params``; those of a unit that is running are not counted.
        """
        params = list(self._params.values())
        whole = [param for param in self.model.parameters() if not isinstance(param, DTensor)]
        states = [state for per_param in self.optimizer.state.values() for state in per_param.values()]
        shards = _storage_bytes(params)
        total = {
            "params": _storage_bytes(whole) + (0 if self._master_is_copy else shards),
            "grads": _storage_bytes(param.grad for param in params if param.grad is not None),
            "master": shards if self._master_is_copy else 0,
            "optimizer": _storage_bytes(state for state in states if isinstance(state, Tensor)),
        }
        return total if self.ema is None else {**total, "ema": self.ema.num_bytes}

    # -- how it is built --------------------------------------------------------------------------------------

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def _masters_replaced(self) -> None:
        """Reshard all units: unsharded weights that an evaluation has left are out of date now."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def _take_from_rank_zero(self, tensor: Tensor, device: torch.device) -> None:
        value = tensor.detach().to(device).contiguous()
        self.comm.broadcast(value, src=0).wait()
        tensor.copy_(value)

    @torch.no_grad()
    def _fill(self, init: Callable[[str, Tensor], None], device: torch.device) -> None:
        """Fill this rank's rows; the values do not depend on the world size.

        If ``init`` cannot draw a part of a tensor, rank 0 draws the unsharded tensor and broadcasts it.
        """
        for name, param in self._params.items():
            if init is loaded_later:
                loaded_later(name, param.to_local())
                continue
            start, stop = self._interval(param)
            if isinstance(init, DrawsParts):
                init.part(name, param.to_local().view(-1), start, param.numel())
                continue
            whole = torch.empty(param.shape, dtype=param.dtype, device=device)
            if self.comm.rank == 0:
                init(name, whole)
            self._take_from_rank_zero(whole, device)
            param.to_local().copy_(whole.view(-1)[start:stop].view(param.to_local().shape))

    # -- rows -------------------------------------------------------------------------------------------------

    def _interval(self, tensor: DTensor) -> tuple[int, int]:
        """Return start and stop of this rank's shard in the flattened unsharded tensor."""
        if tensor.placements != (Shard(0),):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is placed as {tensor.placements}, not by rows")
        num_rows, row_numel = tensor.shape[0], prod(tensor.shape[1:])
        most = -(-num_rows // self.comm.world_size)
        first = min(self.comm.rank * most, num_rows)
        last = min(first + most, num_rows)
        assert tensor.to_local().numel() == (last - first) * row_numel
        return first * row_numel, last * row_numel

    def _rows_of(self, name: str, kind: str, tensor: DTensor) -> Iterator[NamedShard]:
        start, stop = self._interval(tensor)
        if start < stop or (self.comm.rank == 0 and tensor.numel() == 0):
            yield NamedShard(name, kind, tuple(tensor.shape), (start, stop), tensor.to_local().detach().reshape(-1))

    def _read(self, reader: ShardReader, name: str, kind: str, like: DTensor) -> Tensor:
        """Return this rank's rows of a saved tensor with the shape of ``like``, on the CPU."""
        return reader.read(name, kind, self._interval(like)).view(like.to_local().shape)

    def _read_state(
        self, reader: ShardReader, name: str, kind: str, shape: tuple[int, ...], param: DTensor, kept: Any
    ) -> Any:
        if shape == ():
            return alike(kept, reader.read(name, kind, (0, 1)).reshape(()))
        if shape != tuple(param.shape):
            raise ValueError(
                f"{kind} of {name}: a state of shape {shape} cannot be cut like its parameter, of {tuple(param.shape)}"
            )
        rows = alike(kept, self._read(reader, name, kind, param)).to(param.device)
        placed = (param.device_mesh, param.placements)
        return DTensor.from_local(rows, *placed, run_check=False, shape=param.shape, stride=param.stride())


def _policy(compute_dtype: torch.dtype, *, cast_inputs: bool) -> MixedPrecisionPolicy:
    """Return our policy: fp32 reductions; only the root casts its inputs, so that a block's fp32 tables stay exact."""
    if compute_dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs)


def _whole(name: str, kind: str, tensor: Tensor) -> NamedShard:
    return NamedShard(name, kind, tuple(tensor.shape), (0, tensor.numel()), tensor.detach().reshape(-1))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in locals_]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
