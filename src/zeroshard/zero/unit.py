"""Parameters that travel together: one transformer block, say, or (the root unit) all that no other unit holds.

A unit's parameters are grouped by dtype, device and whether they are trained, because a flat buffer has one of each
and frozen weights need neither gradients nor refreshing. Nearly every unit has one group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.zero.flat import FlatParams, Init
from zeroshard.zero.layout import Piece
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.reduction import FlatGrads
from zeroshard.zero.strategy import ShardingStrategy


class FlatGroup:
    """One flat buffer of weights, its gradients, and what the optimizer sees of both.

    Attributes:
        shards: for each of ``params.pieces``, the 1-D `nn.Parameter` that the optimizer updates: a view of the master.
        awaited: whether some rank may have gradients that wait for a reduction; the same on every rank.
    """

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        strategy: ShardingStrategy,
        comm: Communicator,
        precision: MixedPrecision,
        init: Init | None,
    ) -> None:
        master_dtype, device = params[0][1].dtype, params[0][1].device
        self.params = FlatParams(name, params, strategy, comm, precision, init)
        self.grads = FlatGrads(
            name,
            self.params.layout,
            strategy,
            comm,
            device=device,
            master_dtype=master_dtype,
            reduce_dtype=precision.gradient_dtype(master_dtype),
        )
        floating = master_dtype.is_floating_point or master_dtype.is_complex
        self.shards = [
            nn.Parameter(self.params.piece_of_master(piece), requires_grad=floating) for piece in self.params.pieces
        ]
        self.awaited = False

    @property
    def trained(self) -> bool:
        """Whether any parameter of the group takes gradients now."""
        return any(param.requires_grad for param in self.params.params)

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
        calls: forward calls whose backward has not begun.
        active: calls in backward now.
        held: whether its weights stay until the last of several calls is over.
        kept: whether its weights stay until backward is over, because nobody will tell when they are needed.
    """

    def __init__(self, name: str, module: nn.Module, groups: list[FlatGroup]) -> None:
        self.name = name
        self.module = module
        self.groups = groups
        self.calls = 0
        self.active = 0
        self.kept = False
        self.held = False

    def gather(self, *, again: bool = False) -> None:
        """Start to make the weights whole and current; ``again``: also where they are."""
        for group in self.groups:
            group.params.gather(again=again)

    def wait(self) -> None:
        """Finish what `gather` started."""
        for group in self.groups:
            group.params.wait()

    def unshard(self) -> None:
        """Make the weights whole and current."""
        self.gather()
        self.wait()

    def reshard(self) -> None:
        """Free full weights, where they are sharded."""
        for group in self.groups:
            group.params.release()

    def reduce_grads(self) -> None:
        """Start to reduce what has accumulated on this rank. Collective: every rank's trained groups, used or not."""
        for group in self.trained_groups():
            group.grads.reduce()

    def settle(self) -> None:
        """Finish the reductions under way."""
        for group in self.groups:
            group.grads.settle()

    def trained_groups(self) -> list[FlatGroup]:
        """Groups that take gradients now, or did in a backward of this step that reduced none."""
        return [group for group in self.groups if group.trained or group.awaited]

    @property
    def stale(self) -> bool:
        """Whether any weights are older than their masters."""
        return any(group.params.stale for group in self.groups)

    def named_slots(self) -> Iterator[tuple[str, nn.Parameter, FlatGroup, int]]:
        """``(name, parameter, group, slot)`` of each parameter."""
        for group in self.groups:
            for index, (slot, param) in enumerate(zip(group.params.layout.slots, group.params.params, strict=True)):
                yield slot.name, param, group, index


def build_groups(
    name: str,
    params: list[tuple[str, nn.Parameter]],
    strategy: ShardingStrategy,
    comm: Communicator,
    precision: MixedPrecision,
    init: dict[nn.Parameter, Init],
) -> list[FlatGroup]:
    """Group a unit's parameters and make them flat; those in ``init`` get their values from it, not from memory."""
    by_kind: dict[tuple[torch.dtype, torch.device, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for param_name, param in params:
        kind = (param.dtype, param.device, param.requires_grad, param in init)
        by_kind.setdefault(kind, []).append((param_name, param))
    groups = []
    for index, members in enumerate(by_kind.values()):
        group_name = name if index == 0 else f"{name}#{index}"
        groups.append(FlatGroup(group_name, members, strategy, comm, precision, init.get(members[0][1])))
    return groups


def memory_of(groups: Iterator[FlatGroup]) -> dict[str, int]:
    """Resident bytes of weights, gradients and masters; a master that is (a shard of) the weights counts as weights."""
    total = {"params": 0, "grads": 0, "master": 0}
    for group in groups:
        params = group.params
        total["params"] += params.full_bytes
        same_dtype = params.master.dtype == params.full.dtype
        total["params" if same_dtype else "master"] += params.master_bytes
        total["grads"] += group.grads.resident_bytes
    return total


def reduced_whole(group: FlatGroup) -> Tensor:
    """``[padded_numel]``: the reduced gradients of every shard, in the master's dtype. Collective; a new tensor."""
    reduced = group.grads.reduced
    assert reduced is not None
    if not group.params.shard_optim:
        return reduced.clone()
    flat = torch.empty(group.params.layout.padded_numel, dtype=reduced.dtype, device=reduced.device)
    group.params.comm.all_gather(flat, reduced).wait()
    return flat
