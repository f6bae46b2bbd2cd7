"""`Zero`: one engine for ZeRO stages 0-3.

It reads a row of the stage table and makes any `nn.Module` train with it in place: parameters become views of flat
buffers, hooks move weights and gradients, and the optimizer is given the pieces that this rank owns. The training
loop stays as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm import Communicator, LocalCommunicator, TorchCommunicator, scope
from zeroshard.zero import full_state, shards
from zeroshard.zero import restage as restaging
from zeroshard.zero.ema import EMA, Ema
from zeroshard.zero.flat import Init
from zeroshard.zero.guard import Guard, has_engine
from zeroshard.zero.holdings import Holding, holdings
from zeroshard.zero.hooks import attach
from zeroshard.zero.levels import Levels, check_row
from zeroshard.zero.partition import UnitSpec, materialise, partition
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.runtime import Runtime
from zeroshard.zero.state import NamedShard, ShardReader, named_group
from zeroshard.zero.stepping import Stepping
from zeroshard.zero.strategy import REPLICATE, ShardingStrategy, resolve_strategy
from zeroshard.zero.unit import Unit, build_groups, memory_of

Accumulate = Literal["local", "sharded"]


class Zero:
    """Data-parallel training of ``model`` with training state sharded as a row of `STAGES` says.

    Construction is collective: training starts from rank 0's parameters and buffers. The model is changed in place
    and stays the object to call; its parameters keep their identity, unless they were on the meta device.

    Args:
        model: any module. Parameters on the meta device are made here, unit by unit, and filled by ``init``.
        stage: 0, 1, 2 or 3, or a `ShardingStrategy`.
        units: submodules whose parameters travel together, in the order in which they run; each must be called as a
            module. None: the elements of the outermost `nn.ModuleList`s.
        comm: among which ranks; None: `torch.distributed` if it is initialised, else one process.
        precision: None: every parameter computes and travels in its own dtype.
        init: ``init(name, tensor)`` fills a parameter that was on the meta device, in place, in its master's dtype.
        prefetch: how many units ahead weights are gathered at stage 3.
        accumulate: how several backwards before one step add up: ``"local"``, whole gradients on each rank and one
            reduction at the last, or ``"sharded"``, each reduced at once. None: as the row's `grads` column says.
            It directs `micro_batch`.
        device: where meta parameters are made; None: the current CUDA device if there is one, else the CPU.
        shard_size: over how many neighbouring ranks (a node's, say) training state is sharded; the world is as many
            replicas as that leaves. None: over all ranks. See `zeroshard.zero.levels`.

    Attributes:
        levels: the ranks that shard together, and those that hold the same shard.

    Raises:
        ValueError: an unknown stage; a unit that is not the model's; a model that has an engine already; meta
            parameters without ``init``; a ``shard_size`` that does not divide the world, or at stage 0.
        TypeError: ``model`` is not a module.

    Weights are whole and current inside the model's forward, its backward and `full_params`. Other methods of the model
    may call units, and modules outside of units, on every rank alike. What reads parameters otherwise, between a step
    and the next forward, reads old weights at stages 1 and 2 and NaN at stage 3. What a unit computes reaches the loss
    by what it returns; where it leaves as an attribute instead, stage 3 needs ``reshard_after_forward=False``.

    Source: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054; the vocabulary is FSDP2's.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int | ShardingStrategy = 3,
        units: Iterable[nn.Module] | None = None,
        comm: Communicator | None = None,
        precision: MixedPrecision | None = None,
        *,
        init: Init | None = None,
        prefetch: int = 1,
        accumulate: Accumulate | None = None,
        device: torch.device | str | None = None,
        shard_size: int | None = None,
    ) -> None:
        self.strategy = resolve_strategy(stage)
        if shard_size is not None:
            check_row(self.strategy)
        _check_arguments(model, prefetch, accumulate)
        if comm is None:
            comm = TorchCommunicator() if dist.is_available() and dist.is_initialized() else LocalCommunicator()
        self.model = model
        self.comm: Communicator = comm
        self.levels = Levels.of(comm, shard_size)
        self.precision = precision or MixedPrecision()
        self._accumulate = accumulate

        meta = materialise(model, _default_device(device)) if any(p.is_meta for p in model.parameters()) else set()
        if meta and init is None:
            raise ValueError("init: the model has parameters on the meta device; give a function that fills them")
        fill = dict.fromkeys(meta, init) if init is not None else {}
        root_spec, specs = partition(model, units)

        def build(spec: UnitSpec) -> Unit:
            groups = build_groups(spec.name, spec.params, self.strategy, self.levels, self.precision, fill)
            return Unit(spec.name, spec.module, groups)

        root = build(root_spec)
        self._runtime = Runtime(root, [build(spec) for spec in specs], self.levels, self.strategy, prefetch)
        self._broadcast_buffers()
        self._stepping = Stepping(self._runtime, self.levels)
        cast = self.precision.param_dtype if self.precision.cast_forward_inputs else None
        self._handles: list[Any] = []
        for unit in self._runtime.all_units():
            self._handles += attach(unit, self._runtime, cast if unit is root else None)
        self._guard = Guard(model, self._runtime, self._stepping.clear_grads)

    # -- the training step ------------------------------------------------------------------------------------

    def optimizer(
        self, optimizer_cls: type[Optimizer], params: Iterable[Any] | None = None, **kwargs: Any
    ) -> Optimizer:
        """An ``optimizer_cls`` over this rank's pieces of the parameters.

        It is a real `torch.optim.Optimizer` of exactly that class: schedulers, hooks and edits of ``param_groups``
        work on it, `zero_grad` and `add_param_group` speak of the model's parameters.

        What the class needs is found out on tiny tensors (`zeroshard.zero.contract`). One that works element by
        element, such as `torch.optim.AdamW`, is given 1-D slices. For one that looks at whole tensors, such as
        `torch.optim.Muon`, its parameters are laid out anew, so that each tensor lies on one rank: that is collective,
        and must happen before the first step of another optimizer of the same units.

        Args:
            optimizer_cls: the class.
            params: parameters of the model, named or not, or group dicts of them; None: all.
            **kwargs: for the class, ``fused`` and ``foreach`` too.

        Raises:
            TypeError: no optimizer class; ``params`` is a tensor or a set.
            ValueError: a class that no layout suits (named, with the reason); a parameter that is not the model's or
                is given twice; an empty list.
            RuntimeError: weights must be laid out anew, but gradients or another optimizer's state are in the way.
        """
        return self._stepping.optimizer(optimizer_cls, params, kwargs)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes in this block accumulate whole gradients on each rank and communicate none."""
        before, self._runtime.sync = self._runtime.sync, False
        try:
            yield
        finally:
            self._runtime.sync = before

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-batch of a step: accumulate as this engine is set to."""
        return nullcontext() if last or self.accumulate == "sharded" else self.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``. Collective.

        An optimizer that `SavesPasses` scales them as it reads them: until then its ``grad``s are as they were.

        Args:
            max_norm: the bound; as in torch, gradients are multiplied by ``max_norm / (norm + 1e-6)`` if that is < 1.
            norm_type: p of the p-norm; a positive number or inf.

        Returns:
            0-dim: the norm before clipping, over all ranks and shards; tied parameters count once, frozen ones
            never; 0.0 without gradients. The same bits on each rank and at each stage.

        Raises:
            RuntimeError: gradients under `no_sync` still wait for their reduction.
            ValueError: ``norm_type`` is not positive.
        """
        return self._stepping.clip_grad_norm_(max_norm, norm_type)

    def full_grads(self) -> dict[str, Tensor | None]:
        """Each parameter's gradient, averaged over ranks, in its own shape; None where there is none. Collective.

        Between backward and step. The tensors are copies on the parameters' device, in the masters' dtype.
        """
        self._runtime.require_reduced("full_grads")
        return full_state.full_grads(self.model, self._runtime)

    def ema(self, decay: float = 0.999) -> Ema:
        """A moving average of the weights, sharded like the masters, saved and loaded with the rest.

        Call ``update()`` on it after each step; inside ``with ema.weights():`` the module computes with it, and
        `full_params` and `state_dict` show it.

        Args:
            decay: how much of the old average an update keeps, in [0, 1).

        Raises:
            ValueError: a decay outside [0, 1), or there is an average already.
        """
        return self._stepping.make_ema(decay)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._stepping.clear_grads(None)

    @property
    def accumulate(self) -> Accumulate:
        """How several backwards before one step add up."""
        return self._accumulate or ("local" if self.strategy.grads is REPLICATE else "sharded")

    def restage(self, stage: int | ShardingStrategy) -> None:
        """Go on at another stage: between steps, in memory, to the bit, optimizer states and averages too. Collective.

        Parameters, optimizers and schedulers stay the same objects, and the next step is the one that an engine at
        that stage would have taken from the start. At most one unit's state is there twice.

        Raises:
            ValueError: an unknown stage, or stage 0 with a ``shard_size``.
            RuntimeError: inside `full_params` or `Ema.weights`, or while gradients wait for a step.
        """
        strategy = resolve_strategy(stage)
        if self.levels.shard is not self.comm:
            check_row(strategy)
        restaging.restage(self._runtime, strategy, self._stepping.state_holders("restage"))
        self.strategy = strategy
        self._stepping.hold_pieces()

    # -- whole state ------------------------------------------------------------------------------------------

    @contextmanager
    def full_params(self, *, write_back: bool = False) -> Generator[None]:
        """The module's parameters are whole and current in this block, in the dtype that computes. Collective.

        Args:
            write_back: whether what the block writes into them becomes the training state. Every rank must write
                the same values.
        """
        with self._runtime.pinned():
            yield
            if write_back:
                with torch.no_grad():
                    for group in self._runtime.groups():
                        group.params.write_back()

    def state_dict(self) -> OrderedDict[str, Tensor]:
        """The model's whole state on the CPU, by its ordinary names, in the masters' dtype. Collective.

        Equal to what ``model.state_dict()`` of the unsharded model would hold, buffers and tied names included, extra
        state (`nn.Module.get_extra_state`) not. One unit at a time is whole on the device.
        """
        return full_state.state_dict(self.model, self._runtime)

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> Any:
        """Take the model's whole state, given alike on every rank; the optimizer's is left as it is.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as `nn.Module.load_state_dict`.

        Raises:
            RuntimeError: shapes that differ; with ``strict``, names missing or unexpected; inside `Ema.weights`.
        """
        self._stepping.require_weights("load_state_dict")
        self._runtime.require_unpinned("load_state_dict")
        return full_state.load_state_dict(self.model, self._runtime, state, strict=strict)

    def tied_names(self) -> dict[str, str]:
        """Each further name of a tied tensor -> the name that it is saved under."""
        return full_state.tied_names(full_state.named_state(self.model))

    def named_shards(self) -> Iterator[NamedShard]:
        """What this rank writes to a checkpoint: over all ranks each tensor is tiled exactly once, by one replica.

        Parameters (kind ``"param"``, the masters), the state of every optimizer made here, the average (kind
        ``"ema"``) where there is one, and on rank 0 buffers.

        Raises:
            RuntimeError: inside `Ema.weights`.
        """
        yield from shards.named_shards(self.model, self._runtime, self._stepping.state_holders("named_shards"))

    def named_param_groups(self) -> list[dict[str, Any]]:
        """Every optimizer's param groups as JSON can hold them, with the parameters' ordinary names; on every rank."""
        names = {
            param: slot.name
            for group in self._runtime.groups()
            for param, slot in zip(group.params.params, group.params.layout.slots, strict=True)
        }
        return [
            named_group(group, [names[param] for param in chosen]) for group, chosen in self._stepping.param_groups()
        ]

    def load_named_shards(self, reader: ShardReader) -> None:
        """Take this rank's part of parameters, optimizer states, averages and buffers from ``reader``.

        An average that was not saved starts from the loaded weights.

        Raises:
            ValueError: a parameter that was not saved, or was saved with another shape.
            RuntimeError: inside `Ema.weights`.
        """
        stepping = self._stepping
        stepping.require_weights("load_named_shards")
        self._runtime.require_unpinned("load_named_shards")
        shards.load_named_shards(self.model, self._runtime, stepping.optimizers, reader)
        if stepping.ema is not None:
            stepping.ema.load(shards.reader_of(self._runtime, reader, EMA))

    # -- facts ------------------------------------------------------------------------------------------------

    @property
    def units(self) -> list[Unit]:
        """The root unit, then the others in order."""
        return self._runtime.all_units()

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes of training state on this rank, now: params, grads, master, optimizer; ema where there is one.

        ``master`` counts masters of another dtype than the weights that compute; a master of the same dtype is (a
        shard of) the weights and counts as ``params``.
        """
        total = memory_of(self._runtime.groups())
        total["optimizer"] = sum(
            value.numel() * value.element_size()
            for optimizer in self._stepping.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        if self._stepping.ema is not None:
            total["ema"] = self._stepping.ema.num_bytes
        return total

    def holdings(self) -> Iterator[Holding]:
        """Each tensor that the engine holds on this rank now, in the middle of a step too, and what it is for."""
        return holdings(self.units, self._stepping.optimizers, self._stepping.ema)

    # -- construction -----------------------------------------------------------------------------------------

    def _broadcast_buffers(self) -> None:
        with scope("buffers/start"):
            for _, buffer in self.model.named_buffers():
                if buffer.is_contiguous():
                    self.comm.broadcast(buffer, src=0).wait()
                else:
                    copy = buffer.contiguous()
                    self.comm.broadcast(copy, src=0).wait()
                    buffer.copy_(copy)

    def remove(self) -> None:
        """Give the module back as an ordinary one: whole, current weights of its own, no hooks. Collective.

        Weights have the masters' dtype, the one that they had before the engine came.
        """
        weights: dict[nn.Parameter, Tensor] = {}
        for group in self._runtime.groups():
            views = group.params.layout.views(group.params.gather_master())
            weights.update({p: view.clone() for p, view in zip(group.params.params, views, strict=True)})
        for handle in self._handles:
            handle.remove()
        self._runtime.detach()
        for param, weight in weights.items():
            param.data = weight
        self._guard.remove()


def _check_arguments(model: nn.Module, prefetch: int, accumulate: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not an nn.Module")
    if has_engine(model):
        raise ValueError("model: it, or a part of it, has an engine already; call remove() on that one first")
    if prefetch < 0:
        raise ValueError(f"prefetch: {prefetch} units ahead; give 0 or more")
    if accumulate not in (None, "local", "sharded"):
        raise ValueError(f"accumulate: {accumulate!r} is unknown; choose 'local' or 'sharded'")


def _default_device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
