"""Checks before the first step that ranks which share a sequence compute what one rank would compute of it.

Models of `transformers` and of users may mix tokens elsewhere than in the attention that exchanges them: a convolution
or a recurrent layer would silently see a rank's part alone. So a short row is computed by the ranks together and by
each of them whole, and the logits must be the same.
"""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.comm import Communicator
from zeroshard.comm.agree import largest
from zeroshard.errors import UserError
from zeroshard.models import LanguageModel, SequenceParallel

TOKENS_OF_A_RANK = 8  # at most; no more than a rank has in a step
# Largest difference, as a share of the largest logit, that counts as rounding: of fp32, and of narrower dtypes.
_ROUNDING, _NARROW = 1e-3, 0.1


@torch.no_grad()
def require_shared(
    module: nn.Module, model: LanguageModel, comm: Communicator, seq_len: int, device: torch.device, *, narrow: bool
) -> None:
    """Raise a UserError if parts of a row have other logits than the row. Collective.

    Args:
        module: what the strategy calls in place of ``model``.
        model: the model, with ranks that share its sequences.
        comm: all ranks.
        seq_len: tokens of a row in the run.
        device: that of this rank.
        narrow: whether the model computes in a dtype of fewer than 32 bits.
    """
    sequence = model.sequence
    assert isinstance(sequence, SequenceParallel)
    length = sequence.num_parts * min(TOKENS_OF_A_RANK, seq_len // sequence.num_parts)
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    was_training = module.training
    module.eval()
    (own,) = sequence.cut(tokens)
    found = module(own)
    with sequence.paused():
        (wanted,) = sequence.cut(module(tokens))
    module.train(was_training)
    change, size = (float(each.abs().max()) for each in (found - wanted, wanted))
    if largest(comm, int(not change <= (_NARROW if narrow else _ROUNDING) * size)):
        what = f"the ranks of a sequence compute other logits than one rank (by {change / max(size, 1e-30):.1%})"
        todo = "leave it out: the model mixes tokens elsewhere than in its attention"
        raise UserError("sequence_parallel", what.replace("%", " %"), todo)
