"""Whether a model keeps apart what it is told to keep apart: asked of the model itself, before the first step.

Models of `transformers` and of users find the beginnings of examples in their positions, or do not: a layer with a
state that goes along the sequence, or an attention that takes no mask, would let examples see each other in silence. So
the loss of an example is computed behind different neighbours, in a batch of the run's shape. It must not change.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zeroshard.errors import UserError
from zeroshard.models.hugging_face.model import HuggingFaceModel

_ROUNDING = 2.5e-7  # share of a loss, two units of fp32: what is not seen enters sums as zeros, and changes no bit
# Of experts on CUDA: how many tokens one is given decides which kernel multiplies them, and so the last bits of each.
# The change must then be so many times smaller than where examples see each other.
_LEAST_CHANGE = 64
_NUM_TARGETS = 2  # first tokens of an example, which are nearest to its neighbour
_SHIFTS = (1, 7)  # from the ids of a neighbour to those of others


@contextmanager
def _without_balance(model: nn.Module) -> Generator[None]:
    """Inside, a loss has no part for the balance of experts, to which neighbours contribute rightly."""
    balanced = [each for each in model.modules() if isinstance(each, HuggingFaceModel) and each.balances_experts]
    for each in balanced:
        each.balances_experts = False
    try:
        yield
    finally:
        for each in balanced:
            each.balances_experts = True


@torch.no_grad()
def require_apart(
    model: nn.Module, setting: str, vocab_size: int, micro_batch_size: int, seq_len: int, device: torch.device
) -> None:
    """Raise UserError, which names ``setting``, where examples of one row see each other. Collective.

    The model is called six times in evaluation mode and left in the mode it was in. Each rank gives it the same rows,
    so that all come to the same end. Rows of less than 4 tokens are not looked at.
    """
    if seq_len < 4:
        return
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(vocab_size, (micro_batch_size, seq_len), generator=generator)
    half = seq_len // 2
    targets_BT = torch.full_like(tokens_BT, -100)
    targets_BT[:, half : half + _NUM_TARGETS] = tokens_BT[:, :_NUM_TARGETS]
    place_T = torch.cat((torch.arange(half), torch.arange(seq_len - half)))
    rows = [
        torch.cat(((tokens_BT[:, :half] + shift) % vocab_size, tokens_BT[:, half:]), dim=1).to(device)
        for shift in (0, *_SHIFTS)
    ]
    was_training = model.training
    model.eval()

    def change(**positions: Tensor) -> tuple[float, float]:
        """The loss, and the most that it changes with the neighbours."""
        loss, *others = (float(model(each, targets_BT.to(device), **positions)) for each in rows)
        return loss, max(abs(other - loss) for other in others)

    with _without_balance(model):
        loss, apart = change(positions_BT=place_T.expand(micro_batch_size, -1).to(device))
        _, together = change()
    model.train(was_training)
    shares_products = device.type == "cuda" and any("experts" in name.split(".") for name, _ in model.named_modules())
    if apart > max(_ROUNDING * abs(loss), together / _LEAST_CHANGE if shares_products else 0.0):
        what = f"the model lets an example see others of its row (its loss changes by {apart:.2g} with them)"
        raise UserError(setting, what, "leave it out, or take another model or model.attention")
