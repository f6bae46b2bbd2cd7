"""`Engine`: ZeRO stages 0-3 for a module, by the files of this folder alone.

`zeroshard.Zero` makes it of its `Parts`, and attaches the rest: ``param.grad``, users' optimizers, refusals, ...

The path of a step::

    model(...)      hooks -> Passes.unshard -> Weights.unshard             gathered ahead of use, freed after it
    backward()      hooks -> Gradients.accumulate; passes -> schedule -> Unit.reduce -> Gradients.reduce
    step()          the class updates this rank's pieces of the masters -> PieceOptimizer.after_step -> mark_stale
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator, labelled
from zeroshard.comm.tensor_broadcast import as_bytes, put_bytes
from zeroshard.host.torch_internals import IncompatibleKeys
from zeroshard.zero.core.gradients import clip_, global_norm
from zeroshard.zero.core.hooks import UnitHooks, take_gradient
from zeroshard.zero.core.passes import Passes
from zeroshard.zero.core.units import AnyGroup, Unit, UnitSpec

Check = Callable[[Tensor], Tensor]  # returns a norm, or raises


@dataclass(frozen=True)
class Parts(Generic[AnyGroup]):
    """What of an engine can be exchanged: `Engine.of` puts it together.

    Attributes:
        specs: what becomes a unit, the root first.
        groups: makes the flat groups of a unit, with their transport, reducer, layout and initial values.
        passes: makes what hears of forwards and backwards, of the root unit and the others; buffers have their values.
        world: all ranks.
        named_state: every entry of a model's state dict as the live tensor.
        cast: the dtype that floating-point inputs of the model are cast to; None: they are not.
    """

    specs: Sequence[UnitSpec]
    groups: Callable[[UnitSpec], list[AnyGroup]]
    passes: Callable[[Unit[AnyGroup], list[Unit[AnyGroup]]], Passes[AnyGroup]]
    world: Communicator
    named_state: Callable[[nn.Module], dict[str, Tensor]]
    cast: torch.dtype | None = None


class Engine:
    """Trains ``model``, in place, with training state sharded over ranks as its parts say: see `Engine.of`.

    Attributes:
        model, comm: the module, which is called once before each backward; the ranks that train it together.
        passes: forward and backward, and the units; while its ``sync`` is False, backwards accumulate alone.
        handles: of the hooks of the units' modules, which can be removed by them.
    """

    def __init__(self, model: nn.Module, passes: Passes[Any], handles: list[Any], parts: Parts[Any]) -> None:
        self.model, self.comm, self.passes, self.handles = model, passes.comm, passes, handles
        self.named_state = partial(parts.named_state, model)

    @classmethod
    def of(cls, model: nn.Module, parts: Parts[AnyGroup]) -> Engine:
        """Move the parameters to flat buffers, unit by unit, and hook the modules: it trains from rank 0's values.

        Collective. What parameters show as ``grad`` is `Passes.shown`'s; without it they show None.
        """
        root, *others = [
            Unit(spec.name, spec.module, parts.groups(spec), read_in_backward=spec.read_in_backward)
            for spec in parts.specs
        ]
        with labelled("buffers/start"):
            for buffer in model.buffers():
                content = as_bytes(buffer)
                parts.world.broadcast(content, src=0).wait()
                put_bytes(buffer, content)
        passes = parts.passes(root, others)
        handles = UnitHooks(root, passes, parts.cast).attach()
        for unit in () if passes.in_one_piece else others:
            handles += UnitHooks(unit, passes).attach()
        if passes.shown is None:
            for _, param, group, slot in (each for unit in (root, *others) for each in unit.named_slots()):
                if param.requires_grad:
                    take_gradient(passes, group, slot, param)
        return cls(model, passes, handles, parts)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, check: Check = Tensor.detach) -> Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``; return the norm before it. Collective.

        0-dim, of float64 if a parameter is. The same bits on each rank and at each stage. ``check`` may refuse it.
        """
        groups = [group for group in self.passes.groups() if any(group.grads.used)]
        buffers = [group.grads for group in groups]
        device = next((each.device for each in buffers), torch.device("cpu"))
        norm = check(global_norm(buffers, self.passes.rank_groups.shard_group, norm_type, device))
        clip_(buffers, norm, max_norm)
        return norm if any(group.params.dtype == torch.float64 for group in groups) else norm.to(torch.float32)

    def state_dict(self, *, rank0_only: bool = False) -> OrderedDict[str, Tensor]:
        """Return the model's state dict with unsharded master weights, on the CPU. Collective.

        One group at a time is unsharded on the device. With ``rank0_only`` other ranks return an empty dict.
        """
        full: dict[Tensor, Tensor] = {}
        keep = self.comm.rank == 0 or not rank0_only
        for params in (group.params for group in self.passes.groups()):
            master = params.gather_master()
            if keep:
                views = params.layout.views(master.cpu())
                full.update((param, view.clone()) for param, view in zip(params.params, views, strict=True))
        # A tied parameter is one tensor under two names, here as in the module.
        named = self.named_state().items() if keep else ()
        return OrderedDict((name, full[t] if t in full else t.detach().cpu().clone()) for name, t in named)

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> Any:
        """Load a full state dict, the same on every rank; optimizer states do not change.

        Returns and raises what `nn.Module.load_state_dict` does: RuntimeError for shapes that differ and, with
        ``strict``, for names that are missing or unexpected.
        """
        own = self.named_state()
        given = {tensor: state[name] for name, tensor in own.items() if name in state}
        missing, unexpected = [name for name in own if name not in state], [name for name in state if name not in own]
        wrong = [
            f"size mismatch for {name}: {tuple(state[name].shape)} in the state, {tuple(tensor.shape)} in the model"
            for name, tensor in own.items()
            if name in state and state[name].shape != tensor.shape
        ]
        if strict:
            wrong += [f"missing key: {name}" for name in missing] + [f"unexpected key: {name}" for name in unexpected]
        if wrong:
            raise RuntimeError("state_dict does not fit the model: " + "; ".join(wrong))
        with torch.no_grad():
            for params in (group.params for group in self.passes.groups()):
                params.take_values(given)
                torch.autograd.graph.increment_version(params.params)  # a backward through an older graph must raise
                params.mark_stale()
                for param in params.params:
                    given.pop(param, None)
            for tensor, source in given.items():
                tensor.copy_(source)
        return IncompatibleKeys(missing, unexpected)
