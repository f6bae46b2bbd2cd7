"""The outer optimizer of one flat group, on this rank's shard: the anchor, its momentum, a difference in flight.

    difference  = mean over replicas of (anchor - local)
    momentum   <- outer_momentum * momentum + difference
    anchor     <- anchor - outer_lr * (difference + outer_momentum * momentum)          Nesterov, as `torch.optim.SGD`

Anchor and momentum are sharded over the ranks of a replica at every stage, even at stage 0, by the layout of the group,
so the stage changes neither their place nor their bits. They are fp32, or the master weights' dtype if that is wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work, empty_for, scope
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.shards import gather_shards
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.buffers.wire import AcrossReplicas, Rounding
from zeroshard.zero.replicas.local_steps import LocalSteps


class Outer:
    """This rank's outer state of one group; the anchor starts from the group's current weights.

    ``rank``: this rank's number in the world; in a block format each rank rounds with noise of its own.

    Attributes:
        anchor, momentum: ``[shard_numel]``, fp32 or wider.
        due: the number of steps after which the difference in flight is applied; None: no difference is in flight.
    """

    def __init__(self, group: FlatGroup, settings: LocalSteps, rank: int) -> None:
        own = own_master(group.params)
        self.anchor = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
        self.momentum = torch.zeros_like(self.anchor)
        self.due: int | None = None
        self._difference: Tensor | None = None
        self._work: Work | None = None
        self._packed: AcrossReplicas | None = None
        self._gathers = False  # whether a block format's second collective, the gather of sums, was issued
        self._rounding = Rounding(settings.rounding_seed, f"{group.params.name}/difference", rank)

    def restart_from_first(self, group: FlatGroup) -> None:
        """Make the current weights the anchor, without momentum, and drop a difference in flight. Collective."""
        self.drop(group)
        self.anchor.copy_(own_master(group.params))
        self.momentum.zero_()

    def drop(self, group: FlatGroup) -> None:
        """Wait for a difference in flight, and drop it. Collective."""
        self.issue_gather(group)
        self.difference()
        self.due = self._difference = None

    def send(self, group: FlatGroup, replicas: Communicator, settings: LocalSteps, num_steps: int) -> int:
        """Start to sum this shard's difference over the replicas, after ``num_steps`` steps. Collective.

        Returns:
            Bytes that this rank gives to the collective.
        """
        group.params.take_changes()
        self.due = num_steps + settings.overlap_steps
        own = own_master(group.params)
        if settings.form is not None and replicas.world_size > 1 and own.numel():
            self._difference = (self.anchor - own).mul_(1.0 / replicas.world_size)
            self._rounding.resume_at(num_steps)
            self._packed = AcrossReplicas(replicas, settings.form, self._difference, self._rounding)
            with scope(f"{group.params.name}/difference"):
                self._work = self._packed.issue()
            return self._packed.packed.nbytes
        message = empty_for(replicas, own.numel(), settings.dtype or self.anchor.dtype, own.device)
        if message.dtype == own.dtype == self.anchor.dtype:
            torch.sub(self.anchor, own, out=message)
            message.mul_(1.0 / replicas.world_size)
        else:
            message.copy_((self.anchor - own).mul_(1.0 / replicas.world_size))
        with scope(f"{group.params.name}/difference"):
            self._work = replicas.all_reduce(message)
        self._difference = message
        return message.nbytes

    def issue_gather(self, group: FlatGroup) -> None:
        """In a block format: wait for the exchange of pieces, sum them, and issue the gather of sums. Collective."""
        if self._packed is None or self._gathers:
            return
        assert self._work is not None
        self._work.wait()
        with scope(f"{group.params.name}/difference"):
            self._work = self._packed.issue()
        self._gathers = True

    def difference(self) -> Tensor | None:
        """Wait for the mean difference, ``[shard_numel]``, in the dtype that travelled; None if none was sent.

        Call `issue_gather` before. A difference that travelled in a block format has the anchor's dtype.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._packed is not None:
            assert self._difference is not None
            self._packed.deliver(self._difference)
            self._packed, self._gathers = None, False
        return self._difference

    def resume_difference(self, difference: Tensor, due: int) -> None:
        """Resume with a mean difference that had arrived when the checkpoint was saved, and is applied when due."""
        self._difference, self.due = difference, due

    def step(self, settings: LocalSteps) -> None:
        """Update the anchor with the difference that has arrived; waits for it."""
        arrived, self._difference, self.due = self.difference(), None, None
        assert arrived is not None
        difference = arrived.to(self.anchor.dtype, copy=True)  # a save may still be reading what arrived
        self.momentum.mul_(settings.outer_momentum).add_(difference)
        difference.add_(self.momentum * settings.outer_momentum)
        self.anchor.sub_(difference.mul_(settings.outer_lr))

    def show(self, group: FlatGroup, stays: float = 0.0) -> None:
        """Make the group's weights ``stays * local + (1 - stays) * anchor``. Collective over the replica's ranks."""
        params = group.params
        anchor = self.anchor.to(params.master.dtype)
        if params.shard_optim or params.comm.world_size == 1:
            shards = [(own_master(params), anchor)]
        else:
            whole = torch.empty(params.layout.padded_numel, dtype=anchor.dtype, device=anchor.device)
            with scope(f"{params.name}/anchor"):
                gather_shards(params.comm, params.layout, whole, anchor).wait()
            # Shard by shard, as if each were on its own rank, so that vector bodies and tails have the same elements.
            intervals = (slice(*params.layout.interval(rank)) for rank in range(params.comm.world_size))
            shards = [(params.master[own], whole[own]) for own in intervals]
        for local, common in shards:
            if stays:
                local.mul_(stays).add_(common * (1.0 - stays))
            else:
                local.copy_(common)

    def is_shown(self, group: FlatGroup) -> bool:
        """Whether this rank's shard of the weights has the anchor's values."""
        own = own_master(group.params)
        return torch.equal(own, self.anchor.to(own.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of anchor and momentum."""
        return self.anchor.nbytes + self.momentum.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        """All resident tensors."""
        return [self.anchor, self.momentum, *([] if self._difference is None else [self._difference])]


def own_master(params: FlatParams) -> Tensor:
    """``[shard_numel]``: view of this rank's shard of the master weights."""
    if params.shard_optim:
        return params.master
    start, stop = params.layout.interval(params.comm.rank)
    return params.master[start:stop]
