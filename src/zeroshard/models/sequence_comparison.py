"""Comparison of a row that ranks share with the same row on each rank: what attention is given, and what it returns.

A model may compute with the length of a row where nobody looks: other rotary frequencies beyond a length, queries
scaled by the logarithm of the number of tokens, masks that it makes itself, layers that mix tokens. A rank's part has
another length. So ranks compute a row of the run's own length once together and once each by itself, and compare
queries, keys, values and outputs of each attention, for the rank's own tokens:

    difference = |part - whole| / |whole|      of one random projection for each token, over tokens

Rotations, scales and masks change these by their own size, however small a model's initial weights are and whatever
they do to logits. A short row is compared first, and its output too: what mixes few tokens, or behind the last
attention, is seen there. Logits of a long row are not computed: they would take more memory than the model.

[Note: Rounding]
    Products of other shapes round in another order, which grows from block to block. What values differ by at an
    attention is the rounding up to there, as no model turns or scales values by positions: queries, keys and outputs
    may differ by some times that. At the first attention next to nothing may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm import NullCommunicator, PeerError
from zeroshard.comm.agree import by_rank
from zeroshard.data.base import part_of
from zeroshard.host.errors import UserError, is_out_of_memory
from zeroshard.host.uncompiled import eagerly
from zeroshard.models.ulysses import SequenceParallel, cannot_share

LONGEST_ROW = 32_768
"""Tokens of the longest row that each rank computes whole; of a longer one, as many, with positions up to its end."""

SHORT_PART = 8
"""Tokens of a rank's part of the short row, at most."""

Run = Callable[[Tensor, Tensor | None, bool], Tensor | None]

_NAMES = ("queries", "keys", "values", "outputs")
_VALUES = _NAMES.index("values")
_TIMES_VALUES = 4
_MILLION = 10**6  # ranks tell each other differences in millionths


class _Rounding(NamedTuple):
    """Differences that are taken for rounding: [Note: Rounding]."""

    at_first: float  # attention
    later: float  # at most, where values differ as well
    of_output: float


_FP32, _NARROW = _Rounding(1e-3, 1e-2, 1e-3), _Rounding(1e-2, 0.1, 0.1)


def can_compare(sequence: SequenceParallel, tokens: Tensor) -> bool:
    """Whether several ranks share rows, and ``tokens`` have values: not in a plan's trace."""
    is_real = not (tokens.is_meta or isinstance(tokens, FakeTensor))
    return is_real and sequence.size > 1 and not isinstance(sequence.comm, NullCommunicator)


@torch.no_grad()
def require_same(
    model: nn.Module,
    sequence: SequenceParallel,
    run: Run,
    num_tokens: int,
    vocab_size: int,
    device: torch.device,
) -> None:
    """Raise a UserError if ranks that share a row compute something else than one rank. Collective.

    Args:
        model: the model, whose modules are in evaluation mode meanwhile.
        run: computes the model, given tokens [1, T], positions (None: those that it makes), and whether to return its
            output [1, T, ...]: of whole rows where the sequence is paused, else of this rank's part.
        device: where they are.
    """
    short = min(num_tokens, SHORT_PART * sequence.size)
    is_narrow = torch.is_autocast_enabled(device.type) or any(p.dtype != torch.float32 for p in model.parameters())
    wrong, num_attentions = None, 0
    with _evaluating(model), eagerly():
        for length in dict.fromkeys((short, num_tokens)):
            # a model that does not call `SequenceParallel.around` is compared by its output alone
            wants_output = length == short or num_attentions == 0
            rows = _computed(model, sequence, run, length, vocab_size, device, wants_output)
            num_attentions = len(rows.parts)
            wrong = _first_difference(sequence, rows, _NARROW if is_narrow else _FP32)
            if wrong is not None:
                what = f"the ranks of a sequence compute other {wrong} than one rank, in a row of {length:,} tokens"
                raise cannot_share(f"{what} of a {type(model).__name__}")
    sequence.num_compared += 1


@dataclass(frozen=True)
class _Computed:
    """What a rank has computed of its tokens: as a part, and of the whole row. Of each attention, and the output."""

    parts: list[Tensor]
    whole: list[Tensor]
    output_of_part: Tensor | None
    output_of_whole: Tensor | None


def _computed(
    model: nn.Module,
    sequence: SequenceParallel,
    run: Run,
    num_tokens: int,
    vocab_size: int,
    device: torch.device,
    wants_output: bool,
) -> _Computed:
    def own(rows: Tensor) -> Tensor:
        return part_of(rows, sequence.rank, sequence.size)

    length = min(num_tokens, LONGEST_ROW) // sequence.size * sequence.size
    tokens = torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    positions = None if length == num_tokens else _up_to(num_tokens, length, sequence.size).to(device)
    with sequence.paused(), sequence.recording() as whole:
        output = run(tokens, positions, wants_output)
    with sequence.recording() as parts, _said_of_parts(model):
        output_of_part = run(own(tokens), None if positions is None else own(positions), wants_output)
    return _Computed(parts, list(map(own, whole)), output_of_part, None if output is None else own(output))


def _up_to(num_tokens: int, length: int, size: int) -> Tensor:
    """Positions [1, length] in a row of ``num_tokens``: of each rank's part the first, and of the last one the last."""
    firsts = torch.arange(size) * (num_tokens // size)
    firsts[-1] = num_tokens - length // size
    return (firsts[:, None] + torch.arange(length // size)).view(1, -1)


def _first_difference(sequence: SequenceParallel, rows: _Computed, rounding: _Rounding) -> str | None:
    """What differs first, and where the most: at an attention of some rank, or in the output. Collective."""
    if len(rows.parts) != len(rows.whole):
        return f"attentions ({len(rows.parts)} and not {len(rows.whole)})"
    calls = [
        [_difference(*each) for each in zip(part.unbind(-1), whole.unbind(-1), strict=True)]
        for part, whole in zip(rows.parts, rows.whole, strict=True)
    ]
    wrong = (call for call, each in enumerate(calls) if max(each) > _allowed(call, each, rounding))
    first = min(by_rank(sequence.comm, next(wrong, len(calls))))
    if first < len(calls):
        largest, name = max((each, name) for name, each in enumerate(calls[first]))
        _, name, where = _most(sequence, largest, name)
        return f"{_NAMES[name]} in attention {first + 1} ({where})"
    if rows.output_of_part is None or rows.output_of_whole is None:
        return None
    by, _, where = _most(sequence, _difference(rows.output_of_part, rows.output_of_whole, p=math.inf))
    return f"output ({where})" if by > rounding.of_output else None


def _allowed(call: int, differences: list[float], rounding: _Rounding) -> float:
    later = min(_TIMES_VALUES * differences[_VALUES], rounding.later) if call else 0.0
    return max(rounding.at_first, later)


def _difference(part: Tensor, whole: Tensor, p: float = 2.0) -> float:
    """|part - whole| / |whole| by this norm; numbers that are NaN/Inf in both are left out."""
    used = torch.isfinite(part) | torch.isfinite(whole)
    change, size = (float(torch.linalg.vector_norm(each[used].float(), p)) for each in (part - whole, whole))
    return change / max(size, 1e-30) if math.isfinite(change) else math.inf


def _most(sequence: SequenceParallel, difference: float, label: int = 0) -> tuple[float, int, str]:
    """The largest difference of a rank, its label, and both in words. Collective."""
    by_rank_number = by_rank(sequence.comm, int(min(difference, _MILLION) * _MILLION) * len(_NAMES) + label)
    rank = max(range(sequence.size), key=by_rank_number.__getitem__)
    millionths, label = divmod(by_rank_number[rank], len(_NAMES))
    return millionths / _MILLION, label, f"by {millionths / _MILLION:.1%} on rank {rank}".replace("%", " %")


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """In this block all modules are in evaluation mode."""
    training = [each for each in model.modules() if each.training]
    model.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True


@contextmanager
def _said_of_parts(model: nn.Module) -> Generator[None]:
    """An error in this block is one of parts, as the whole row has been computed."""
    try:
        yield
    except (UserError, PeerError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        what = f"a {type(model).__name__} computes whole rows alone ({first})"
        raise cannot_share(what) from error
