"""When a row that ranks share is compared with the row on one rank: in a forward of longer rows than any before.

[Note: Ranks that compare]
    The ranks of a row have equally many of its tokens, so all of them see that it is longer. Rows of other ranks may be
    shorter, which does not matter where each rank has all weights. Where weights are sharded, as at stage 3, forwards
    gather them from all ranks, and all compare if any does: so these ask each other before each forward, by a control
    message of one number. With `SequenceParallel.longest` nobody asks.

[Note: Inside of a forward]
    Rows are computed inside of the forward that has the longer ones, before anything of it. An engine has gathered the
    weights of the module that was called, and would free them after a second call: so the comparison calls its
    ``forward``, and only what is inside of it with hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.agree import largest
from zeroshard.host.errors import UserError
from zeroshard.host.torch_internals import runs_eagerly
from zeroshard.models.sequence_comparison import Run, can_compare, require_same
from zeroshard.models.ulysses import SequenceParallel


class ComparedRows:
    """The rows of a model that were compared.

    Args:
        model: the model, or the part of it that has attention.
        run: computes rows of it, as `require_same` says.
    """

    def __init__(self, model: nn.Module, sequence: SequenceParallel, run: Run, vocab_size: int) -> None:
        self._model, self._sequence, self._run, self._vocab_size = model, sequence, run, vocab_size
        self._longest, self._is_sharded = 0, False
        self._asks = sequence.longest is None and sequence.world.world_size > sequence.size

    @runs_eagerly
    def before(self, part: Tensor) -> None:
        """Before a forward of ``part`` [B, t, ...] of rows: compare one, if they are longer than before. Collective.

        Raises:
            UserError: the ranks compute something else, or the row is longer than the longest was to be.
        """
        sequence = self._sequence
        if sequence.is_paused or sequence.is_comparing or not can_compare(sequence, part):
            return
        num_tokens = part.shape[1] * sequence.size
        if sequence.longest is not None:
            if num_tokens > sequence.longest:
                what = f"a row of {num_tokens:,} tokens is longer than the {sequence.longest:,} that were compared"
                raise UserError("longest", what, "give SequenceParallel the tokens of the longest row")
            num_tokens = sequence.longest
        elif self._is_sharded:  # [Note: Ranks that compare]
            num_tokens = largest(sequence.world, num_tokens)
        if num_tokens > self._longest:
            require_same(self._model, sequence, self._run, num_tokens, self._vocab_size, part.device)
            self._longest = num_tokens

    def after(self) -> None:
        """After a forward: note whether its weights were freed."""
        if self._asks and not self._is_sharded:
            self._is_sharded = any(map(_is_freed, self._model.parameters()))


def _is_freed(param: Any) -> bool:
    """Whether a rank has a shard alone: FSDP2 shows it, and zeroshard one NaN, or nothing."""
    from torch.distributed.tensor import DTensor  # takes a second to import, which most programs never need

    nothing = param.numel() > 1 and not any(param.stride())
    return isinstance(param, DTensor) or nothing or param.untyped_storage().nbytes() == 0


@torch.no_grad()
def compare_rows(module: nn.Module, sequence: SequenceParallel, device: torch.device) -> None:
    """Have a model compare rows before its first step: by a forward of ``module``, which calls it. Collective.

    Such a forward has all that an engine does around it, and gives the model a short row.
    """
    was_training = module.training
    module.eval()
    module(torch.zeros(1, 1, dtype=torch.long, device=device))
    module.train(was_training)
