"""The validation loss: the mean over a fixed set of batches that the ranks divide among them.

Sums over batches are rounded only once, so that the loss does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from zeroshard.comm import CONTROL, Communicator, labelled
from zeroshard.data.base import EvalBatch, as_arguments


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[EvalBatch],
    comm: Communicator,
    device: torch.device,
    alive: Callable[[], None] = lambda: None,
) -> float:
    """Return the mean loss over every rank's batches, in nats; the same number on every rank. Collective.

    The model runs in evaluation mode and is returned to the mode that it was in. ``batches`` are this rank's
    ``(tokens_BT, targets_BT, weight)``, for packed rows followed by ``positions_BT``. Every rank must have the same
    number of them, because a forward may issue collectives; a batch of weight 0 is run but not counted.
    """
    was_training = model.training
    model.eval()
    found: list[Tensor] = []  # for each batch: [weighted loss, weight]
    for tokens_BT, targets_BT, weight, *positions in batches:
        given = as_arguments([each.to(device) for each in positions])
        loss = model(tokens_BT.to(device), targets_BT.to(device), **given)
        weight = weight.to(device, torch.float64)
        loss = torch.where(weight > 0, weight * loss.to(torch.float64), 0.0)
        found.append(torch.stack([loss, weight], dim=-1).view(-1))
        alive()
    model.train(was_training)
    own = torch.cat(found).to(comm.control_device)
    everybodys = own.new_empty(comm.world_size * own.numel())
    with labelled(CONTROL):
        comm.all_gather(everybodys, own).wait()
    losses, weights = everybodys.view(-1, 2).unbind(1)
    return sum_in_any_order(losses.tolist()) / sum_in_any_order(weights.tolist())


def sum_in_any_order(values: Sequence[float]) -> float:
    """The sum, rounded once, so that it does not depend on the order; NaN or infinite if a plain sum is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
