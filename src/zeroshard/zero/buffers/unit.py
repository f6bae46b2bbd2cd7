"""The groups and units of `Zero`: those of the core, whose parameters may move to other layouts and other stages.

[Note: Laid out anew]
    The right layout depends on the optimizer, which is made after the units. Groups begin with shards that may end in
    the middle of a tensor. If an optimizer needs whole tensors, or whole blocks of them (see `requirements`), the
    parameters that it is given move to new groups that keep these whole, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.plain import PLAIN, BufferFacts, Members
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.layout import ALIGNMENT, FlatLayout
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.reduction import GradientReducer
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.core.units import Group, Named, Unit, groups_of, kind_of
from zeroshard.zero.core.weights import WeightTransport
from zeroshard.zero.meta_models import Init
from zeroshard.zero.precision import Exemption, MixedPrecision

LaysOut = Callable[[Sequence[tuple[str, Sequence[int]]], int, bool, int], FlatLayout]
"""``(names and shapes, number of shards, whether these must have one length, parts of each) -> layout``."""


class FlatGroup(Group):
    """A group whose buffers can be made anew, in another layout or for another row of the stage table."""

    params: FlatParams
    place = ""  # before the categories of its master, reduced gradients and optimizer states, in accounts of memory

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        precision: MixedPrecision,
        init: Init | None,
        layout: FlatLayout | None = None,
        frozen: bool | None = None,
        members: Members = PLAIN,
    ) -> None:
        master_dtype, device = params[0][1].dtype, params[0][1].device
        if frozen is None:
            frozen = not any(param.requires_grad for _, param in params)
        self._again = partial(
            type(self), strategy=strategy, rank_groups=rank_groups, precision=precision, init=None, members=members
        )
        self._frozen = frozen
        formats = (precision.weights_format(master_dtype), precision.gradients_format(master_dtype))
        self._travels_packed = any(form is not None for form in formats)
        if layout is None:
            shapes = [(param_name, param.shape) for param_name, param in params]
            layout = FlatLayout.of(shapes, rank_groups.shard_group.world_size, ALIGNMENT, rank_groups.parts)
        facts = BufferFacts(name, layout, master_dtype, device, rank_groups, strategy, precision)
        weights = self._weights(facts, params, init, members.transport(facts), frozen=frozen)
        super().__init__(weights, self._gradients(facts, members.reducer(facts)))

    def _weights(
        self, facts: BufferFacts, params: Named, init: Init | None, transport: WeightTransport, *, frozen: bool
    ) -> FlatParams:
        settings = facts.strategy, facts.rank_groups, facts.precision, init, facts.layout
        return FlatParams(facts.name, params, *settings, transport, frozen=frozen)

    def _gradients(self, facts: BufferFacts, reducer: GradientReducer) -> Gradients:
        settings = facts.layout, facts.strategy, facts.rank_groups
        return Gradients(facts.name, *settings, **gradient_settings(facts), reducer=reducer)

    @property
    def shards_now(self) -> list[nn.Parameter]:
        """The pieces that the optimizer updates, whatever updates them now."""
        return self.shards

    @property
    def master_category(self) -> str:
        """Of the master, in accounts of memory: it is (a shard of) the weights if it has their dtype and place."""
        same = not self.place and self.params.master.dtype == self.params.full.dtype
        return "params" if same else self.category("master")

    def category(self, kind: str, value: Tensor | None = None) -> str:
        """Of its master, grads or optimizer states in accounts of memory; ``value``: one of the states."""
        return f"{self.place}{kind}"

    @property
    def keeps_tensors_whole(self) -> bool:
        """Whether the layout keeps tensors whole."""
        return self.params.layout.keeps_tensors_whole

    def keeps_blocks(self, block: int) -> bool:
        """Whether no shard cuts a block of so many elements of a parameter; `WHOLE`: whether none cuts a parameter."""
        return self.keeps_tensors_whole or self.params.layout.block % block == 0

    def lay_out_anew(self, chosen: set[nn.Parameter], name: str, lay_out: LaysOut) -> list[FlatGroup]:
        """Return the parameters in new groups: first one of those not chosen, if any, then one of the chosen.

        Collective. The values are those of the master weights; there must be no gradients.

        Args:
            chosen: the parameters of the group that need another layout.
            name: name of their new group, if it is not the only one.
            lay_out: makes the layout of the new group.
        """
        layout, named = self.params.layout, self._take_out()
        stay = [(name, param) for name, param in named if param not in chosen]
        leave = [(name, param) for name, param in named if param in chosen]
        shapes = [(name, param.shape) for name, param in leave]
        even = self._travels_packed or self.grads.reducer.needs_even_shards
        own = lay_out(shapes, layout.world_size, even, layout.parts)
        made = [self._again(self.params.name, stay, frozen=self._frozen)] if stay else []
        made.append(self._again(name if stay else self.params.name, leave, layout=own, frozen=self._frozen))
        for group in made:
            _continue_rounding(group, self)
        return made

    def restaged(self, strategy: ShardingStrategy) -> FlatGroup:
        """Return a new group of the same parameters and layout, by another row of the stage table. Collective.

        Values and gradients: as in `lay_out_anew`.
        """
        named = self._take_out()
        layout = self.params.layout
        made = self._again(self.params.name, named, strategy=strategy, layout=layout, frozen=self._frozen)
        _continue_rounding(made, self)
        return made

    def unfreeze(self) -> None:
        """Prepare for training parameters that were frozen from the start: [Note: Frozen] in `flat_params`."""
        self._frozen = False
        if self.params.widen_master():
            for piece, shard in zip(self.params.pieces, self.shards, strict=True):
                shard.data = self.params.piece_of_master(piece)

    def _take_out(self) -> list[tuple[str, nn.Parameter]]:
        """Move the parameters, unsharded and in their own dtype, out of the buffer; return them by name. Collective."""
        self.params.wait_for_unshard()
        self.params.show_as_current()
        layout = self.params.layout
        named = [(slot.name, param) for slot, param in zip(layout.slots, self.params.params, strict=True)]
        for (_, param), view in zip(named, layout.views(self.params.gather_master()), strict=True):
            param.data = view
        return named


def _continue_rounding(group: FlatGroup, before: FlatGroup) -> None:
    """Number stochastic roundings on as ``before``, a group of the same parameters in another layout or stage."""
    rounding, other = group.grads.reducer.rounding, before.grads.reducer.rounding
    if rounding is not None and other is not None:
        rounding.resume_at(other.next_step)


FlatUnit = Unit[FlatGroup]


def build_groups(
    name: str,
    params: list[tuple[str, nn.Parameter]],
    strategy: ShardingStrategy,
    rank_groups: RankGroups,
    precision: MixedPrecision,
    init: dict[nn.Parameter, Init],
    members: Members = PLAIN,
    kept: Collection[Tensor] = (),
) -> list[FlatGroup]:
    """Make the flat groups of a unit's parameters; functions in ``init`` draw the values of those that are its keys.

    ``kept``: parameters that stay in fp32.
    """

    def exemption(param: nn.Parameter) -> Exemption:
        return precision.exemption(param.shape, kept=param in kept)

    def kind(param: nn.Parameter) -> tuple[Hashable, ...]:
        return *kind_of(param), param in init, exemption(param), members.kind(param)

    def make(group_name: str, chosen: list[tuple[str, nn.Parameter]]) -> FlatGroup:
        first = chosen[0][1]
        policy = precision.exempt(exemption(first))
        make_group = members.group_class(chosen) or FlatGroup
        return make_group(group_name, chosen, strategy, rank_groups, policy, init.get(first), members=members)

    return groups_of(name, params, make, kind)


def gradient_settings(facts: BufferFacts) -> dict[str, Any]:
    """Where gradients are computed, and the dtypes in which they wait for the optimizer and are sent."""
    precision, dtype = facts.precision, facts.dtype
    reduced, sent = precision.reduced_dtype(dtype), precision.gradient_dtype(dtype)
    return {"device": facts.device, "reduced_dtype": reduced, "reduce_dtype": sent}


def gather_reduced(group: FlatGroup) -> Tensor:
    """Gather the reduced gradients of every shard: a new tensor ``[padded_numel]`` of their own dtype. Collective."""
    reduced = group.grads.reduced
    assert reduced is not None
    if not group.params.shard_optim:
        return reduced.to(group.grads.device, copy=True)
    flat = torch.empty(group.params.layout.padded_numel, dtype=reduced.dtype, device=group.grads.device)
    group.params.layout.gather(group.params.comm, flat, reduced.to(flat.device)).wait()
    return flat
