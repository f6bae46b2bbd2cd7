"""The validation loss: the mean over a fixed set of batches that all ranks share out, alike for any number of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.data.base import EvalBatch, as_arguments


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[EvalBatch],
    comm: Communicator,
    device: torch.device,
    alive: Callable[[], None] = lambda: None,
) -> float:
    """Mean loss over every rank's batches, in nats; the same number on every rank. Collective.

    The model is called in evaluation mode and left in the mode it was in.

    Args:
        model: ``model(tokens_BT, targets_BT)`` is the mean loss of a batch.
        batches: this rank's ``(tokens_BT, targets_BT, weight)``, of packed rows with ``positions_BT`` behind; as many
            on every rank, since a forward may be a collective. A batch of weight 0 is run and not counted.
        comm: the ranks.
        device: where the batches go.
        alive: called after each batch.
    """
    was_training = model.training
    model.eval()
    found: list[Tensor] = []  # of each batch: its weighted loss, its weight
    for tokens_BT, targets_BT, weight, *positions in batches:
        given = as_arguments([each.to(device) for each in positions])
        loss = model(tokens_BT.to(device), targets_BT.to(device), **given)
        loss = weight * loss.to(torch.float64) if weight else torch.zeros((), dtype=torch.float64, device=device)
        found.append(torch.stack([loss, torch.full_like(loss, weight)]))
        alive()
    model.train(was_training)
    own = torch.stack(found).view(-1).to(comm.control_device)
    everybodys = own.new_empty(comm.world_size * own.numel())
    with scope(CONTROL):
        comm.all_gather(everybodys, own).wait()
    losses, weights = everybodys.view(-1, 2).unbind(1)
    return _sum(losses) / _sum(weights)


def _sum(values: Tensor) -> float:
    """Rounded once, so in whatever order; NaN or infinite where a plain sum is."""
    return math.fsum(values.tolist()) if bool(values.isfinite().all()) else float(values.sum())
