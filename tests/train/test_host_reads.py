"""How often a step reads a tensor on the host: on a GPU each is a wait for all that was queued."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.train.loop import loop

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "numpy")
WAITED_FOR = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "bincount")
ON_THE_CPU_ALONE = {"grad_norm.clip_", "shown.refuse_touched"}  # what lies on a device is not read there


class _Places(defaultdict):
    """Reads by thread.

    Attributes:
        own_checks: those of `ON_THE_CPU_ALONE`.
    """

    def __init__(self):
        super().__init__(list)
        self.own_checks = defaultdict(list)


@pytest.fixture
def reads(monkeypatch):
    """Where tensors were read, as ``file.function``, by thread."""
    places = _Places()

    def counting(name):
        whole = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            frame = sys._getframe(1)
            while frame and "zeroshard" not in frame.f_code.co_filename:
                frame = frame.f_back
            place = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}" if frame else "elsewhere"
            kept = places.own_checks if place in ON_THE_CPU_ALONE else places
            kept[threading.get_ident()].append(place)
            return whole(tensor, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return places


class _Dispatched(TorchDispatchMode):
    """Operations that give the host a number, or a shape that depends on values: the host waits for them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket._qualified_op_name.removeprefix("aten::") in WAITED_FOR:
            self.seen.append(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_trainer_reads_loss_norm_and_wishes_to_stop_at_once(stage, tiny_config, reads, monkeypatch):
    """From the beginning of one step to that of the next: its record, log and saves included."""
    steps, take_step, here = [], loop.take_step, threading.get_ident()

    def take(*args):
        steps.append((list(reads[here]), list(reads.own_checks[here]), list(dispatched.seen)))
        for seen in (reads[here], reads.own_checks[here], dispatched.seen):
            seen.clear()
        return take_step(*args)

    monkeypatch.setattr(loop, "take_step", take)
    with _Dispatched() as dispatched:
        assert loop.run_training(tiny_config(strategy=f"zero{stage}", max_steps=8, eval_interval=100)) == 0
    assert [places for places, *_ in steps[3:]] == [["step._agree"]] * 5  # of a list, which is no operation
    assert [seen for *_, seen in steps[3:]] == [
        ["aten::_local_scalar_dense"] * len(checks) for _, checks, _ in steps[3:]
    ]
