"""A whole step on a CPU: how much longer it takes than what its operations take alone (`Device.in_step`).

A calibration takes one operation again and again, on the same memory. In a step each comes once, after others that have
had the caches, and autograd, Python and the allocator come between; on small models that is a tenth of the step. The
engine takes part, hooks and optimizer included, over a communicator that moves nothing, so that collectives, which are
measured by themselves, have no part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from zeroshard.comm import NullCommunicator
from zeroshard.lab.bench import step
from zeroshard.lab.planner.run_plan import predicted_step
from zeroshard.lab.predict.hardware import Calibration, Device, Link
from zeroshard.zero import STAGES

# A model that is none of `step.SHAPES`, between its small and its deep one.
SHAPE = step.Shape(n_embd=256, n_layer=3, n_head=4, vocab_size=2048, seq_len=128, batch=3)
STAGE, WORLD = 1, 2


def case() -> tuple[float, Callable[[], object]]:
    """One, and a step: forward, backward, the optimizer's part."""
    cpu = torch.device("cpu")
    contestant = step.build(f"zero{STAGE}@null", SHAPE, {"null": NullCommunicator(WORLD)}, cpu)
    tokens, targets = step.batch(SHAPE, 0, cpu)
    return 1.0, lambda: step.once(contestant, tokens, targets)


def in_step(seconds: float, device: Device) -> float:
    """``seconds`` of `case` over what ``device``'s operations, each as long as alone, add up to."""
    alone = Calibration(replace(device, in_step=1.0), Link("none", 0.0, 1.0, "no bytes are moved", num_ranks=WORLD))
    model = step.make_model(SHAPE, "meta")
    timing = predicted_step(model, STAGES[STAGE], WORLD, SHAPE.batch, SHAPE.seq_len, alone)
    return seconds / timing.compute_s
