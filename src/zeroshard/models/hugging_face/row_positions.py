"""Positions of tokens in rows that ranks share: those that a model of `transformers` gives to whole rows.

[Note: Rotary embeddings that follow the length]
    longrope and dynamic NTK choose their frequencies by the largest position that they are given, and a rank's part has
    not the row's. So a rotary embedding (a module without parameters that takes ``position_ids``) is given one position
    more, the row's largest, and what it computes for it is dropped. So it is too where backward calls it again.

[Note: Positions that a model makes]
    Most count 0, 1, ... from the row's first token. RoBERTa's count from the id of padding on, and leave padding out.
    OPT's leave out what the attention mask does, so a mask without positions is refused.

[Note: Temperatures by position]
    Llama 4 scales queries by their positions, which it counts from the number of tokens in its cache. Its attention is
    given a cache that holds the tokens of earlier ranks, as far as their number goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.data.base import part_of
from zeroshard.host.errors import UserError
from zeroshard.host.torch_internals import own_buffers
from zeroshard.models.ulysses import SequenceParallel, cannot_share


def by_name(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward, by name."""
    return dict(zip(_parameters(type(module).forward), args, strict=False)) | named


@cached
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def takes(module: nn.Module, name: str) -> bool:
    """Whether forward has an argument of this name."""
    return name in _parameters(type(module).forward)


def positions_in_rows(hf: nn.Module, given: dict[str, Any], sequence: SequenceParallel) -> Tensor:
    """The positions [1 or B, t] that ``hf`` gives to a rank's tokens, were it given whole rows.

    See [Note: Positions that a model makes].

    Args:
        given: the arguments of its forward; no positions among them.
        sequence: the ranks; collective, if the model makes positions of ids.
    """
    ids = given.get("input_ids")
    tokens: Tensor = ids if ids is not None else given["inputs_embeds"]
    for module in hf.modules():
        make: Any = getattr(module, "create_position_ids_from_input_ids", None)
        if ids is not None and make is not None:
            return part_of(make(sequence.gather(ids), module.padding_idx), sequence.rank, sequence.size)
        masked = isinstance(module, nn.Embedding) and takes(module, "attention_mask")
        if masked and given.get("attention_mask") is not None:
            what = f"a {type(hf).__name__} makes positions of the attention mask, and has a part of it"
            raise UserError("position_ids", what, "give it each token's position in its row")
    first = sequence.first(tokens.shape[1])
    return torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]


class _EarlierTokens:
    """The tokens of a row before a rank's part, in place of a cache: their number alone."""

    def __init__(self, num: int) -> None:
        self._num = num

    def get_seq_length(self, layer: int = 0) -> int:
        """Their number."""
        return self._num

    def update(self, keys: Tensor, values: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Keys and values as they are."""
        return keys, values


def count_earlier_tokens(hf: nn.Module) -> None:
    """Have attention that scales by positions count those of earlier ranks: [Note: Temperatures by position]."""
    for module in hf.modules():
        if getattr(module, "attn_temperature_tuning", False) and takes(module, "past_key_values"):
            module.register_forward_pre_hook(_count, with_kwargs=True)


def _count(attention: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    sequence: SequenceParallel = attention._shared_sequence  # ty: ignore[invalid-assignment]
    given = by_name(attention, args, named)
    if sequence.is_paused:
        return args, named
    return (), given | {"past_key_values": _EarlierTokens(sequence.first(given["hidden_states"].shape[1]))}


def rotary_embeddings(hf: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``hf`` that compute with positions alone."""
    for module in hf.modules():
        if takes(module, "position_ids") and next(module.parameters(), None) is None:
            yield module


def give_largest_position(rotary: nn.Module) -> None:
    """Have a rotary embedding see the largest position of rows: [Note: Rotary embeddings that follow the length]."""
    rotary.register_forward_pre_hook(_extend, with_kwargs=True)
    rotary.register_forward_hook(_shorten, with_kwargs=True)


def _extend(rotary: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    sequence: SequenceParallel = rotary._shared_sequence  # ty: ignore[invalid-assignment]
    given = by_name(rotary, args, named)
    part = given.get("position_ids")
    if sequence.is_paused or part is None:
        return args, named
    largest = sequence.gather(part.max().view(1, 1)).max()
    return (), given | {"position_ids": torch.cat([part, largest.expand(*part.shape[:-1], 1)], dim=-1)}


def _shorten(rotary: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
    sequence: SequenceParallel = rotary._shared_sequence  # ty: ignore[invalid-assignment]
    part = by_name(rotary, args, named).get("position_ids")
    if sequence.is_paused or part is None:
        return output
    several = isinstance(output, tuple)
    found = tuple(_without_last(rotary, each, part.shape[-1]) for each in (output if several else (output,)))
    return found if several else found[0]


def _without_last(rotary: nn.Module, found: Tensor, num_positions: int) -> Tensor:
    """Factors [..., t + 1, D] of ``num_positions``, t + 1, without the last one's."""
    if found.shape[-2] != num_positions:
        what = f"a {type(rotary).__name__} returns {list(found.shape)} for {num_positions} positions"
        raise cannot_share(what)
    return found.narrow(-2, 0, num_positions - 1).contiguous()


@contextmanager
def frequencies_kept(hf: nn.Module) -> Generator[None]:
    """In this block frequencies of dynamic NTK may grow with a row; afterwards they are what they were."""
    before = [(vars(each), dict(vars(each)), own_buffers(each)) for each in rotary_embeddings(hf)]
    buffers = [dict(each) for *_, each in before]
    try:
        yield
    finally:
        for (attributes, kept, own), kept_buffers in zip(before, buffers, strict=True):
            for now, then in ((attributes, kept), (own, kept_buffers)):
                now.clear()
                now.update(then)
