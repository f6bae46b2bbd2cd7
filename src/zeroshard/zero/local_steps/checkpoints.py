"""Saves replicas that take local steps to a checkpoint, and loads them.

State that all replicas share is saved once, under the ordinary names: the global weights in place of the local ones
(kind ``"param"``; in fp32 also ``"global"`` if weights have another dtype), ``"outer_momentum"`` and ``"outer_steps"``.
So any reader of weights reads the global weights, the last that all replicas had in common.

State that replicas do not share is saved for each of them: the states of its inner optimizer, and between outer steps
its local weights (kind ``"local"``) and its modules' statistics. The first replica's states and statistics have the
ordinary names, as an engine without local steps saves them; all others have names like ``NAME@replica1``, which only
`ReplicaReader` asks for.

    loaded into as many replicas                 every replica resumes with the same bits
    fewer                                        the last ones' inner states and local steps are left out
    more                                         a new one begins at the global weights, with the first's inner states
    no local steps, another strategy             the global weights, with the first one's inner states
    replicas, from a checkpoint that has none    the saved weights are global; no momentum; inner states for each

Stage and size of replicas may change in each case, because everything is saved as intervals of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from zeroshard.optim.named_shards import MODEL_KINDS, NamedShard, ReadsSettings, ShardReader, of_replica
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.layout import Piece
from zeroshard.zero.local_steps.outer_optimizer import Outer
from zeroshard.zero.local_steps.outer_steps import OuterSteps

LOCAL = "local"


def named_shards(outer_steps: OuterSteps, written: Iterator[NamedShard]) -> Iterator[NamedShard]:
    """Yield the shards that this rank writes; ``written``: those that it would write if its replica were the world."""
    number = outer_steps.comm.rank
    at_global_weights = outer_steps.still_at_global_weights()
    global_weights = {
        (slot, piece.interval): (group, outer, piece)
        for _, group, outer in outer_steps.by_group()
        for slot, piece in _owned(group)
    }
    for shard in written:
        if shard.kind == "param" and (shard.name, shard.interval) in global_weights:
            group, outer, piece = global_weights[shard.name, shard.interval]
            if number == 0:
                yield from _common(outer_steps, shard, group, outer, piece)
            if not at_global_weights:
                yield replace(shard, name=of_replica(shard.name, number), kind=LOCAL)
        elif number == 0:
            yield shard
        elif shard.kind not in MODEL_KINDS or (shard.kind == "buffer" and not at_global_weights):
            yield replace(shard, name=of_replica(shard.name, number))


def _owned(group: FlatGroup) -> Iterator[tuple[str, Piece]]:
    for piece in group.params.layout.owned(group.params.comm.rank):
        yield group.params.layout.slots[piece.slot].name, piece


def _common(
    outer_steps: OuterSteps, shard: NamedShard, group: FlatGroup, outer: Outer, piece: Piece
) -> Iterator[NamedShard]:
    """Yield the global weights of one piece, with the outer optimizer's state that belongs to it."""
    cut = _cut(group, piece)
    global_weights = outer.global_weights[cut]
    yield replace(shard, tensor=global_weights.to(shard.tensor.dtype))
    if global_weights.dtype != shard.tensor.dtype:
        yield replace(shard, kind="global", tensor=global_weights)
    yield replace(shard, kind="outer_momentum", tensor=outer.momentum[cut])
    if shard.interval[0] == 0:
        yield NamedShard(shard.name, "outer_steps", (), (0, 1), torch.tensor([outer_steps.num_steps]))


def _cut(group: FlatGroup, piece: Piece) -> slice:
    """The slice of this rank's shard that holds a piece."""
    start = piece.offset - group.params.layout.interval(group.params.comm.rank)[0]
    return slice(start, start + piece.numel)


class ReplicaReader:
    """Reads a checkpoint for one replica: its own weights and states if they were saved, else the shared ones.

    Args:
        reader: the checkpoint's reader.
        number: the replica's number.
    """

    def __init__(self, reader: ShardReader, number: int) -> None:
        self._reader, self._number = reader, number
        self.param_groups = reader.param_groups if isinstance(reader, ReadsSettings) else ()

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """As `ShardReader.kinds`, for the state that this replica loads."""
        found, own = dict(self._reader.kinds(name)), self._own(name)
        if own:
            found = {kind: shape for kind, shape in found.items() if kind in MODEL_KINDS} | own
        local = self._reader.kinds(of_replica(name, self._number)).get(LOCAL)
        return found if local is None else {**found, "param": local}

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """As `ShardReader.read`, for the state that this replica loads."""
        mine = of_replica(name, self._number)
        if kind == "param" and LOCAL in self._reader.kinds(mine):
            return self._reader.read(mine, LOCAL, interval)
        return self._reader.read(mine if kind in self._own(name) else name, kind, interval)

    def _own(self, name: str) -> dict[str, tuple[int, ...]]:
        """The kinds that are saved under this replica's own name, but its local weights: inner states, statistics."""
        kinds = self._reader.kinds(of_replica(name, self._number))
        return {kind: shape for kind, shape in kinds.items() if kind != LOCAL}


def load(outer_steps: OuterSteps, reader: ShardReader) -> None:
    """Load global weights and momentum from ``reader``; the weights must be loaded already."""
    num_steps, at_global_weights = 0, True
    for key, group in outer_steps.groups():
        slots = [slot.name for slot in group.params.layout.slots]
        facts = next((name for name in slots if "outer_steps" in reader.kinds(name)), None)
        if facts is None and not group.trained:
            continue
        outer = outer_steps.outer_of(key, group)
        outer.restart_from_first(group)
        for name, piece in _owned(group):
            kinds, cut = reader.kinds(name), _cut(group, piece)
            global_weights = reader.read(name, "global" if "global" in kinds else "param", piece.interval)
            outer.global_weights[cut] = global_weights.to(outer.global_weights)
            if "outer_momentum" in kinds:
                outer.momentum[cut] = reader.read(name, "outer_momentum", piece.interval).to(outer.momentum)
        if facts is not None:
            num_steps = int(reader.read(facts, "outer_steps", (0, 1)))
            at_global_weights = at_global_weights and LOCAL not in reader.kinds(of_replica(facts, 0))
    outer_steps.loaded(num_steps, at_global_weights=at_global_weights)
