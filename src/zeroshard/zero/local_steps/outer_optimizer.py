"""The outer optimizer of one flat group, on this rank's shard: the global weights and their momentum.

    difference  = mean over replicas of (global - local)
    momentum   <- outer_momentum * momentum + difference
    global     <- global - outer_lr * (difference + outer_momentum * momentum)          Nesterov, as `torch.optim.SGD`

Global weights and momentum are sharded over the ranks of a replica at every stage, even at stage 0, by the layout of
the group, so the stage changes neither their place nor their bits. They are fp32, or the master weights' dtype if that
is wider.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, empty_for, labelled
from zeroshard.settings.wire_formats import Rounding
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.local_steps.settings import LocalSteps
from zeroshard.zero.transport.wire import AcrossReplicas


class Difference:
    """The mean over replicas of the changes to one group's shard, while it is being computed. Every call is collective.

    Args:
        outer: has the global weights, from which the current weights are subtracted.
        group: the group.
        replicate_group: the ranks that hold the same shard.
        settings: say in which format the difference is sent.
        num_steps: steps done, by which it is rounded to a block format.

    Attributes:
        num_bytes: bytes that this rank gives to the first collective.
    """

    def __init__(
        self, outer: Outer, group: FlatGroup, replicate_group: Communicator, settings: LocalSteps, num_steps: int
    ) -> None:
        group.params.take_changes()
        own, global_weights, factor = own_master(group.params), outer.global_weights, 1.0 / replicate_group.world_size
        self._label = f"{group.params.name}/difference"
        self._packed: AcrossReplicas | None = None
        self._mean: Tensor
        if settings.form is not None and replicate_group.world_size > 1 and own.numel():
            self._mean = (global_weights - own).mul_(factor)
            outer.rounding.resume_at(num_steps)
            self._packed = AcrossReplicas(replicate_group, settings.form, self._mean, outer.rounding)
            self.num_bytes = self._packed.packed.nbytes
            with labelled(self._label):
                self._work = self._packed.issue(self._mean)
            return
        self._mean = empty_for(replicate_group, own.numel(), settings.dtype or global_weights.dtype, own.device)
        if self._mean.dtype == own.dtype == global_weights.dtype:
            torch.sub(global_weights, own, out=self._mean)
            self._mean.mul_(factor)
        else:
            self._mean.copy_((global_weights - own).mul_(factor))
        self.num_bytes = self._mean.nbytes
        with labelled(self._label):
            self._work = replicate_group.all_reduce(self._mean)

    def issue_gather(self) -> None:
        """In a block format: wait for the exchange of pieces, sum them, and issue the gather of sums."""
        if self._packed is not None:
            self._work.wait()
            with labelled(self._label):
                self._work = self._packed.issue(self._mean)

    def mean(self) -> Tensor:
        """Wait for the mean: ``[shard_numel]``, in the dtype in which it was sent; from a block format that of the
        global weights.
        """
        self._work.wait()
        if self._packed is not None:
            self._packed.deliver(self._mean)
            self._packed = None
        return self._mean


class Outer:
    """This rank's outer state of one group; the global weights start from the group's current ones.

    ``rank``: this rank's number in the world; in a block format each rank rounds with noise of its own.

    Attributes:
        global_weights, momentum: ``[shard_numel]``, fp32 or wider.
        rounding: how differences are rounded to a block format.
    """

    def __init__(self, group: FlatGroup, settings: LocalSteps, rank: int) -> None:
        own = own_master(group.params)
        self.global_weights = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
        self.momentum = torch.zeros_like(self.global_weights)
        self.rounding = Rounding(settings.rounding_seed, f"{group.params.name}/difference", rank)

    def restart_from_first(self, group: FlatGroup) -> None:
        """Make the current weights global, without momentum."""
        self.global_weights.copy_(own_master(group.params))
        self.momentum.zero_()

    def step(self, mean: Tensor, settings: LocalSteps) -> None:
        """Update the global weights by the mean difference, which is overwritten."""
        difference = mean.to(self.global_weights.dtype)
        self.momentum.mul_(settings.outer_momentum).add_(difference)
        difference.add_(self.momentum * settings.outer_momentum)
        self.global_weights.sub_(difference.mul_(settings.outer_lr))

    def show(self, group: FlatGroup) -> None:
        """Copy the global weights into the group's. Collective over the replica's ranks."""
        params = group.params
        global_weights = self.global_weights.to(params.master.dtype)
        if params.shard_optim or params.comm.world_size == 1:
            own_master(params).copy_(global_weights)
            return
        with labelled(f"{params.name}/global_weights"):
            params.layout.gather(params.comm, params.master, global_weights).wait()

    def is_shown(self, group: FlatGroup) -> bool:
        """Whether this rank's shard of the weights has the values of the global ones."""
        own = own_master(group.params)
        return torch.equal(own, self.global_weights.to(own.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of global weights and momentum."""
        return self.global_weights.nbytes + self.momentum.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        """All resident tensors."""
        return [self.global_weights, self.momentum]


def own_master(params: FlatParams) -> Tensor:
    """``[shard_numel]``: view of this rank's shard of the master weights."""
    if params.shard_optim:
        return params.master
    start, stop = params.layout.interval(params.comm.rank)
    return params.master[start:stop]
