"""How much longer a training step on a CPU takes than its operations, each timed alone, add up to (`Device.in_step`).

A calibration repeats one operation on the same memory. In a step each operation runs once, after others have filled the
caches, with autograd, Python and the allocator in between; on small models these are a tenth of the step. The step
includes the engine with its hooks and its optimizer, over a communicator that moves nothing: collectives are measured
separately.
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

# Not one of `step.SHAPES`: a size between ``small`` and ``deep``.
SHAPE = step.Shape(n_embd=256, n_layer=3, n_head=4, vocab_size=2048, seq_len=128, batch=3)
STAGE, WORLD = 1, 2


def case() -> tuple[float, Callable[[], object]]:
    """The amount (one step) and a call that takes it: forward, backward, optimizer step."""
    cpu = torch.device("cpu")
    contestant = step.build(f"zero{STAGE}", SHAPE, {"": NullCommunicator(WORLD)}, cpu)
    tokens, targets = step.batch(SHAPE, 0, cpu)
    return 1.0, lambda: step.once(contestant, tokens, targets)


def in_step(seconds: float, device: Device) -> float:
    """The ratio of ``seconds`` (of `case`) to the compute time predicted from ``device``'s operations timed alone."""
    alone = Calibration(replace(device, in_step=1.0), Link("none", 0.0, 1.0, "no bytes are moved", num_ranks=WORLD))
    model = step.make_model(SHAPE, "meta")
    timing = predicted_step(model, STAGES[STAGE], WORLD, SHAPE.batch, SHAPE.seq_len, alone)
    return seconds / timing.compute_s
