"""`Runtime`: the passes of an engine with all that `Zero` attaches to them, and what else it does with their units.

Beside the plain parts of `Passes` it has several forwards before one backward, units inside of units, submodules that
are called outside of their unit, ``param.grad``, weights that users write to, and all weights unsharded for a block.

[Note: Parts]
    A model may call submodules of a unit without calling the unit. So every module that owns parameters has a hook. It
    does nothing while the unit itself runs; else it gathers the unit's weights and waits for them. No hook tells when
    backward has used such weights for the last time: they stay unsharded until the whole backward is over.

[Note: Several forwards]
    One backward may go through the graphs of several forwards: of a preference loss, of real and generated samples. The
    graph of a forward may also be dropped without a backward. When it is garbage collected differs from rank to rank,
    so no rank decides by itself: if several forwards are outstanding, ranks that shard weights agree first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.comm.agree import maxima
from zeroshard.comm.streams import Streams
from zeroshard.host.torch_internals import in_backward, in_transform
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit
from zeroshard.zero.core.forward import Forward, Forwards
from zeroshard.zero.core.hooks import NOT_IN_TRANSFORM, EngineHook
from zeroshard.zero.core.passes import Passes
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.core.weights import UNSHARDED
from zeroshard.zero.runtime.calls import Calls
from zeroshard.zero.runtime.grad_hooks import GradHooks
from zeroshard.zero.runtime.nested_units import InnerUnits
from zeroshard.zero.runtime.unsharded_weights import UnshardedWeights


class WrittenWeights:
    """Has ranks agree on which unsharded weights any of them has written to, and takes what all have.

    Sharded weights are written to in `full_params` alone, which compares them itself.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def _groups(self) -> list[FlatGroup]:
        return [group for group in self._runtime.groups() if not group.params.shard_params]

    def votes(self) -> list[bool]:
        """For each group, whether this rank has written to its weights."""
        return [group.params.has_writes for group in self._groups()]

    def agreed(self, votes: list[int]) -> None:
        """Compare those that any rank has written to. Collective, if there are any."""
        if any(votes):
            changed = [group for group, flag in zip(self._groups(), votes, strict=True) if flag]
            self._runtime.collectives.require_same_weights(changed)
            for group in changed:
                group.params.take_compared()


class Runtime(Passes[FlatGroup]):
    """The passes of an engine, with the parts of `Zero`.

    Attributes:
        complete_step: waits for updates of the last step that are under way.
        removed: whether `Zero.remove` has made the model an ordinary one again.
        outer_modules: those of the model that the engine may give methods of its own, as no unit contains them.
        collectives: is notified of what ranks may do differently.
        weights: keeps the weights of all units unsharded for a block, and has their reads watched.
    """

    def __init__(
        self,
        root: FlatUnit,
        units: list[FlatUnit],
        rank_groups: RankGroups,
        strategy: ShardingStrategy,
        prefetch: int,
    ) -> None:
        super().__init__(root, units, rank_groups, strategy, prefetch)
        self.collectives = Calls(rank_groups)
        self.forwards.several = _of_several
        self.nested = InnerUnits.of(units)
        self.voters.append(WrittenWeights(self))
        self.weights = UnshardedWeights(self)
        self.outer_modules = _outer_modules(root.module, units)
        self.removed = False
        self.complete_step: Callable[[], None] = lambda: None
        self._grad_hooks = self.shown = GradHooks(self)
        self._attach()

    def _attach(self) -> None:
        """Hook gradients and reads of stale weights; have groups issue their collectives on the engine's streams."""
        self._grad_hooks.attach(self.all_units())
        self.weights.watch_reads()
        self.use_streams()

    def streams_of(self, groups: Iterable[FlatGroup]) -> Streams:
        """The streams of the device that these groups have in common."""
        return self._streams[next((group.params.full.device for group in groups), torch.device("cpu"))]

    def agree_by(self, collectives: Calls) -> None:
        """From now on have ``collectives`` compare what ranks do; before other voters, whose answers it may refuse."""
        self.collectives = collectives
        self.note_gather = None if collectives.gathers is None else collectives.gathers.append
        self.voters.insert(0, collectives)

    def note_step(self) -> None:
        """Weights have changed by a step: expect no backward of the forwards that were run."""
        self.collectives.note_step()
        self.forget_calls()

    def attach_parts(self) -> list[Any]:
        """Hook the modules that own parameters, so that they may be called alone; returns handles: [Note: Parts].

        In compiled code such a hook is traced: inside of the unit it adds nothing to the graph, and outside of it the
        graph ends before `pre_forward_of_part`: [Note: Hooks inside of a unit] in `uncompiled`.
        """
        in_one_piece, handles = self.in_one_piece, list[Any]()
        if in_one_piece and not any(group.params.master_bytes for group in self.groups()):
            return handles  # weights that share the masters' memory are always current
        hooked = [self.root] if in_one_piece else self.all_units()
        homes = {param: unit for unit in self.all_units() for _, param, _, _ in unit.named_slots()}
        before = uncompiled(self.pre_forward_of_part)
        for module in self.root.module.modules():
            owners = dict.fromkeys(homes[param] for param in module.parameters(recurse=False) if param in homes)
            others = [unit for unit in owners if unit.module is not module or unit not in hooked]
            handles += [module.register_forward_pre_hook(_PartHook(before, unit)) for unit in others]
        return handles

    def pre_forward_of_part(self, unit: FlatUnit) -> None:
        """Unshard a unit whose submodule is called outside of the unit's forward: [Note: Parts]."""
        if self.in_one_piece:
            pass  # nothing to walk, and nothing is freed
        elif in_backward():
            self.pre_recompute(unit)
        else:
            if unit is not self.root:
                self.gather_first(self.reached(unit))
            if torch.is_grad_enabled():
                unit.keep_unsharded_after[self.forward.index] = self.forward
            elif unit is not self.root:
                self.called_by_parts.setdefault(unit)
        if not _is_current(unit):
            self.unshard(unit, wait=True)

    def note_writes(self) -> None:
        """Have ranks compare, at the next backward, what was written into unsharded weights and gradients before."""
        stay = [group for group in self.groups() if not group.params.shard_params]
        if stay and self.comm.world_size > 1:
            changed = [group for group in stay if group.params.has_writes or group.params.has_untraced_writes]
            self.collectives.note_writes(changed)
            self.collectives.note_grad_writes(group for group in stay if group.grads.has_writes)

    def take_changes(self, *, waits: bool = True) -> None:
        """Copy in-place changes of weights to the master weights: [Note: Changes in place] in `flat_params`."""
        for group in self.groups():
            group.params.take_changes(waits=waits)

    def require_reduced(self, what: str) -> None:
        """Apply what the user has assigned to ``param.grad``, then raise if gradients are unusable: `require_shown`."""
        self._grad_hooks.apply_assigned_grads()
        self.require_shown(what)

    def require_same_grads(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """Raise ValueError if ranks have assigned different gradients, ``(name, tensor)`` each. Collective."""
        self.collectives.require_same_grads(grads)

    def require_shown(self, what: str) -> None:
        """Raise RuntimeError if gradients are gone, incomplete, or not reduced, or lack a graph that is needed.

        ``what`` is the call or attribute that needs them; the message begins with it.
        """
        backward = self.backward
        if self.removed:
            raise RuntimeError(
                f"{what}: zero.remove() has detached the engine, so this has no effect on the model; "
                "make an optimizer over model.parameters()"
            )
        if backward is not None and backward.failed:
            raise RuntimeError(
                f"{what}: the last backward ended in an exception, and its gradients are incomplete; "
                "call zero_grad() and take the step again"
            )
        if backward is not None:
            raise RuntimeError(
                f"{what}: inside backward a gradient is this rank's own and not yet reduced over ranks; "
                "use it after backward()"
            )
        if self.keep_unsharded_for_graph and torch.is_grad_enabled() and what.endswith(".grad"):
            raise RuntimeError(
                f"{what}: it has no graph of its own after backward(create_graph=True); "
                "use torch.autograd.grad(), or read it under torch.no_grad()"
            )
        if self.unreduced:
            raise RuntimeError(
                f"{what}: gradients accumulated under no_sync() were never reduced; "
                "run the last backward of a step outside no_sync()"
            )

    def read_in_pass(self, params: FlatParams) -> bool:
        """Code of the user's reads sharded weights outside of their unit's call: in a forward or backward gather them.

        They are gathered as for a call of a part, on every rank alike. Returns whether a pass runs.
        """
        runs = bool(self.root.num_running_forwards) or in_backward()
        if runs:
            self.pre_forward_of_part(next(u for u in self.all_units() if any(g.params is params for g in u.groups)))
        return runs

    def clear_grads(self, params: set[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Clear the gradients of ``params`` (None: of all), or set them to zero if ``set_to_none`` is False."""
        if params is None and self.backward is not None and self.backward.failed:
            self._forget_backward()
        if self.local_grads is not None:
            self.local_grads.cleared()
        if params is not None and len(params) == sum(len(group.params.params) for group in self.groups()):
            params = None  # all of them: no need to look up each
        if set_to_none:
            self.drop_grads(params)
            self._grad_hooks.hide_grads(params)
            return
        for group in self.groups():
            chosen = {i for i, p in enumerate(group.params.params) if params is None or p in params}
            if chosen:
                group.grads.zero(chosen)

    def require_unpinned(self, what: str) -> None:
        """Raise RuntimeError inside `UnshardedWeights.pin`, which promises weights that are unsharded and current."""
        if self.pinned:
            raise RuntimeError(f"{what}: it changes weights; call it outside full_params()")

    def laid_out_anew(self, groups: Iterable[FlatGroup]) -> None:
        """Hook gradients anew, after the parameters of these groups were moved to other buffers."""
        # A graph from before the move holds the old buffers; the new version makes autograd raise in its backward.
        torch.autograd.graph.increment_version([param for group in groups for param in group.params.params])
        self._attach()

    def detach(self) -> None:
        """Remove the hooks on parameters, because the engine is being removed from its model."""
        self.removed = True
        self._grad_hooks.detach()
        self.weights.show_as_current()


def _of_several(forwards: Forwards, begun: Forward, comm: Communicator | None) -> list[Forward]:
    """Those of the outstanding forwards that a backward goes through; collective with ``comm``.

    [Note: Several forwards]. A rank votes for the place of ``begun`` (-1: it is not outstanding), then for each
    outstanding forward whether its graph is left. The maxima over ranks decide: those up to that place of which any
    rank has a graph.
    """
    outstanding = forwards.outstanding
    votes = [outstanding.index(begun.index) if begun.index in outstanding else -1]
    votes += [int(forwards.find(index) is not None) for index in outstanding]
    if comm is not None:
        votes = maxima(comm, votes, torch.int64)
    first, *flags = votes
    found = [index for place, index in enumerate(outstanding) if place <= first and flags[place]]
    return [forwards.find(index) or Forward(index) for index in reversed(found)] or [begun]


def _outer_modules(model: nn.Module, units: Sequence[FlatUnit]) -> list[nn.Module]:
    """The model, the modules of the units, and those outside of them that own parameters."""
    inside = {part for unit in units for part in unit.module.modules()}
    others = (part for part in model.modules() if part not in inside and [*part.parameters(recurse=False)])
    return list(dict.fromkeys([model, *(unit.module for unit in units), *others]))


def _is_current(unit: FlatUnit) -> bool:
    """Whether the unit's weights are unsharded and current now, and nothing is to be waited for."""
    return all(group.params.state is UNSHARDED for group in unit.groups)


class _PartHook(EngineHook):
    def __init__(self, pre_forward_of_part: Callable[[FlatUnit], None], unit: FlatUnit) -> None:
        self._pre_forward, self._unit = pre_forward_of_part, unit

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the forward of a part: report it, unless the unit's own forward is running."""
        if self._unit.entered:  # nearly always, and then its weights are unsharded
            return
        if not in_transform():
            self._pre_forward(self._unit)
        elif not _is_current(self._unit):
            raise RuntimeError(NOT_IN_TRANSFORM.format(self._unit.name))
