"""Optimizer states in bfloat16 between steps: half the bytes of fp32, for any class of torch's that is element-wise.

The class computes in fp32 as ever. Its step runs unit by unit, so only one unit's states are wide at a time::

    between steps   exp_avg bf16, exp_avg_sq bf16      every unit
    in its turn     exp_avg fp32, exp_avg_sq fp32      one unit: widened, stepped, rounded

[Note: Slow moments]
    A state that changes by less than half of bfloat16's spacing (2^-9 of its value) would never change if it were
    rounded to the nearest number: AdamW's second moment, with beta2 = 0.999, moves by at most 2^-10 a step where
    gradients shrink. So states are rounded up or down at random, and the mean is right (Zamirai et al. 2020,
    https://arxiv.org/abs/2010.06192). The noise is a hash of the parameter's name, the kind of state, the element's
    place in the parameter and the parameter's own count of steps: the same bits at each stage and number of ranks, and
    after a resume. A class that counts no steps (SGD) has states that decay fast, and rounds to the nearest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.optimizer_classes.reach import OF_TORCH, Reach
from zeroshard.optimizer_classes.saved_states import SCALAR_STATES
from zeroshard.zero.core.optimizer import StepOperands
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer

FORMATS = ("fp32", "bf16")
CHUNK_NUMEL = 1 << 16  # whose noise fits a processor's cache
_KEEP_WEIGHTS = (torch.optim.ASGD, torch.optim.Rprop)  # an average of weights, and signs with step sizes


def require_format(optimizer_cls: type[Optimizer], state_format: str) -> None:
    """Raise ValueError if a class cannot keep its states in this format, or if there is no such format."""
    if state_format not in FORMATS:
        raise ValueError(f"state_format: {state_format!r} is no format; use {' or '.join(map(repr, FORMATS))}")
    if state_format == "fp32":
        return
    name = optimizer_cls.__name__
    kind = OF_TORCH.get(optimizer_cls)
    if kind is None:
        why = "it is no class of torch.optim, so it may count its steps, and cannot be run unit by unit"
    elif kind.reach is not Reach.ELEMENT_WISE:
        why = kind.reason
    elif optimizer_cls in _KEEP_WEIGHTS:
        why = "its states are no moments of gradients"
    else:
        return
    raise ValueError(f"state_format: {name} cannot keep its states in {state_format}: {why}; use 'fp32'")


class NarrowStates(StepOperands):
    """Widens the states of an optimizer's pieces to fp32 for their step, and rounds them to bfloat16 after it."""

    def __init__(self, piecewise: PiecewiseOptimizer) -> None:
        self._of = piecewise
        self._brought: list[nn.Parameter] = []
        self._seen: Any = None  # the list of pieces that `_places` is of
        self._places: dict[nn.Parameter, tuple[str, int]] = {}

    def elsewhere(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that a step updates: states that it makes are rounded as well."""
        return [piece for piece in pieces if piece.grad is not None and piece.dtype == torch.float32]

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Widen the states that there are."""
        for piece in pieces:
            state = self._of.optimizer.state.get(piece, {})
            for kind in _narrowed(piece, state, torch.bfloat16):
                state[kind] = state[kind].float()
        self._brought = [*self._brought, *pieces]

    def take_back(self) -> None:
        """Round what was widened, and what the step has made."""
        brought, self._brought = self._brought, []
        for piece in brought:
            self._round(piece)

    def loaded(self) -> None:
        """Round the states that were loaded: those that were saved in bfloat16 become the same numbers again."""
        exact = True
        for pieces in self._of.pieces:
            for piece in pieces:
                wide = {**self._of.optimizer.state.get(piece, {})}
                self._round(piece)
                now = self._of.optimizer.state.get(piece, {})
                kinds = _narrowed(piece, now, torch.bfloat16)
                exact = exact and all(torch.equal(now[kind].float(), wide[kind].float()) for kind in kinds)
        if not exact:
            what = "the loaded states are rounded to bf16, in which this optimizer keeps them (state_format)"
            warnings.warn(f"optimizer: {what}", stacklevel=2)

    def _round(self, piece: nn.Parameter) -> None:
        state = self._of.optimizer.state.get(piece, {})
        for kind in _narrowed(piece, state, torch.float32):
            step = state.get("step")
            if step is None:
                state[kind] = state[kind].to(torch.bfloat16)
            else:
                name, first = self._place(piece)
                state[kind] = rounded(state[kind], crc32(f"{name}/{kind}".encode()), step, first)

    def _place(self, piece: nn.Parameter) -> tuple[str, int]:
        """The name of the piece's parameter, and where the piece begins in it."""
        if self._seen is not self._of.pieces:
            self._seen, self._places = self._of.pieces, {}
            for group in self._of.slots:
                names = [slot.name for slot in group.params.layout.slots]
                shards = getattr(group, "shards_now", group.shards)
                for own, shard in zip(group.params.pieces, shards, strict=True):
                    self._places[shard] = names[own.slot], own.interval[0]
        return self._places[piece]


def _narrowed(piece: nn.Parameter, state: Mapping[str, Any], dtype: torch.dtype) -> list[str]:
    """The kinds of state that have this dtype and a number for each element."""
    return [
        kind
        for kind, value in state.items()
        if isinstance(value, Tensor)
        and value.dtype == dtype
        and value.shape == piece.shape
        and kind not in SCALAR_STATES
    ]


@torch.no_grad()
def rounded(values: Tensor, key: int, step: Tensor | float, first: int) -> Tensor:
    """Round to bfloat16, up or down at random: [Note: Slow moments].

    Args:
        values: fp32 [numel]; NaN and Inf stay so.
        key: of the parameter and the kind of state, below 2^32.
        step: the parameter's count of steps.
        first: the place of the first element in its parameter.

    Returns:
        bfloat16 [numel].
    """
    found = torch.empty_like(values, dtype=torch.bfloat16)
    step = step.to(torch.int64) if isinstance(step, Tensor) and step.is_cuda else int(step)
    for start in range(0, values.numel(), CHUNK_NUMEL):
        part = values[start : start + CHUNK_NUMEL].contiguous()
        bits = _noise(part, _signed((first + start) * _STRIDE + key + step * 0x85EBCA77))
        bits.add_(part.view(torch.int32)).bitwise_and_(-65536)
        found[start : start + CHUNK_NUMEL] = torch.where(part.isfinite(), bits.view(torch.float32), part)
    return found


_STRIDE = 0x9E3779B1  # odd: neighbours get words that are far apart


def _noise(part: Tensor, begin: Any) -> Tensor:
    """Numbers from 0 to 65535, int32 [numel]: hashes of ``begin`` and so on by `_STRIDE`; products keep 32 bits."""
    word = torch.arange(part.numel(), dtype=torch.int32, device=part.device).mul_(_signed(_STRIDE)).add_(begin)
    shifted = torch.empty_like(word)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):  # Wellons 2018, "Prospecting for hash functions"
        word.bitwise_xor_(torch.bitwise_right_shift(word, shift, out=shifted)).mul_(factor)
    return word.bitwise_xor_(torch.bitwise_right_shift(word, 15, out=shifted)).bitwise_and_(0xFFFF)


def _signed(word: Any) -> Any:
    """The low 32 bits of an int, or of an int64 tensor, as a signed number."""
    return ((word + 2**31) & 0xFFFFFFFF) - 2**31
