"""The output head of a language model: one module that computes the logits, or directly their loss.

    logits = hidden @ weight.T        loss = cross_entropy(logits, targets)

The loss needs the weights, but not all logits at once. If it were computed from ``head.weight`` outside the head's own
forward, an engine that gathers weights when a module is called (ours, FSDP2) would not gather them. So the head's
forward takes the targets too, and the head may be a unit of its own. Its gradient is the first in backward: the engine
reduces it while the backward of the blocks runs, and frees it.

Shape legend: B batch, T sequence, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zeroshard.host.torch_internals import own_parameters
from zeroshard.kernels import Choice
from zeroshard.models.base import next_token_loss, projected_loss


class Head(nn.Linear):
    """An `nn.Linear` without bias, with the same parameter name, that can also compute the loss of its logits."""

    def __init__(self, width: int, vocab_size: int, device: Any = None) -> None:
        super().__init__(width, vocab_size, bias=False, device=device)

    def forward(
        self,
        input: Tensor,
        targets_BT: Tensor | None = None,
        kernels: Choice | None = None,
        norm: nn.Module | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the logits [B, T, V] of ``input`` [B, T, C]; with targets [B, T] their mean loss: `projected_loss`.

        ``norm`` is applied first, so that it is in one compiled graph with the head, even if that is a unit of its own.
        """
        if norm is not None:
            input = norm(input)
        if targets_BT is None:
            return super().forward(input)
        return projected_loss(input, self.weight, targets_BT, kernels, **options)


def head_loss(
    head: nn.Module,
    hidden_BTC: Tensor,
    targets_BT: Tensor,
    kernels: Choice | None = None,
    norm: nn.Module | None = None,
    **options: Any,
) -> Tensor:
    """Return the mean loss of ``head``'s logits.

    ``norm``: what is to be applied to ``hidden_BTC`` [B, T, C] before the head; None: nothing.

    A `Head` need not materialize all of them at once. ``head`` is another module if adapters wrap it: the logits then
    depend on more than ``head.weight``.
    """
    if norm is not None and not isinstance(head, Head):
        hidden_BTC, norm = norm(hidden_BTC), None
    if isinstance(head, Head):
        return head(hidden_BTC, targets_BT, kernels, norm, **options)
    return next_token_loss(head(hidden_BTC), targets_BT, kernels, **options)


def with_embedding_and_head(
    model: nn.Module, embedding: nn.Module | None, blocks: Sequence[nn.Module], head: nn.Module | None
) -> list[nn.Module]:
    """Return the units ``[embedding, *blocks, head]``, without an embedding or head that shares a parameter.

    A matrix that embedding and head share is used at both ends of forward: it belongs to the root unit, which stays
    unsharded in between. ``embedding`` or ``head`` is None if the model has none.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for param in own_parameters(module).values():
            holders[id(param)] = holders.get(id(param), 0) + 1

    def alone(module: nn.Module | None) -> list[nn.Module]:
        found = [] if module is None else list(module.parameters())
        return [module] if module is not None and found and all(holders[id(param)] == 1 for param in found) else []

    return [*alone(embedding), *blocks, *alone(head)]
