"""Remedies for a slow network: the names that a sweep takes, and the settings that each name stands for.

A name is one of these, or several that go together, with commas between them:

    none                    all ranks communicate at each step, in the compute dtype
    int8                    wire format of weights and gradients: bf16, fp16, e4m3, int8, int4, fp32
    int8,int4               weights in the first format, gradients in the second
    every=32                local steps: replicas synchronise every 32 steps
    every=32,int8           ... and send their differences in a wire format
    every=32,fragments=4    ... in fragments that synchronise at different steps; overlap=2: overlapping with two steps
    node-copy=2             stage 3: a second copy of the weights, sharded over the two ranks of a node
    int8,node-copy=2        any of these with a wire format of the first three lines
    int8,node-size=2        gradients are summed within a node of two ranks before they are sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroshard.errors import UserError
from zeroshard.train.config.validate import nearest

FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "e4m3"}
FORMATS |= {name: name for name in ("e4m3", "int8", "int4")}
# name before the "=": the setting, and its type
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
_TABLES = ("wire", "replicas", "node_copy")  # settings that only remedies may set, if a sweep has remedies


def settings_of(name: str) -> dict[str, Any]:
    """The settings that a remedy stands for, by dotted name; whether a run can have them is checked with the run.

    Raises:
        UserError: ``name`` is not a remedy.
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
            try:
                found[setting] = kind(number)
            except ValueError:
                what = f"{name!r}: {number!r} is not a {'whole number' if kind is int else 'number'}"
                raise UserError("remedies", what, f"write {key}={32 if kind is int else 0.5}") from None
        else:
            todo = nearest(key, [*FORMATS, *NUMBERS, NONE], f"choose of {', '.join([NONE, *FORMATS])}, every=32")
            raise UserError("remedies", f"{name!r}: there is no {part!r}", todo)
    if found.get("replicas.every") == 1:
        what = f"{name!r}: replicas that meet at each step take no local steps"
        raise UserError("remedies", what, "give 2 steps or more, or none")
    local = "replicas.every" in found
    most = 1 if local else 2
    if len(formats) > most:
        what = f"{name!r} has {len(formats)} formats"
        of = "local steps send differences, in one" if local else "weights have the first, gradients the second"
        raise UserError("remedies", what, f"give at most {most}: {of}")
    if formats:
        found |= {"replicas.wire": formats[0]} if local else {"wire.weights": formats[0], "wire.grads": formats[-1]}
    return found


def named(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each name with the settings that it stands for, in order.

    Raises:
        UserError: a name is not a remedy, or two names stand for the same settings.
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


def check_alone(where: str, names: Sequence[str]) -> None:
    """Raise UserError if a sweep's ``base`` or ``axes`` (``where``) sets something that remedies set."""
    for name in names:
        if name.partition(".")[0] in _TABLES:
            what = "remedies set it, and the remedy none must not have it"
            raise UserError(f"{where}.{name}", what, "leave it out, and write it as a remedy: int8, every=32")
