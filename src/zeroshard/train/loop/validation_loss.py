"""The validation loss: the mean over a fixed set of batches that all ranks share out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

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
    total = torch.zeros(2, dtype=torch.float64, device=device)  # weighted losses, weights
    for tokens_BT, targets_BT, weight, *positions in batches:
        given = as_arguments([each.to(device) for each in positions])
        loss = model(tokens_BT.to(device), targets_BT.to(device), **given)
        if weight:
            total[0] += weight * loss.to(total)
            total[1] += weight
        alive()
    model.train(was_training)
    total = total.to(comm.control_device)
    with scope(CONTROL):
        comm.all_reduce(total).wait()
    return float(total[0] / total[1])
