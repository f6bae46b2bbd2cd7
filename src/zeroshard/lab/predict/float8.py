"""Plans products of blocks in 8 bits, as `zeroshard train --dtype fp8` computes them.

They take `FP8_TIME` of their time: torchao's float8 with tensorwise scales trains Llama 3 8B on 8 H100 1.25 times as
fast (docs.pytorch.org/ao, "Quantized Training"). Activations, weights and collectives stay in 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from zeroshard.errors import UserError
from zeroshard.lab.predict.actions import Action, Compute, Step
from zeroshard.lab.predict.work import Work
from zeroshard.profiling.devices import Device

FP8_TIME = 0.67
_HOPPER_AND_LATER = ("h100", "h200", "h800", "h20", "b200", "b300", "gb200", "gb300", "l4", "l20", "l40s")
FP8_DEVICES = (*_HOPPER_AND_LATER, "rtx-4090", "rtx-5090", "rtx-6000-ada", "rtx-pro-6000", "mi300x", "mi325x", "mi355x")


def require_float8(device: Device) -> None:
    """Raise UserError unless ``device`` has such products, by its name in the table or as its driver reports it."""
    words = set(re.split(r"[^a-z0-9]+", device.name.lower()))
    if not any(words.issuperset(each.split("-")) for each in FP8_DEVICES):
        what = f"{device.name} has no products of 8-bit floating point"
        raise UserError("dtype", what, f"choose bfloat16, or one of {', '.join(FP8_DEVICES)}")


def in_float8(step: Step, vocab_size: int) -> Step:
    """``step`` with products of blocks in 8 bits.

    ``vocab_size``: identifies the products of the head, which stay in 16 bits; 0: the model has no head.
    """
    known: dict[int, tuple[Work, ...]] = {}  # actions of alike blocks share their work, and so does the result

    def changed(actions: Sequence[Action]) -> list[Action]:
        return [_changed(action) if isinstance(action, Compute) else action for action in actions]

    def _changed(action: Compute) -> Compute:
        if id(action.work) not in known:
            known[id(action.work)] = tuple(_faster(work, vocab_size) for work in action.work)
        return replace(action, work=known[id(action.work)])

    return replace(step, first=changed(step.first), middle=changed(step.middle), last=changed(step.last))


def _faster(work: Work, vocab_size: int) -> Work:
    in_block = work.shape and not work.attention and vocab_size not in work.shape
    return replace(work, flops=round(work.flops * FP8_TIME)) if in_block else work
