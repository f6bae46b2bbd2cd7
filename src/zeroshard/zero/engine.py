"""`Zero`: one engine for ZeRO stages 0-3.

It makes any `nn.Module` train, in place, as a row of the stage table says: parameters become views of flat buffers,
hooks gather weights and reduce gradients, and the optimizer updates only the pieces that this rank owns. The training
loop does not change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm import Communicator
from zeroshard.comm.backends.torch_dist import communicator
from zeroshard.comm.every_rank import by_every_rank
from zeroshard.comm.module_buffers import BufferSync, ModuleBuffers
from zeroshard.optim import named_shards
from zeroshard.optim.named_shards import NamedShard, ShardReader, named_group
from zeroshard.zero import arguments, construction, guards
from zeroshard.zero.buffers.holdings import Holding, holdings, resident_bytes
from zeroshard.zero.buffers.unit import FlatUnit
from zeroshard.zero.compat.module_methods import ModulePatches
from zeroshard.zero.core.engine import Engine, Parts
from zeroshard.zero.core.strategy import REPLICATE, ShardingStrategy, resolve_strategy
from zeroshard.zero.ema.average import Ema
from zeroshard.zero.ema.observer import attached
from zeroshard.zero.engine_optimizers import EngineOptimizers
from zeroshard.zero.frozen_formats.settings import frozen_format_of
from zeroshard.zero.kept_modules import cast_around
from zeroshard.zero.meta_models import Init, loaded_later
from zeroshard.zero.optimizers import adoption
from zeroshard.zero.optimizers.observer import ReproducibleSteps
from zeroshard.zero.optimizers.state_dict import unsharded_state
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.state import full_state, relayout
from zeroshard.zero.unit_choice import UnitChoice

if TYPE_CHECKING:
    from zeroshard.zero.frozen_formats.settings import FrozenFormat
    from zeroshard.zero.local_steps.outer_steps import OuterSteps
    from zeroshard.zero.local_steps.settings import LocalSteps
    from zeroshard.zero.offload.settings import Offload

Accumulate = Literal["local", "sharded"]
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


class Zero:
    """Data-parallel training of ``model`` with training state sharded as a row of `STAGES` says.

    Construction is collective: training starts from rank 0's parameters and buffers. The model is changed in place
    and stays the object to call; its parameters keep their identity, unless they were on the meta device.

    Args:
        model: any module. Parameters on the meta device are allocated here, unit by unit, and filled by ``init``.
        stage: 0, 1, 2 or 3, or a `ShardingStrategy`.
        units: submodules whose parameters are gathered and reduced together, in the order in which they run; each must
            be called as a module. A list of them, a class or its name (``"LlamaDecoderLayer"``), several of these, or
            a path (``"model.layers"``). ``"auto"``: a Hugging Face model's blocks, else the largest list of one class.
            None: the elements of the outermost `nn.ModuleList`s. The logger ``zeroshard.zero`` reports the choice.
        comm: the ranks that train together; None: those of `torch.distributed`, which is initialised here if torchrun,
            srun or MPI has started several processes (`zeroshard.comm.rendezvous`), else this process alone.
        precision: dtypes and wire formats; None: every parameter computes and is sent in its own dtype.
        init: ``init(name, tensor)`` fills in place each tensor that was on the meta device: buffers on every rank, and
            parameters, in their own dtype, on rank 0, which broadcasts them. If it has a method ``part``
            (`DrawsParts`), each rank draws its own shard. Before a load: `zeroshard.zero.loaded_later`.
        prefetch: how many units ahead weights are gathered at stage 3.
        accumulate: how gradients of several backwards before one step accumulate: ``"local"``, unsharded, reduced after
            the last; or ``"sharded"``, reduced after each. See `micro_batch`. None: as the `grads` column says.
        device: where meta parameters are allocated; None: the current CUDA device if there is one, else the CPU.
        shard_size: number of neighbouring ranks (a node's, say) over which training state is sharded; the world then
            has ``world_size / shard_size`` replicas. None: all ranks. See `zeroshard.zero.core.ranks`.
        buffers: how ranks synchronise buffers that a forward changes, such as running statistics, after each backward
            that reduces. ``"broadcast"``: every rank takes rank 0's, as DDP does. ``"keep"``: each rank keeps its own,
            and rank 0's are saved.
        local_steps: let the groups of ``shard_size`` ranks take local steps; see `zeroshard.zero.local_steps`.
        secondary_shard_size: as in `ShardingStrategy`, if ``stage`` is a number.
        reproducible: compute the same bits on 1, 2, 4, ... up to this many ranks, a power of two. Each step must add up
            this many micro-batches, or a multiple, over all ranks. See `zeroshard.zero.transport.exact_sums`.
        offload: which state leaves the device, for memory of the host or a file; see `zeroshard.zero.Offload`.
        frozen_format: keep the matrices of units that are frozen now in 4 or 8 bits, and decode a unit for each use:
            ``"nf4"``, ``"int8"``, ``"int4"``, ``"e4m3"``, or a `zeroshard.zero.FrozenFormat`. Checkpoints then have a
            digest of these in place of their values.

    Attributes:
        rank_groups: the ranks that shard together, and those that hold the same shard.
        local_steps: with local steps, the object whose `step` is called after each optimizer step; else None.

    Raises:
        ValueError: an unknown stage; a unit that is not the model's, or a name that occurs nowhere in it; a model that
            has an engine already; meta parameters without ``init``; a ``shard_size`` that does not divide the world, or
            at stage 0 without ``local_steps``; ``local_steps`` without a ``shard_size``; ``reproducible`` with a
            setting that rounds partial sums; ranks with different models or arguments.
        TypeError: ``model`` is not a module.

    Weights are unsharded and current inside the model's forward, its backward and `full_params`. Other methods of the
    model may call units, and modules outside of units, if every rank does so. Reading or writing a parameter between a
    step and the next forward gathers the weights first at stages 0, 1 and 2. At stage 3 the parameter reads as NaN and
    a warning says so: use ``full_params``. The results of a unit must reach the loss through its return value; a unit
    that leaves them in an attribute needs ``reshard_after_forward=False`` at stage 3.
    Source: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054; the vocabulary is FSDP2's.
    """

    _runtime: Runtime
    _optimizers: EngineOptimizers

    def __init__(
        self,
        model: nn.Module,
        stage: int | ShardingStrategy = 3,
        units: UnitChoice | None = None,
        comm: Communicator | None = None,
        precision: MixedPrecision | None = None,
        *,
        init: Init | None = None,
        prefetch: int = 1,
        accumulate: Accumulate | None = None,
        device: torch.device | str | None = None,
        shard_size: int | None = None,
        buffers: BufferSync = "broadcast",
        local_steps: LocalSteps | None = None,
        secondary_shard_size: int | None = None,
        reproducible: int | None = None,
        offload: Offload | None = None,
        frozen_format: str | FrozenFormat | None = None,
    ) -> None:
        comm = communicator(comm, device=arguments.device_of(model, device))
        checked: dict[str, Any] = {"reproducible": reproducible, "accumulate": accumulate}
        checked["local_steps"] = local_steps is not None
        with arguments.same_on_every_rank(comm) as compared:
            self.strategy = resolve_strategy(stage, secondary_shard_size)
            self.precision = precision or MixedPrecision()
            arguments.check_arguments(model, prefetch, accumulate, self.precision, buffers, local_steps)
            coded = frozen_format_of(frozen_format)
            others = {**checked, "offload": offload, "frozen_format": coded}
            how = prefetch, shard_size, buffers, others
            compared += arguments.described(model, self.strategy, self.precision, *how)
            away = arguments.placed(offload, self.strategy, comm, shard_size, local_steps, reproducible)
        self._accumulate = accumulate if reproducible is None else "sharded"
        self.rank_groups, rank_groups = arguments.ranks_of(comm, self.strategy, shard_size, self.precision, **checked)
        on_meta = [param for param in model.parameters() if param.is_meta]
        specs, make = construction.parts_of(
            model, units, self.strategy, rank_groups, self.precision, init, device, away, coded
        )
        self.local_steps: OuterSteps | None = None

        def passes(root: FlatUnit, others: list[FlatUnit]) -> Runtime:
            """Make what walks the steps, and attach what takes part in them."""
            self._runtime = Runtime(root, others, rank_groups, self.strategy, prefetch)
            changing = ModuleBuffers(model, rank_groups.world, buffers, may_change=reproducible is None)
            self._runtime.voters.append(changing)
            self._optimizers = EngineOptimizers(self._runtime, rank_groups)
            if local_steps is not None:
                self.local_steps, observer = local_steps.attach(self._runtime, self.rank_groups, buffers)
                self._optimizers.observers.append(observer)
            if away is not None:
                away.attach(self._runtime, self._optimizers.observers)
            if reproducible is not None:
                self._optimizers.observers.append(ReproducibleSteps(self._runtime, rank_groups))
            return self._runtime

        cast = self.precision.param_dtype if self.precision.cast_forward_inputs else None
        self._engine = Engine.of(model, Parts(specs, make, passes, rank_groups.world, named_shards.named_state, cast))
        self.model, self.comm = model, comm  # of all replicas, where those take local steps
        self._handles = [*self._engine.handles, *cast_around(model, self.precision)]
        self._handles += self._runtime.attach_parts()
        self._handles.append(ModulePatches(model, self._runtime, self._optimizers))
        adoption.replaced(on_meta)
        adoption.register_params(model.parameters(), self._optimizers)
        self._runtime.weights.refresh_in_wire_format()
        if self.local_steps is not None and init is not loaded_later:
            self.local_steps.begin_alike()
        self._handles.append(guards.install(self))

    def __repr__(self) -> str:
        groups = self._runtime.groups()
        size, where = sum(param.numel() for group in groups for param in group.params.params), self.comm
        ranks = f"rank {where.rank} of {where.world_size}"
        return f"Zero({self.strategy.name}, {ranks}, {len(self._runtime.units)} units, {size:,} parameters)"

    # -- the training step ------------------------------------------------------------------------------------

    @by_every_rank
    def optimizer(
        self,
        optimizer_cls: type[OptimizerT],
        params: Iterable[Any] | None = None,
        *,
        state_format: str = "fp32",
        **kwargs: Any,
    ) -> OptimizerT:
        """Make an ``optimizer_cls`` that updates this rank's pieces of the parameters.

        It is a real `torch.optim.Optimizer` of exactly that class, whose ``param_groups`` hold the model's parameters:
        schedulers, hooks, clipping, `torch.amp.GradScaler` and edits of settings work. ``state`` has `pieces` as keys.

        A class that works element by element, such as `torch.optim.AdamW`, is given 1-D slices. For a class that needs
        whole tensors, such as `torch.optim.Muon`, the parameters move to a layout in which each tensor lies on one
        rank. That is collective, and must happen before the first step of another optimizer of the same units. What a
        class needs is looked up in a table for torch's own classes, declared by the class (``zero_reach``), or else
        found by a probe on tiny tensors (`zeroshard.optim.classes.requirements`).

        Args:
            optimizer_cls: the class.
            params: parameters of the model, named or not, or group dicts of them; None: all.
            state_format: how states are kept between steps: "fp32" (as the class makes them), "bf16", or "int8" in
                blocks, for element-wise classes of torch, whose step then runs unit by unit in fp32: see
                `zeroshard.zero.state_formats.formats`.
            **kwargs: the class's arguments, ``fused`` and ``foreach`` included.

        Raises:
            TypeError: ``optimizer_cls`` is no optimizer class; ``params`` is a tensor or a set.
            ValueError: a class that works in no layout, or not with this format (the error says why); a parameter that
                is not the model's or is given twice; an empty list.
            RuntimeError: the layout must change, but gradients wait, or another optimizer has state in the old layout.
        """
        chosen = self.model.parameters() if params is None else params
        made = self._optimizers.optimizer(optimizer_cls, chosen, kwargs, state_format)
        assert isinstance(made, optimizer_cls)
        return made

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """In this block backwards accumulate unsharded gradients and do not reduce; reproducible steps still do."""
        before, self._runtime.sync = self._runtime.sync, self.rank_groups.reproducible is not None
        try:
            yield
        finally:
            self._runtime.sync = before

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Wrap the forward and backward of one micro-batch: gradients accumulate as `accumulate` says."""
        return nullcontext() if last or self.accumulate == "sharded" else self.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``. Collective.

        Args:
            max_norm: the bound; as in torch, gradients are multiplied by ``max_norm / (norm + 1e-6)`` if that is < 1.
            norm_type: p of the p-norm; a positive number or inf.
            error_if_nonfinite: as in torch, raise if the norm is NaN or inf, on every rank, before gradients are scaled
                or weights change; the host then waits for a GPU.

        Returns:
            0-dim: the norm before clipping, over all ranks and shards; tied parameters count once, frozen ones
            never; 0.0 without gradients. The same bits on each rank and at each stage.

        Raises:
            RuntimeError: gradients that accumulated under `no_sync` have not been reduced yet; the norm is NaN or inf.
            ValueError: ``norm_type`` is not positive.
        """
        norm_type = float(norm_type)  # "inf" too, as in torch
        if not norm_type > 0:
            raise ValueError(f"norm_type: {norm_type} is not a positive number; use 1, 2, 3 or inf")
        raises = bool(error_if_nonfinite)
        self._runtime.collectives.note_call(f"Zero.clip_grad_norm_({float(max_norm)}, {norm_type}, {raises})")
        self._runtime.require_reduced("clip_grad_norm_")
        check = partial(guards.require_finite, self._runtime, norm_type) if raises else Tensor.detach
        return self._engine.clip_grad_norm_(float(max_norm), norm_type, check)

    @by_every_rank
    def full_grads(self) -> dict[str, Tensor | None]:
        """Return each parameter's gradient, averaged over ranks, in its own shape; None without one. Collective.

        Call it between backward and step. It copies, on the parameters' device, in `MixedPrecision.reduced_dtype`.
        """
        self._runtime.require_reduced("full_grads")
        return full_state.full_grads(self.model, self._runtime)

    @by_every_rank
    def ema(self, decay: float = 0.999) -> Ema:
        """Make a moving average of the weights: sharded like the master weights, saved and loaded with them.

        Call ``update()`` on it after each step; inside ``with ema.weights():`` the module computes with the average,
        and `full_params` and `state_dict` show it.

        Args:
            decay: how much of the old average an update keeps, in [0, 1).

        Raises:
            ValueError: a decay outside [0, 1), or there is an average already.
        """
        return attached(self._runtime, self._optimizers.observers, decay)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._optimizers.clear_grads(None)

    @property
    def accumulate(self) -> Accumulate:
        """How gradients of several backwards before one step accumulate; see the argument of `Zero`."""
        return self._accumulate or ("local" if self.strategy.grads is REPLICATE else "sharded")

    @by_every_rank
    def restage(self, stage: int | ShardingStrategy) -> None:
        """Change the stage between steps, in memory and to the bit, with optimizer states and averages. Collective.

        Parameters, optimizers and schedulers stay the same objects, and the next step has the bits that an engine built
        at that stage would give. At the memory peak, one unit's state is unsharded.

        Raises:
            ValueError: an unknown stage, or one that the wire format, ``shard_size`` or an optimizer excludes.
            RuntimeError: inside `full_params` or `Ema.weights`, or while gradients wait for a step.
        """
        strategy = resolve_strategy(stage)
        arguments.check_change(strategy, self.precision, self.rank_groups, local_steps=self.local_steps is not None)
        if strategy.optim is not REPLICATE and self.rank_groups.shard_group.world_size > 1:
            self._optimizers.require_shardable()
        relayout.restage(self._runtime, strategy, self._optimizers.state_holders("restage"))
        self.strategy = strategy
        self._optimizers.hold_pieces()
        self._runtime.weights.refresh_in_wire_format()

    def resume_at(self, step: int) -> None:
        """Continue stochastic rounding, and new replicas, as after ``step`` steps; `checkpoint.load` calls it."""
        self._optimizers.resume_at(step)

    # -- unsharded state --------------------------------------------------------------------------------------

    @by_every_rank
    @contextmanager
    def full_params(self, *, write_back: bool = False) -> Generator[None]:
        """Unshard the module's parameters in this block, in the compute dtype. Collective.

        Args:
            write_back: keep values that the block writes, the same on every rank; if dropped, a warning says so once.
        """
        if write_back:
            self._optimizers.require_common("full_params(write_back=True)")
        with self._runtime.weights.pin():
            yield
            if write_back:
                self._runtime.collectives.require_same_weights(self._runtime.groups())
                with torch.no_grad():
                    for group in self._runtime.groups():
                        group.params.write_back()
                self._optimizers.weights_replaced()

    @by_every_rank
    def state_dict(self, *, rank0_only: bool = False) -> OrderedDict[str, Tensor]:
        """Return the model's full state dict on the CPU, with the weights' original names and dtypes. Collective.

        It equals ``model.state_dict()`` of the unsharded model, with buffers and tied names but without extra state
        (`nn.Module.get_extra_state`). One unit at a time is unsharded on the device. With ``rank0_only`` other ranks
        return an empty dict. Replicas with local steps return their own weights; inside `global_weights`, these.
        """
        return self._engine.state_dict(rank0_only=rank0_only)

    def named_state(self) -> dict[str, Tensor]:
        """Return every entry of ``model.state_dict()`` as the live tensor, without running its hooks."""
        return self._engine.named_state()

    @by_every_rank
    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> Any:
        """Load a full state dict, the same on every rank (replicas take the first's); optimizer states do not change.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as `nn.Module.load_state_dict`.

        Raises:
            RuntimeError: shapes that differ; with ``strict``, names missing or unexpected; inside `Ema.weights`.
        """
        self._optimizers.require_weights("load_state_dict")
        self._runtime.require_unpinned("load_state_dict")
        result = self._engine.load_state_dict(state, strict)
        self._optimizers.weights_replaced()
        return result

    @by_every_rank
    def optim_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Return the full state dict of an optimizer on the CPU, as the unsharded optimizer has it. Collective.

        Save it beside `state_dict`; ``optimizer.load_state_dict`` takes it, at any stage and world size, and so does
        the same class over the unsharded model. One group of parameters at a time is unsharded on the device.

        Args:
            optimizer: an optimizer of this engine; None: the only one.

        Raises:
            ValueError: it is not this engine's; it is None, and the engine has none or several.
            RuntimeError: inside `Ema.weights`.
        """
        self._optimizers.require_weights("optim_state_dict")
        piecewise = self._optimizers.known(optimizer, "optim_state_dict")
        members = piecewise.members
        groups = [group for group in self._runtime.groups() if not members.isdisjoint(group.params.params)]
        return unsharded_state(piecewise, groups)

    def unsaved_states(self) -> list[str]:
        """Return what of its optimizers' states a checkpoint cannot hold, in one line for each optimizer."""
        return list(self._optimizers.unsaved)

    def pieces(self, optimizer: Optimizer | None = None) -> list[nn.Parameter]:
        """Return the tensors that ``optimizer`` updates on this rank, which are the keys of its ``state``.

        They are 1-D views of the master weights, or whole tensors for a class that needs them. Arguments and errors are
        those of `optim_state_dict`. With ``offload`` it waits until their values and gradients are final.
        """
        piecewise = self._optimizers.known(optimizer, "pieces")
        piecewise.operands.complete()
        return [piece for pieces in piecewise.pieces for piece in pieces]

    def tied_names(self) -> dict[str, str]:
        """Map each further name of a tied tensor to the name under which it is saved."""
        return named_shards.tied_names(named_shards.named_state(self.model))

    def named_shards(self) -> Iterator[NamedShard]:
        """Yield what this rank writes to a checkpoint; one replica's ranks together cover each tensor exactly once.

        These are parameters (kind ``"param"``, the master weights), the state of every optimizer made here, the average
        (kind ``"ema"``) if there is one, and on rank 0 buffers.

        Raises:
            RuntimeError: inside `Ema.weights`.
        """
        yield from self._optimizers.named_shards(self.model)

    def named_param_groups(self) -> list[dict[str, Any]]:
        """Return every optimizer's param groups as JSON can hold them, with names of parameters; alike on all ranks."""
        return [named_group(group, names) for group, names in self._optimizers.param_groups(self.model)]

    def unsettled(self) -> list[str]:
        """Return calls and writes of this rank that ranks have not compared yet; a save compares them."""
        return list(self._runtime.collectives.calls)

    def load_param_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the settings that `named_param_groups` returned, to each group that has the same parameters."""
        self._optimizers.restore_settings(self.model, saved)

    @by_every_rank
    def load_named_shards(self, reader: ShardReader) -> None:
        """Load this rank's part of parameters, optimizer states, averages and buffers from ``reader``.

        An average that was not saved starts from the loaded weights.

        Raises:
            ValueError: a parameter that was not saved, or was saved with another shape.
            RuntimeError: inside `Ema.weights`.
        """
        self._optimizers.load_named_shards(self.model, reader)

    @property
    def units(self) -> list[FlatUnit]:
        """The root unit, then the others in order."""
        return self._runtime.all_units()

    def memory_bytes(self) -> dict[str, int]:
        """Return resident bytes of training state on this rank now: params, grads, master, optimizer; ema, outer.

        With ``offload`` also host_params, host_master, host_grads and host_optimizer: what left the device. With a file
        also disk_master, disk_optimizer (no memory) and host_slots, through which they go.

        ``master`` counts master weights whose dtype is not the compute dtype; a master of the compute dtype is (a
        shard of) the weights and counts as ``params``. ``outer``: with local steps, global weights and
        momentum.
        """
        return resident_bytes(self.units, self._optimizers.optimizers, self._optimizers.kept_tensors())

    def holdings(self) -> Iterator[Holding]:
        """Yield each tensor that is resident on this rank now, also in the middle of a step, with its category."""
        return holdings(self.units, self._optimizers.optimizers, self._optimizers.kept_tensors())

    @by_every_rank
    def remove(self) -> None:
        """Remove the engine: the module gets unsharded, current weights of its own, and no hooks. Collective.

        Weights have the dtype that they had before the engine was built. With local steps they are the global weights.
        """
        if self.local_steps is not None:
            self.local_steps.keep_global_weights()
        weights = construction.ordinary_weights(self._runtime.groups())
        for handle in self._handles:
            handle.remove()
        self._runtime.detach()
        for param, weight in weights.items():
            param.data = weight
            if param.grad_dtype is None:
                param.grad_dtype = weight.dtype
        adoption.unregister_params(self.model.parameters(), self._optimizers)
