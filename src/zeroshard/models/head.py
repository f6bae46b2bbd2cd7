"""The output layer of a language model: logits, or the loss of them, inside of one module.

    logits = hidden @ weight.T        loss = cross_entropy(logits, targets)

The loss needs the weights and not all logits at once. Were it computed from ``head.weight`` outside of the head's own
forward, an engine that gathers weights when a module is called (ours, FSDP2's) would not hear of it. So the head is
given the targets too, and may be a unit of its own: its gradient, which comes first in backward, is then reduced behind
the backward of all blocks, and freed.

Shape legend: B batch, T sequence, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zeroshard.kernels import Choice
from zeroshard.models.base import next_token_loss, projected_loss


class Head(nn.Linear):
    """An `nn.Linear` without bias, of the same parameter names, that also computes the loss of its logits."""

    def __init__(self, width: int, vocab_size: int, device: Any = None) -> None:
        super().__init__(width, vocab_size, bias=False, device=device)

    def forward(
        self, input: Tensor, targets_BT: Tensor | None = None, kernels: Choice | None = None, **options: Any
    ) -> Tensor:
        """Logits [B, T, V] of ``input`` [B, T, C]; with targets [B, T] their mean loss: `base.projected_loss`."""
        if targets_BT is None:
            return super().forward(input)
        return projected_loss(input, self.weight, targets_BT, kernels, **options)


def head_loss(
    head: nn.Module, hidden_BTC: Tensor, targets_BT: Tensor, kernels: Choice | None = None, **options: Any
) -> Tensor:
    """The mean loss of ``head``'s logits; where it is a `Head`, they need not exist all at once.

    Another module stands there where adapters have wrapped the head: the weights alone are then not what it computes.
    """
    if isinstance(head, Head):
        return head(hidden_BTC, targets_BT, kernels, **options)
    return next_token_loss(head(hidden_BTC), targets_BT, kernels, **options)


def with_embedding_and_head(
    model: nn.Module, embedding: nn.Module | None, blocks: Sequence[nn.Module], head: nn.Module | None
) -> list[nn.Module]:
    """``[embedding, *blocks, head]``, each a unit of its own, without those that share a parameter with another module.

    A matrix that embedding and head share is used at both ends of a forward: it belongs to the root unit, which stays
    unsharded from the one to the other. None: there is none.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            holders[id(param)] = holders.get(id(param), 0) + 1

    def alone(module: nn.Module | None) -> list[nn.Module]:
        found = [] if module is None else list(module.parameters())
        return [module] if module is not None and found and all(holders[id(param)] == 1 for param in found) else []

    return [*alone(embedding), *blocks, *alone(head)]
