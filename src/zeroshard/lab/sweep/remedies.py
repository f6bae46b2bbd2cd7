"""Remedies of a slow network by name: what a name sets in a run's configuration. Pure.

A name is one of these, or several that go together, with commas between them:

    none                    all ranks at each step, in the type that computes
    int8                    weights and gradients on their way: bf16, fp16, e4m3, int8, int4, fp32
    int8,int4               weights in the first, gradients in the second; int4-delta,int4 at stages 1 and 2
    every=32                local steps: replicas meet every 32 steps
    every=32,int8           ... and their differences travel in a format
    every=32,fragments=4    ... in parts that meet at different steps; with overlap=2 while two steps compute
    node-copy=2             stage 3: a second copy of weights over a node's two ranks
    int8,node-copy=2        any of these with the first three
    int8,node-size=2        gradients are added up inside a node of two before they travel
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroshard.errors import UserError
from zeroshard.train.config.validate import nearest

FORMATS = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e4m3": "e4m3",
    "fp8": "e4m3",
    "int8": "int8",
    "int4": "int4",
    "int4-delta": "int4-delta",
}
# name of a number: the setting, and its type
NUMBERS: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "every": ("replicas.every", int),
    "fragments": ("replicas.fragments", int),
    "overlap": ("replicas.overlap_steps", int),
    "mixing": ("replicas.mixing", float),
    "outer-lr": ("replicas.outer_lr", float),
    "outer-momentum": ("replicas.outer_momentum", float),
    "block": ("wire.block", int),
    "node-copy": ("node_copy", int),
    "node-size": ("wire.node_size", int),
}
NONE = "none"
_TABLES = ("wire", "replicas", "node_copy")  # what remedies set, and nobody beside them


def settings_of(name: str) -> dict[str, Any]:
    """What a remedy sets, by dotted names of settings; whether a run can have it is for the run's settings to say.

    Raises:
        UserError: it is no remedy.
    """
    parts = [part.strip() for part in name.split(",")]
    if parts == [NONE]:
        return {}
    formats: list[str] = []
    found: dict[str, Any] = {}
    for part in parts:
        key, has_number, number = part.partition("=")
        if part in FORMATS:
            formats.append(FORMATS[part])
        elif has_number and key in NUMBERS:
            setting, kind = NUMBERS[key]
            if setting in found:
                raise UserError("remedies", f"{name!r} has {key} twice", "leave one of both out")
            found[setting] = _number(name, key, number, kind)
        else:
            todo = nearest(key, [*FORMATS, *NUMBERS, NONE], f"choose of {', '.join([NONE, *FORMATS])}, every=32")
            raise UserError("remedies", f"{name!r}: there is no {part!r}", todo)
    if found.get("replicas.every") == 1:
        what = f"{name!r}: replicas that meet at each step take no local steps"
        raise UserError("remedies", what, "give 2 steps or more, or none")
    return {**found, **_formats(name, formats, local="replicas.every" in found)}


def named(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each name with what it sets, in order.

    Raises:
        UserError: one is no remedy, or two are the same.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        settings = settings_of(name)
        same = next((other for other, theirs in found.items() if theirs == settings), None)
        if same is not None:
            what = f"{name!r} is given twice" if same == name else f"{name!r} is {same!r} in other words"
            raise UserError("remedies", what, "leave one of both out")
        found[name] = settings
    return found


def in_a_line(name: str, settings: Mapping[str, Any]) -> str:
    """``int8: wire.weights = int8, wire.grads = int8``."""
    return f"{name}: {', '.join(f'{key} = {value}' for key, value in settings.items()) or 'nothing is set'}"


def check_alone(where: str, names: Sequence[str]) -> None:
    """Raise UserError where a sweep's ``base`` or ``axes`` (``where``) sets what remedies set."""
    for name in names:
        if name.partition(".")[0] in _TABLES:
            what = "remedies set it, and none would not be none with it"
            raise UserError(f"{where}.{name}", what, "leave it out, and write it as a remedy: int8, every=32")


def _formats(name: str, formats: Sequence[str], *, local: bool) -> dict[str, Any]:
    most = 1 if local else 2
    if len(formats) > most:
        what = f"{name!r} has {len(formats)} formats"
        of = "local steps send differences, in one" if local else "weights have the first, gradients the second"
        raise UserError("remedies", what, f"give at most {most}: {of}")
    if not formats:
        return {}
    if local:
        return {"replicas.wire": formats[0]}
    return {"wire.weights": formats[0], "wire.grads": formats[-1]}


def _number(name: str, key: str, number: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(number)
    except ValueError:
        what = f"{name!r}: {number!r} is not a {'whole number' if kind is int else 'number'}"
        raise UserError("remedies", what, f"write {key}={32 if kind is int else 0.5}") from None
