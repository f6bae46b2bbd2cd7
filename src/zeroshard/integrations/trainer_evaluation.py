"""The loss of an evaluation of `transformers.Trainer` on several ranks: that of one process with their rows in a batch.

Each rank computes the mean loss of its own rows. The Trainer repeats it for each of them and averages over all ranks.
That is another number than one process's if ranks have unevenly many labels, or if the last batch does not suffice for
all ranks: then Accelerate fills it with rows from the beginning, and the Trainer drops losses from the end, whether
they are of such rows or not. So a rank computes the loss of its real rows alone, and all get the mean by labels:

    loss = sum over ranks of (loss of the rank x its labels) / sum over ranks of its labels
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor


def real_rows(accelerator: Any, inputs: Any) -> tuple[int, int]:
    """Return how many rows this rank's batch has, and how many of them, its first ones, are not there to fill it."""
    rows, state = find_batch_size(inputs) or 0, accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return rows, rows
    return rows, min(max(state.remainder - accelerator.process_index * rows, 0), rows)


def first_rows(inputs: Any, rows: int, count: int) -> Any:
    """Return the first ``count`` of the ``rows`` of each tensor in a batch."""
    return _by_rows(inputs, rows, lambda tensor: tensor[:count])


def filled_again(outputs: Any, count: int, rows: int) -> Any:
    """Repeat the last row of each tensor of ``count`` rows until it has ``rows``: ranks gather equally many."""
    missing = rows - count
    return _by_rows(outputs, count, lambda tensor: torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]))


def _by_rows(data: Any, rows: int, change: Callable[[Tensor], Tensor]) -> Any:
    def apply(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.dim() and tensor.shape[0] == rows else tensor

    return None if data is None else recursively_apply(apply, data)


def num_labels(labels: Any, *, shifted: bool) -> int:
    """Return how many labels count in the loss: those that are not -100, or rows of real numbers.

    ``shifted``: whether the model predicts each label from the position before it, so that the first does not count.
    """
    if isinstance(labels, tuple | list):
        return sum(num_labels(each, shifted=shifted) for each in labels)
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return int(find_batch_size(labels) or 0)
    counted = labels[..., 1:] if shifted and labels.dim() > 1 else labels
    return int(counted.ne(-100).sum())


def mean_by_labels(accelerator: Any, loss: Tensor, count: int) -> Tensor:
    """Return the mean of the ranks' losses, each weighted by the ``count`` of its labels. Collective."""
    weight = torch.tensor(float(count), dtype=torch.float64)
    weighted = torch.where(weight > 0, loss.detach().cpu().double() * weight, 0.0)
    totals = accelerator.gather(torch.stack([weighted, weight]).to(accelerator.device)[None]).sum(0)
    return (totals[0] / totals[1]).to(loss.dtype)
