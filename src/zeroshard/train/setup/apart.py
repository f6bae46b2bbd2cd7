"""Whether a model keeps apart what it is told to keep apart: asked of the model itself, before the first step.

Models of `transformers` and of users find the beginnings of examples in their positions, or do not: a layer with a
state that goes along the sequence, or an attention that takes no mask, would let examples see each other in silence. So
the loss of an example is computed twice behind different neighbours, in a batch of the run's shape. It must not change.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeroshard.errors import UserError

_ROUNDING = 2.5e-7  # share of a loss, two units of fp32: what is not seen enters sums as zeros, and changes no bit
# Of experts: which other tokens one is given decides the shape of its product, and so the order of its sums. The change
# must then be so many times smaller than where examples see each other.
_LEAST_CHANGE = 16
_NUM_TARGETS = 2  # first tokens of an example, which are nearest to its neighbour


@torch.no_grad()
def require_apart(
    model: nn.Module, setting: str, vocab_size: int, micro_batch_size: int, seq_len: int, device: torch.device
) -> None:
    """Raise UserError, which names ``setting``, where examples of one row see each other. Collective.

    The model is called four times in evaluation mode and left in the mode it was in. Each rank gives it the same rows,
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
    others_BT = torch.cat(((tokens_BT[:, :half] + 1) % vocab_size, tokens_BT[:, half:]), dim=1)
    was_training = model.training
    model.eval()

    def change(**positions: Tensor) -> tuple[float, float]:
        """The loss, and how much it changes with the neighbours."""
        first, second = (
            float(model(rows.to(device), targets_BT.to(device), **positions)) for rows in (tokens_BT, others_BT)
        )
        return first, abs(first - second)

    loss, apart = change(positions_BT=place_T.expand(micro_batch_size, -1).to(device))
    _, together = change()
    model.train(was_training)
    has_experts = any("experts" in name.split(".") for name, _ in model.named_modules())
    if apart > max(_ROUNDING * abs(loss), together / _LEAST_CHANGE if has_experts else 0.0):
        what = f"the model lets an example see others of its row (its loss changes by {apart:.2g} with them)"
        raise UserError(setting, what, "leave it out, or take another model or model.attention")
