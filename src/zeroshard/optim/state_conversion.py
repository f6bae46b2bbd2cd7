"""Saved optimizer states in the form that another class keeps: fp32 states as 8-bit codes, codes as fp32 states.

A checkpoint of `zeroshard.optim.AdamW8bit` is loaded into `torch.optim.AdamW` and back, and so are those of
`FlashAdamW` and of both kinds of Muon. What is read is a view: an interval of a state is decoded, or encoded, when it
is asked for. So a load works at each stage and number of ranks, and reads no more blocks than its pieces touch.

| saved                         | the optimizer keeps           | what is read                             |
|-------------------------------|-------------------------------|------------------------------------------|
| exp_avg_codes, exp_avg_scales | exp_avg                       | the codes, decoded                       |
| exp_avg                       | exp_avg_codes, exp_avg_scales | the fp32 values, encoded in whole blocks |
| codes in blocks of 64         | codes in blocks of 256        | the codes, decoded and encoded again     |
| param in bf16, correction     | no correction                 | param: the fp32 values of both           |
| param                         | correction                    | the bits of param that bf16 has not      |

Whoever reads the weights alone, to begin another run or to export them, reads them with their corrections as well:
`FullWeights`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.kernels.adamw8bit import joined, split
from zeroshard.kernels.state_codes import (
    CODE_OF,
    CODES,
    CORRECTION,
    SCALES,
    as_codes,
    as_values,
    block_of,
    decoded,
    encoded,
    num_blocks,
)
from zeroshard.optim.classes.kept_states import CHECKPOINT, KeptStates, ParamFacts
from zeroshard.optim.classes.saved_states import may_need_conversion
from zeroshard.optim.named_shards import LAYOUT, ShardReader

_log = logging.getLogger("zeroshard.checkpoint")
_BLOCK = 256  # of a class with codes that has no setting of that name


@dataclass(frozen=True)
class _Form:
    """How the saved states of a parameter are read."""

    decode: frozenset[str]  # kinds in fp32 whose codes were saved
    encode: frozenset[str]  # kinds that were saved in fp32, or in other blocks, and whose codes are read
    joins: bool  # whether the weights are read with their corrections
    splits: bool  # whether corrections are made of the weights
    block: int  # of codes that are made
    saved_block: int  # of codes that were saved and are encoded again; 0: there are none

    @property
    def changes(self) -> bool:
        """Whether it differs from what was saved."""
        return bool(self.decode or self.encode or self.joins or self.splits)


def _form(saved: Mapping[str, tuple[int, ...]], kept: Iterable[str], block: int) -> _Form:
    """The form in which the ``saved`` kinds of state, with their shapes, are those that are ``kept``."""
    kept = frozenset(kept)
    decode = {kind for kind in CODE_OF if kind in kept - saved.keys() and kind + CODES in saved.keys() - kept}
    encode = {kind for kind in CODE_OF if kind in saved.keys() - kept and kind + CODES in kept - saved.keys()}
    saved_block = 0
    for kind in (kind for kind in CODE_OF if kind + CODES in saved.keys() & kept):
        numel, num_scales = prod(saved[kind + CODES]), prod(saved.get(kind + SCALES, ()))
        if num_scales != num_blocks(numel, block):
            saved_block = block_of(numel, num_scales)
            encode.add(kind)
    joins = _keeps_correction(saved) and bool(kept) and CORRECTION not in kept
    splits = _keeps_correction(kept) and CORRECTION not in saved
    return _Form(frozenset(decode), frozenset(encode), joins, splits, block, saved_block)


def _keeps_correction(kinds: Iterable[str]) -> bool:
    return {CORRECTION, "exp_avg" + CODES}.issubset(kinds)  # another class may have a state that is called correction


class FullWeights:
    """A `ShardReader` that shows weights with the further bits that `FlashAdamW` keeps of them: fp32 in place of bf16.

    Rounded to bf16 they are the weights that were saved: a correction that ends half way to the bf16 number below is
    shortened by a unit, 2^-16 of the weight. Other weights, and the states, are shown as they were saved.
    """

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """See `ShardReader.kinds`."""
        return self._reader.kinds(name)

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """See `ShardReader.read`."""
        values = self._reader.read(name, kind, interval)
        if kind == "param" and _keeps_correction(self._reader.kinds(name)):
            return joined(values, self._reader.read(name, CORRECTION, interval).clamp_(min=-127))
        return values


class _Converted:
    """A `ShardReader` that shows states in other forms, by the parameter's name."""

    def __init__(self, reader: ShardReader, forms: Mapping[str, _Form]) -> None:
        self._reader, self._forms = reader, forms
        self.param_groups: Sequence[Mapping[str, Any]] = getattr(reader, "param_groups", ())

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """See `ShardReader.kinds`."""
        found, form = dict(self._reader.kinds(name)), self._forms.get(name)
        if form is None:
            return found
        for kind in form.decode:
            found[kind] = found.pop(kind + CODES)
            del found[kind + SCALES]
        for kind in form.encode:
            found[kind + CODES] = shape = found.pop(kind) if kind in found else found[kind + CODES]
            found[kind + SCALES] = (num_blocks(prod(shape), form.block),)
        if form.joins:
            del found[CORRECTION]
        return found | ({CORRECTION: found["param"]} if form.splits else {})

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """See `ShardReader.read`."""
        form, read = self._forms.get(name), partial(self._reader.read, name)
        if form is None:
            return read(kind, interval)
        if kind in form.decode:
            return self._decoded(name, kind, interval)
        of_codes = kind.removesuffix(CODES)
        if of_codes in form.encode:
            start, stop = interval
            first = start // form.block * form.block
            values = self._values(name, of_codes, (first, -(-stop // form.block) * form.block))
            return encoded(values, form.block, CODE_OF[of_codes])[0][start - first : stop - first]
        if (of_scales := kind.removesuffix(SCALES)) in form.encode:
            values = self._values(name, of_scales, (interval[0] * form.block, interval[1] * form.block))
            return encoded(values, form.block, CODE_OF[of_scales])[1]
        if kind == "param" and form.joins:
            return joined(read("param", interval), read(CORRECTION, interval))
        if kind == CORRECTION and form.splits:
            values = read("param", interval).float()
            correction = torch.empty(values.shape, dtype=torch.int8)
            split(values, torch.empty(values.shape, dtype=torch.bfloat16), correction)
            return correction
        return read(kind, interval)

    def _values(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """The fp32 values of an interval, which may reach beyond the end, of a state that is encoded."""
        kinds = self._reader.kinds(name)
        in_fp32 = kind in kinds
        stop = min(interval[1], prod(kinds[kind if in_fp32 else kind + CODES]))
        inside = min(interval[0], stop), stop
        return self._reader.read(name, kind, inside) if in_fp32 else self._decoded(name, kind, inside)

    def _decoded(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        kinds, (start, stop) = self._reader.kinds(name), interval
        numel = prod(kinds[kind + CODES])
        block = block_of(numel, prod(kinds[kind + SCALES]))
        blocks = start // block, num_blocks(stop, block)
        first, last = blocks[0] * block, min(blocks[1] * block, numel)
        codes = self._reader.read(name, kind + CODES, (first, max(first, last)))
        scales = self._reader.read(name, kind + SCALES, (blocks[0], max(blocks)))
        values = decoded(codes, scales[: num_blocks(len(codes), block)], block, CODE_OF[kind])
        return values[start - first : stop - first]


def as_kept(
    make: partial[Optimizer],
    groups: Iterable[tuple[Mapping[str, Any], Sequence[ParamFacts]]],
    reader: ShardReader,
    *,
    say: bool,
) -> ShardReader:
    """Return a view of ``reader`` in which states have the form that an optimizer keeps; ``reader`` if they have it.

    Args:
        make: makes another optimizer of the class and settings.
        reader: reads what was saved.
        say: whether to log a line about what is converted (the logger is ``zeroshard.checkpoint``).
    """
    forms: dict[str, _Form] = {}
    for settings, params in groups:
        kept = KeptStates(make, settings, None, CHECKPOINT)
        for param in params:
            saved = reader.kinds(param.name)
            if may_need_conversion(make, saved):
                form = _form(saved, kept.kinds(param), settings.get("block", _BLOCK))
                forms |= {param.name: form} if form.changes else {}
    if not forms:
        return reader
    if say:
        _log.warning("load: %s", _sentence(forms.values(), cast("type[Optimizer]", make.func).__name__))
    return _Converted(reader, forms)


def _sentence(forms: Iterable[_Form], name: str) -> str:
    """What is converted, in one line."""
    forms = list(forms)
    decode, encode = ({kind for form in forms for kind in getattr(form, how)} for how in ("decode", "encode"))
    done: list[str] = []
    if decode:
        done.append(f"{_listed(decode)} decoded from 8-bit codes")
    if encode:
        before = max(form.saved_block for form in forms)
        of = f" instead of {before}, which rounds them again" if before else ", which rounds them to 8 bits"
        done.append(f"{_listed(encode)} encoded in blocks of {forms[0].block}{of}")
    if any(form.joins for form in forms):
        done.append("weights in bf16 joined with their corrections of 8 bits")
    if any(form.splits for form in forms):
        done.append("weights split into bf16 and corrections of 8 bits")
    return f"states are converted to those of {name}: {'; '.join(done)}"


def _listed(kinds: Iterable[str]) -> str:
    return " and ".join(sorted(kinds))


def state_dict_as_kept(
    make: partial[Optimizer],
    groups: Iterable[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    facts: Mapping[Any, ParamFacts],
) -> dict[str, Any]:
    """Do as `as_kept` for an unsharded state dict, which has no weights: corrections are left out, or are zero.

    Args:
        make: makes another optimizer of the class and settings.
        groups: the optimizer's param groups.
        state_dict: in torch's format; it is not changed.
        facts: the parameters, by their keys in it.
    """
    states, options = dict(state_dict["state"]), list[dict[str, Any]]()
    for own, saved in zip(groups, state_dict["param_groups"], strict=True):
        kept, changed = KeptStates(make, own, None, CHECKPOINT), False
        for key in saved["params"]:
            state = states.get(key, {})
            if may_need_conversion(make, state):
                shapes = {kind: tuple(value.shape) for kind, value in state.items() if isinstance(value, Tensor)}
                form = _form(dict.fromkeys(state, ()) | shapes, kept.kinds(facts[key]), own.get("block", _BLOCK))
                changed |= form.changes
                states[key] = _in_form(state, form)
        known = own.keys() | {"params", "param_names"}
        found = {**own, **{key: saved[key] for key in saved.keys() & known}} if changed else saved
        options.append({**found, **{key: own[key] for key in own.keys() & LAYOUT}})
    return {**state_dict, "state": states, "param_groups": options}


def _in_form(state: Mapping[str, Any], form: _Form) -> Mapping[str, Any]:
    if form.encode:
        state = as_codes(as_values(state), form.block)
    if form.decode:
        state = as_values(state)
    if form.joins:
        state = {kind: value for kind, value in state.items() if kind != CORRECTION}
    if form.splits:
        state = {**state, CORRECTION: torch.zeros_like(state["exp_avg" + CODES])}
    return state
