"""A unit: parameters that are gathered, freed and reduced together, such as a block's; the root unit has all others.

A unit's parameters are grouped by dtype, device and whether they are trained, because a flat buffer has one of each
and frozen weights need neither gradients nor refreshing. Nearly every unit has one group.

[Note: Laid out anew]
    Which layout is right depends on the optimizer, and the optimizer comes after the units. Groups begin with shards
    that ignore tensors' borders; when an optimizer turns out to need whole tensors (see `requirements`), the parameters
    that it is given leave their groups for new ones that keep tensors whole, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from zeroshard.zero.buffers.flat_grads import FlatGrads
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.layout import FlatLayout, Piece
from zeroshard.zero.buffers.partition import Init
from zeroshard.zero.buffers.shards import gather_shards
from zeroshard.zero.levels import Levels
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.strategy import ShardingStrategy
from zeroshard.zero.streams import Streams


class FlatGroup:
    """One flat buffer of weights, its gradients, and what the optimizer sees of both.

    Attributes:
        shards: for each of ``params.pieces``, the `nn.Parameter` that the optimizer updates: a view of the master, 1-D
            unless the layout keeps tensors whole.
        awaited: whether some rank may have gradients that wait for a reduction; the same on every rank.
    """

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        strategy: ShardingStrategy,
        levels: Levels,
        precision: MixedPrecision,
        init: Init | None,
        layout: FlatLayout | None = None,
        frozen: bool | None = None,
    ) -> None:
        master_dtype, device = params[0][1].dtype, params[0][1].device
        if frozen is None:
            frozen = not any(param.requires_grad for _, param in params)
        self._again = partial(FlatGroup, strategy=strategy, levels=levels, precision=precision, init=None)
        self._frozen = frozen
        formats = (precision.weights_format(master_dtype), precision.gradients_format(master_dtype))
        self._travels_packed = any(form is not None for form in formats)
        self.params = FlatParams(name, params, strategy, levels, precision, init, layout, frozen=frozen)
        self.grads = FlatGrads(
            name,
            self.params.layout,
            strategy,
            levels,
            device=device,
            reduced_dtype=precision.reduced_dtype(master_dtype),
            reduce_dtype=precision.gradient_dtype(master_dtype),
            wire=precision.gradients_format(master_dtype),
            rounding_seed=precision.rounding_seed,
        )
        floating = master_dtype.is_floating_point or master_dtype.is_complex
        self.shards = [
            nn.Parameter(self.params.piece_of_master(piece), requires_grad=floating) for piece in self.params.pieces
        ]
        if self.grads.reduced_dtype != master_dtype:
            for shard in self.shards:
                shard.grad_dtype = None  # a gradient may be narrower than it
        self.awaited = False

    def use_streams(self, streams: Streams) -> None:
        """Gather and reduce on these from now on."""
        self.params.use_streams(streams)
        self.grads.use_streams(streams)

    @property
    def trained(self) -> bool:
        """Whether any parameter of the group takes gradients now."""
        return any(param.requires_grad for param in self.params.params)

    @property
    def whole(self) -> bool:
        """Whether the layout keeps tensors whole."""
        return self.params.layout.longest is not None

    def keep_whole(self, chosen: set[nn.Parameter], name: str, loads: list[int]) -> list[FlatGroup]:
        """The same parameters in new groups: first those that stay as they are laid out, if any, then the chosen.

        Collective. Values are the masters'; gradients there must be none.

        Args:
            chosen: some of the group's parameters, whose tensors are to be whole.
            name: of their group, where others stay behind.
            loads: elements of whole tensors that each rank owns; what it gets here is added.
        """
        layout, named = self.params.layout, self._take_out()
        stay = [(name, param) for name, param in named if param not in chosen]
        leave = [(name, param) for name, param in named if param in chosen]
        shapes = [(name, param.shape) for name, param in leave]
        even = self.grads.replicas.world_size > 1 or self._travels_packed or self.grads.leaf_sum is not None
        own = FlatLayout.whole(shapes, layout.world_size, loads, even=even, parts=layout.parts)
        own.add_loads(loads)
        made = [self._again(self.params.name, stay, frozen=self._frozen)] if stay else []
        made.append(self._again(name if stay else self.params.name, leave, layout=own, frozen=self._frozen))
        for group in made:
            group.grads.rounding.resume_at(self.grads.rounding.next_step)
        return made

    def restaged(self, strategy: ShardingStrategy) -> FlatGroup:
        """The same parameters, laid out alike, by another row of the table. Collective; as in `keep_whole`."""
        named = self._take_out()
        layout = self.params.layout
        made = self._again(self.params.name, named, strategy=strategy, layout=layout, frozen=self._frozen)
        made.grads.rounding = self.grads.rounding
        if self.params.common is not None:
            made.params.common = self.params.common
        return made

    def thaw(self) -> None:
        """Parameters that were frozen from the start are trained now: [Note: Frozen] in `flat_params`."""
        self._frozen = False
        if self.params.thaw():
            for piece, shard in zip(self.params.pieces, self.shards, strict=True):
                shard.data = self.params.piece_of_master(piece)

    def _take_out(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters with their names, whole and in the master's dtype, as before there were groups. Collective."""
        self.params.wait()
        self.params.show_as_current()
        layout = self.params.layout
        named = [(slot.name, param) for slot, param in zip(layout.slots, self.params.params, strict=True)]
        for (_, param), view in zip(named, layout.views(self.params.gather_master()), strict=True):
            param.data = view
        return named

    def expose_grads(self) -> None:
        """Show the optimizer the reduced gradients; None for a parameter that had none on any rank."""
        used = self.grads.used
        for piece, shard in zip(self.params.pieces, self.shards, strict=True):
            shard.grad = self.grads.piece(piece) if used[piece.slot] else None

    def shards_of(self, slot: int) -> list[tuple[Piece, nn.Parameter]]:
        """The optimizer's pieces of one parameter that this rank holds."""
        pairs = zip(self.params.pieces, self.shards, strict=True)
        return [(piece, shard) for piece, shard in pairs if piece.slot == slot]


class Unit:
    """One or more `FlatGroup`, gathered, freed and reduced as one.

    Attributes:
        name: the module's name in the model; ``"root"`` for what is left.
        module: whose forward uses the weights.
        read_in_backward: whether its backward uses them too; where it does not, they are not gathered again for it.
        inside: how many calls of it are in forward now; recomputation does not count.
        calls: forward calls whose backward has not begun, by the number of the model's forward.
        active: calls in backward now.
        held: whether its weights stay until the last of several calls in one forward is over.
        kept: the forwards after which its weights stay until backward is over, because nobody will tell when they are
            needed; by their numbers.
    """

    def __init__(self, name: str, module: nn.Module, groups: list[FlatGroup], *, read_in_backward: bool = True) -> None:
        self.name = name
        self.module = module
        self.read_in_backward = read_in_backward
        self.groups = groups
        self.inside = 0
        self.calls: dict[int, int] = {}
        self.active = 0
        self.held = False
        self.kept: dict[int, object] = {}

    def forget_calls(self, forward_runs: Iterable[int] | None = None) -> None:
        """Expect no backward of these forwards; None: of any forward."""
        if forward_runs is None:
            self.calls, self.kept = {}, {}
            return
        for index in forward_runs:
            self.calls.pop(index, None)
            self.kept.pop(index, None)

    def gather(self, *, again: bool = False) -> bool:
        """Issue the gather of the weights (``again``: even of current ones); returns whether anything is sent."""
        before = self.on_its_way
        for group in self.groups:
            group.params.gather(again=again)
        return self.on_its_way and not before

    def wait(self) -> None:
        """Finish what `gather` started."""
        for group in self.groups:
            group.params.wait()

    def unshard(self) -> None:
        """Gather the weights and wait for them."""
        self.gather()
        self.wait()

    @property
    def on_its_way(self) -> bool:
        """Whether weights are being gathered that nobody has waited for."""
        return any(group.params.on_its_way for group in self.groups)

    def reshard(self) -> None:
        """Free full weights, where they are sharded."""
        for group in self.groups:
            group.params.release()

    def reduce_grads(self) -> None:
        """Start to reduce what has accumulated on this rank. Collective: every rank's trained groups, used or not."""
        for group in self.trained_groups():
            group.grads.reduce()

    def reduce_across(self) -> None:
        """Start to add up what replicas have reduced. Collective, in the order of `reduce_grads`."""
        for group in self.groups:
            group.grads.reduce_across()

    @property
    def crossing(self) -> bool:
        """Whether `reduce_across` has more to issue."""
        return any(group.grads.crossing for group in self.groups)

    def settle(self) -> None:
        """Finish the reductions under way."""
        for group in self.groups:
            group.grads.settle()

    def trained_groups(self) -> list[FlatGroup]:
        """Groups that take gradients now, or did in a backward of this step that reduced none."""
        return [group for group in self.groups if group.trained or group.awaited]

    def keep_whole(self, chosen: set[nn.Parameter], loads: list[int]) -> None:
        """Move the chosen parameters to groups that keep tensors whole. Collective; see `FlatGroup.keep_whole`."""
        for index, group in enumerate(list(self.groups)):
            moving = chosen.intersection(group.params.params)
            if moving and not group.whole:
                first, *second = group.keep_whole(moving, f"{self.name}#{len(self.groups)}", loads)
                self.groups[index] = first
                self.groups += second

    @property
    def stale(self) -> bool:
        """Whether any weights are older than their masters."""
        return any(group.params.stale for group in self.groups)

    @property
    def readable(self) -> bool:
        """Whether the module's parameters are unsharded and current now, or will be once `wait` has returned."""
        return all(group.params.whole and not group.params.stale for group in self.groups)

    def named_slots(self) -> Iterator[tuple[str, nn.Parameter, FlatGroup, int]]:
        """``(name, parameter, group, slot)`` of each parameter."""
        for group in self.groups:
            for index, (slot, param) in enumerate(zip(group.params.layout.slots, group.params.params, strict=True)):
                yield slot.name, param, group, index


def build_groups(
    name: str,
    params: list[tuple[str, nn.Parameter]],
    strategy: ShardingStrategy,
    levels: Levels,
    precision: MixedPrecision,
    init: dict[nn.Parameter, Init],
) -> list[FlatGroup]:
    """Group a unit's parameters and make them flat; those in ``init`` get their values from it, not from memory."""
    by_kind: dict[tuple[torch.dtype, torch.device, bool, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for param_name, param in params:
        exact = precision.is_exact(param.shape)
        kind = (param.dtype, param.device, param.requires_grad, param in init, exact)
        by_kind.setdefault(kind, []).append((param_name, param))
    groups = []
    for index, ((*_, exact), members) in enumerate(by_kind.items()):
        group_name = name if index == 0 else f"{name}#{index}"
        policy = precision.exactly() if exact else precision
        groups.append(FlatGroup(group_name, members, strategy, levels, policy, init.get(members[0][1])))
    return groups


def memory_of(groups: Iterator[FlatGroup]) -> dict[str, int]:
    """Resident bytes of weights, gradients and masters; a master that is (a shard of) the weights counts as weights."""
    total = {"params": 0, "grads": 0, "master": 0}
    for group in groups:
        params = group.params
        total["params"] += params.full_bytes
        total["params"] += params.node_copy.shard.nbytes
        total["params"] += 0 if params.common is None else params.common.shard.nbytes
        same_dtype = params.master.dtype == params.full.dtype
        total["params" if same_dtype else "master"] += params.master_bytes
        total["grads"] += group.grads.resident_bytes
    return total


def reduced_whole(group: FlatGroup) -> Tensor:
    """``[padded_numel]``: the reduced gradients of every shard, in the dtype they wait in. Collective; a new tensor."""
    reduced = group.grads.reduced
    assert reduced is not None
    if not group.params.shard_optim:
        return reduced.clone()
    flat = torch.empty(group.params.layout.padded_numel, dtype=reduced.dtype, device=reduced.device)
    gather_shards(group.params.comm, group.params.layout, flat, reduced).wait()
    return flat
