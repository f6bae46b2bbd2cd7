"""`SequenceParallel`: neighbouring ranks share each sequence, so that a rank keeps activations of a part of it.

Each of N ranks has T / N consecutive tokens of every row, and computes for them all that is computed for each token by
itself: embeddings, projections, norms, feed-forward layers, the loss. Attention alone looks at other tokens. Around it
an all-to-all changes what is divided, from tokens to heads, and another one changes it back:

    q, k, v  [B, H, T/N, D]  --all-to-all-->  [B, H/N, T, D]   attention of whole sequences   --all-to-all-->  tokens

So masks, causality and sliding windows are what they are on one rank. The ranks of a sequence are data-parallel ranks
to an engine: each has gradients of its own tokens, and the mean over ranks is the mean over the sequence's tokens if
each loss is weighted by its number of targets (`SequenceParallel.mean`).

Jacobs et al. 2023, "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509.

[Note: Grouped queries over ranks]
    Query heads are divided evenly, or refused. Key and value heads are copied n times, for the least n for which ranks
    divide them evenly: n = N / gcd(K, N). Then each rank has the ones that its query heads look at, in their order.
    Attention repeats them for the groups of queries as ever, n times less often.

Shape legend: B batch, T sequence, t = T / N, H query heads, K key and value heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from zeroshard.comm import CONTROL, Communicator, all_to_all, labelled, split
from zeroshard.comm.agree import by_rank, digest_of
from zeroshard.data.base import part_of
from zeroshard.host.errors import UserError
from zeroshard.host.uncompiled import uncompiled
from zeroshard.settings import rules

LABEL = "attention/sequence"  # of the all-to-alls, in records and plans


def cannot_share(what: str, todo: str = "leave it out, or take another model") -> UserError:
    """The error for a model, or a use of it, whose sequences ranks cannot share."""
    return UserError("sequence_parallel", what, todo)


class SequenceParallel:
    """The ranks that share this rank's sequences.

    Args:
        comm: these ranks, in the order of their parts of a sequence; for nothing else.
        world: all ranks, over which an engine averages gradients; None: ``comm``.
        longest: tokens of the longest row, at which the first forward of a model compares ranks with one rank
            (`zeroshard.models.sequence_comparison`). None: each row that is longer than those before is compared.

    Attributes:
        rank: which part of each sequence this rank has, from 0.
        size: N, among how many ranks a sequence is cut.
        longest: as above.
        num_compared: how often rows were compared.
    """

    def __init__(
        self,
        comm: Communicator,
        world: Communicator | None = None,
        *,
        longest: int | None = None,
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.world_size
        self.world = comm if world is None else world
        self.longest, self.num_compared = longest, 0
        self.is_paused = self._has_same_rows = False
        self._around = uncompiled(self._exchanging)
        self._recorded: list[Tensor] | None = None

    @classmethod
    def of(cls, world: Communicator, size: int, *, longest: int | None = None) -> Self:
        """Share sequences among ``size`` neighbouring ranks of ``world`` each; others as above. Collective.

        Raises:
            UserError: groups of ``size`` do not partition the world.
            ValueError: ``world`` cannot be split.
        """
        rules.check_sequence_parallel(size, world.world_size)
        groups = [list(range(first, first + size)) for first in range(0, world.world_size, size)]
        # anew, so that they are not behind the engine's collectives, even of one group
        return cls(split(world, groups, anew=True), world, longest=longest)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        """A copy of a model is on the same ranks."""
        return self

    # -- tokens -------------------------------------------------------------------------------------------------

    def first(self, num_tokens: int) -> int:
        """The place in its sequence of this rank's first token, if it has ``num_tokens`` of it."""
        return self.rank * num_tokens

    def cut(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of whole rows: [B, T, ...] -> [B, T / N, ...] of each.

        Cut targets, not tokens of which targets are made: the last token of a part has the next part's first as target.
        Every rank of a sequence gives the same rows, which the first call checks, collectively.

        Raises:
            UserError: T is no multiple of N.
            ValueError: the first tensor has other values on another rank: a sampler gave each its own rows, for one.
        """
        if not self._has_same_rows and not isinstance(tensors[0], FakeTensor) and not tensors[0].is_meta:
            rows = tensors[0].detach().cpu().contiguous()
            digest = int.from_bytes(digest_of(rows.view(-1).view(torch.uint8).numpy().tobytes()))
            if len(set(by_rank(self.comm, digest))) > 1:
                what = "the ranks of a sequence were given different rows"
                raise ValueError(f"{what}; give all of them the same: a sampler has a replica for each group of ranks")
            self._has_same_rows = True
        return tuple(part_of(each, self.rank, self.size) for each in tensors)

    def gather(self, part_Bt: Tensor) -> Tensor:
        """Whole rows [B, T] of every rank's part [B, t], of token ids or positions. Collective; a control message."""
        own = part_Bt.contiguous()
        parts = own.new_empty(self.size, *own.shape)
        with labelled(CONTROL):
            self.comm.all_gather(parts.view(-1), own.view(-1)).wait()
        return parts.transpose(0, 1).flatten(1)

    def mean(self, sum_of_losses: Tensor, targets_Bt: Tensor, ignored: int = -100) -> Tensor:
        """This rank's share of the mean loss over all ranks' targets: an engine's mean over ranks adds the shares up.

        Collective among all ranks, as a control message. With several micro-batches to a step it is the mean of each.

        Args:
            sum_of_losses: a scalar, the sum over the targets of this rank's part.
            targets_Bt: these targets, of any shape.
            ignored: what marks a position without a target.
        """
        count = (targets_Bt != ignored).sum().to(sum_of_losses.dtype).view(1)
        with labelled(CONTROL):
            self.world.all_reduce(count).wait()
        return sum_of_losses * (self.world.world_size / count.clamp(min=1).view(()))

    # -- heads --------------------------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Generator[None]:
        """In this block each rank computes whole sequences by itself: to generate text, for one."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def require_heads(self, num_heads: int) -> None:
        """Raise UserError if the ranks cannot divide ``num_heads`` query heads."""
        rules.check_heads(self.size, num_heads)

    def copies(self, num_kv_heads: int) -> int:
        """How often each key and value head is copied: [Note: Grouped queries over ranks]."""
        return self.size // math.gcd(num_kv_heads, self.size)

    def around(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``attention`` of whole sequences, for this rank's tokens. Collective, as its backward is.

        Args:
            attention: from queries [B, H / N, T, D], keys and values [B, K', T, D] of the heads that this rank has to
                [B, T, H / N, D], causal or masked as on one rank; K' is K / N, of copies if K is no multiple.
            q: [B, H, t, D], with the positions that they have in their sequence.
            k, v: [B, K, t, D].

        Returns: [B, t, H, D].
        """
        y = attention(q, k, v) if self.is_paused else self._around(attention, q, k, v)
        self.record(q, k, v, y)
        return y

    def _exchanging(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        self.require_heads(q.shape[1])
        copies = self.copies(k.shape[1])
        if copies > 1:
            k, v = (each.repeat_interleave(copies, dim=1) for each in (k, v))
        if not q.dtype == k.dtype == v.dtype:  # of autocast, which would cast them inside of attention
            dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
            if torch.is_autocast_enabled(q.device.type):
                dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (each.to(dtype) for each in (q, k, v))
        if self.size > 1:
            q, k, v = _Exchange.apply(self, True, q, k, v)
        y = attention(q, k, v)
        if self.size == 1:
            return y
        return _Exchange.apply(self, False, y.transpose(1, 2))[0].transpose(1, 2)

    def to_heads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[B, h N, t, D] -> [B, h, T, D] of each tensor, in one all-to-all; without gradients."""
        sent, places = self._message(tensors, [each.shape[1] // self.size for each in tensors], tensors[0].shape[2])
        for each, (begin, end) in zip(tensors, places, strict=True):
            B, _, t, D = each.shape
            parts = each.reshape(B, self.size, -1, t, D).permute(1, 0, 3, 2, 4)  # [N, B, t, h, D]
            sent[..., begin:end].view(parts.shape).copy_(parts)
        got = self._exchanged(sent).transpose(0, 1).flatten(1, 2)  # [B, T, numbers of a token]; no copy if B is 1
        return tuple(
            got[..., begin:end].unflatten(-1, (-1, each.shape[-1])).transpose(1, 2)
            for each, (begin, end) in zip(tensors, places, strict=True)
        )

    def to_tokens(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """[B, h, T, D] -> [B, h N, t, D] of each tensor, in one all-to-all; without gradients."""
        sent, places = self._message(tensors, [each.shape[1] for each in tensors], tensors[0].shape[2] // self.size)
        for each, (begin, end) in zip(tensors, places, strict=True):
            B, h, _, D = each.shape
            parts = each.reshape(B, h, self.size, -1, D).permute(2, 0, 3, 1, 4)  # [N, B, t, h, D]
            sent[..., begin:end].view(parts.shape).copy_(parts)
        got = self._exchanged(sent).permute(1, 2, 0, 3)  # [B, t, N, numbers of a token]
        return tuple(
            got[..., begin:end].unflatten(-1, (-1, each.shape[-1])).flatten(2, 3).transpose(1, 2)
            for each, (begin, end) in zip(tensors, places, strict=True)
        )

    def _message(
        self, tensors: Sequence[Tensor], heads: Sequence[int], num_tokens: int
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """A message [N, B, t, numbers of a token] with ``heads`` of each tensor, and where each one's numbers are."""
        ends = [0]
        for each, num in zip(tensors, heads, strict=True):
            ends.append(ends[-1] + num * each.shape[-1])
        shape = (self.size, tensors[0].shape[0], num_tokens, ends[-1])
        return tensors[0].new_empty(shape), list(pairwise(ends))

    def _exchanged(self, sent: Tensor) -> Tensor:
        got = torch.empty_like(sent)
        with labelled(LABEL):
            all_to_all(self.comm, got.view(-1), sent.view(-1)).wait()
        return got

    # -- comparison ---------------------------------------------------------------------------------------------

    @property
    def is_comparing(self) -> bool:
        """Whether a row is being compared: `zeroshard.models.sequence_comparison`."""
        return self._recorded is not None

    def record(self, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
        """While rows are compared, note what attention was given and has returned, shaped as in `around`."""
        if self._recorded is not None:
            self._recorded.append(_summary(q, k, v, y.transpose(1, 2)))

    @contextmanager
    def recording(self) -> Generator[list[Tensor]]:
        """In this block each attention appends what it was given and has returned."""
        self._recorded = found = []
        try:
            yield found
        finally:
            self._recorded = None


class _Exchange(torch.autograd.Function):
    """Tokens to heads, or heads to tokens; backward is the other one, of the gradients that are wanted."""

    @staticmethod
    def forward(ctx: Any, sequence: SequenceParallel, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sequence, ctx.to_heads = sequence, to_heads
        return (sequence.to_heads if to_heads else sequence.to_tokens)(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = ctx.needs_input_grad[2:]
        back = ctx.sequence.to_tokens if ctx.to_heads else ctx.sequence.to_heads
        found = iter(back([grad for grad, needs in zip(grads, wanted, strict=True) if needs]))
        return None, None, *(next(found) if needs else None for needs in wanted)


def _summary(*tensors: Tensor) -> Tensor:
    """A number for each token of each tensor [B, H, T, D], a random projection of its H D numbers: [B, T, tensors]."""
    return torch.stack([_projected(each.detach()) for each in tensors], dim=-1)


def _projected(tensor_BHTD: Tensor) -> Tensor:
    _, H, _, D = tensor_BHTD.shape
    weights = torch.cos(1.7 * torch.arange(1.0, H * D + 1, device=tensor_BHTD.device)).view(H, D)
    heads = [tensor_BHTD[:, head].float() @ weights[head] for head in range(H)]  # no copy of all in fp32
    return torch.stack(heads).sum(dim=0)
