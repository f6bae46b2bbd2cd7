"""One rank of a world of any size, alone: the real engine over `NullCommunicator`, with every allocation recorded.

Every buffer is allocated and written, forward and backward are computed, and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from zeroshard.comm import CONTROL, CommRecord, NullCommunicator, ObservedCommunicator
from zeroshard.profiling.memory import AllocationRecorder
from zeroshard.zero import Zero

NUM_STEPS = 2  # the first creates optimizer states; the second starts with the gradient buffers of the first


@dataclass(frozen=True)
class Measured:
    """Resident bytes by category, the peak of the recorded steps, and the collectives of the last one."""

    start: dict[str, int]
    before_update: dict[str, int]
    peak_bytes: int
    peak_by_category: dict[str, int]
    messages: list[CommRecord]


def dry_run(model, inputs, *, world_size, strategy, micro_batch, num_micro=1, rank=0, optimizers=None, **given):
    """Train ``model`` as ``rank`` of ``world_size``; ``given``: further arguments of `Zero`.

    ``inputs`` makes the arguments of ``micro_batch`` rows; ``optimizers`` makes the optimizers, or else there is AdamW.
    """
    comm = ObservedCommunicator(NullCommunicator(world_size, rank))
    zero = Zero(model, strategy, comm=comm, **given)
    made = [zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)] if optimizers is None else optimizers(zero)
    arguments = inputs(micro_batch)
    recorder = AllocationRecorder(zero.holdings)
    # what parameters show while their weights are hidden
    recorder.ignore(group.params.shown.placeholder for unit in zero.units for group in unit.groups)
    recorder.follow(model, made[0])
    start = before_update = zero.memory_bytes()
    with recorder:
        for _ in range(NUM_STEPS):
            comm.drain()
            for micro in range(num_micro):
                with zero.micro_batch(last=micro == num_micro - 1):
                    sum(leaf.sum() for leaf in tree_leaves(model(*arguments)) if leaf.requires_grad).backward()
            zero.clip_grad_norm_(1.0)
            before_update = zero.memory_bytes()
            for each in made:
                each.step()
            for each in made:
                each.zero_grad()
    recorder.remove()
    sent = [each for each in comm.records if each.scope != CONTROL]
    return Measured(start, before_update, recorder.peak.num_bytes, dict(recorder.peak.by_category), sent)
