"""Checks before the first step that a model keeps packed examples apart, that is, masks attention between them.

Models of `transformers` and of users are told where examples begin by their positions, and may ignore it: a recurrent
layer, or an attention without a mask, would silently let the examples of a row see each other. So the check computes
the loss of an example after different neighbours, in a batch of the run's shape. The loss must not change.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from zeroshard.host.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.assemble import attention_boundary_setting

# Largest relative change of the loss that counts as none: two units in the last place of fp32. Masked tokens enter sums
# as zeros, which change no bit.
_ROUNDING = 2.5e-7
# With mixture-of-experts layers on CUDA, the number of tokens of an expert decides which kernel multiplies them, and so
# their last bits. There the change must be this many times smaller than the change without a mask.
_LEAST_CHANGE = 64
_NUM_TARGETS = 2  # first tokens of an example, which are nearest to its neighbour
_SHIFTS = (1, 7)  # added to a neighbour's token ids to make other neighbours


@contextmanager
def _without_balance(model: nn.Module) -> Generator[None]:
    """In this block the loss has no load-balancing term of experts, which rightly depends on neighbours."""
    balanced = [each for each in model.modules() if isinstance(each, LanguageModel) and each.balances_experts]
    for each in balanced:
        each.balances_experts = False
    try:
        yield
    finally:
        for each in balanced:
            each.balances_experts = True


def check_examples_apart(
    config: TrainConfig, model: LanguageModel, wrapped: nn.Module, vocab_size: int, device: torch.device
) -> None:
    """Check a run that keeps examples apart, unless ``model`` is known to; ``wrapped``: what is called. Collective.

    Raises:
        UserError: as `require_apart`.
    """
    setting = attention_boundary_setting(config)
    if setting and not model.keeps_examples_apart:
        sizes = vocab_size, config.micro_batch_size, config.part_of_sequence
        with nullcontext() if model.sequence is None else model.sequence.paused():
            require_apart(wrapped, setting, *sizes, device)


@torch.no_grad()
def require_apart(
    model: nn.Module, setting: str, vocab_size: int, micro_batch_size: int, seq_len: int, device: torch.device
) -> None:
    """Raise a UserError that names ``setting`` if examples of one row see each other. Collective.

    Calls the model six times in evaluation mode and restores its mode. Every rank uses the same rows, so that all reach
    the same result. Rows of fewer than 4 tokens are not checked.
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
        """Return the loss, and the largest change of it when the neighbours change."""
        loss, *others = (float(model(each, targets_BT.to(device), **positions)) for each in rows)
        return loss, max(abs(other - loss) for other in others)

    with _without_balance(model):
        loss, apart = change(positions_BT=place_T.expand(micro_batch_size, -1).to(device))
        _, together = change()
    model.train(was_training)
    shares_products = device.type == "cuda" and any("experts" in name.split(".") for name, _ in model.named_modules())
    if not apart <= max(_ROUNDING * abs(loss), together / _LEAST_CHANGE if shares_products else 0.0):  # or it is NaN
        what = f"attention crosses examples of a row (the others change the loss of one by {apart:.2g})"
        raise UserError(setting, what, "leave it out, or take another model or model.attention")
