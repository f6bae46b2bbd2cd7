"""Long sequences on one GPU: adapters of a model of Qwen3-8B's shape, inputs of its blocks on the host, and tiles.

Steps of 16k and 32k tokens, and then longer ones, until the first that does not fit. On a whole H100 the longest step
would take longer than the machine is lent for. So torch gets the memory of a smaller card: the smallest for which
`zeroshard plan` says that `LONGEST` tokens fit.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rows
import torch
from qwen_shapes import QWEN3, QWEN3_ALIKE, QWEN3_TOY
from torch import Tensor

from zeroshard.comm import LocalCommunicator
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import HEADROOM, planner_for
from zeroshard.lab.predict.hardware import Device
from zeroshard.models import LanguageModel, build_model
from zeroshard.models.adapters import Lora
from zeroshard.train.profiling.memory import AllocationRecorder
from zeroshard.zero import Zero

NAME, LORA = "qwen3-8b", Lora(16)
LENGTHS = (16, 32) if rows.TOY else (16_384, 32_768)
LONGEST = 48 if rows.TOY else 65_536
LONGER = (1.0, 1.05, 1.1, 1.2)  # of `LONGEST`, in order
TILES = "2" if rows.TOY else "auto"
CONFIG: dict[str, Any] = QWEN3_ALIKE | {"max_position_embeddings": 2**20} | (QWEN3_TOY if rows.TOY else QWEN3[NAME])
TOY_DEVICE = Device("a rehearsal", 2**40, dict.fromkeys(("float32", "bfloat16"), 1e12), 1e11, "", device_type="cpu")
OVERRIDES = {"from_config": True, "activation_checkpointing": "offload", "tiles": TILES}


def steps(budget: rows.Budget, say: rows.Say) -> None:
    """Say seconds and peaks by length; the last one is the longest that fits into the memory for `LONGEST` tokens."""
    longest = planned(LONGEST)
    memory = round(longest.needed_bytes / (1 - HEADROOM))
    step, zero = _training()
    for tokens in LENGTHS:
        case = f"{NAME}, {tokens} tokens"
        with rows.losing_itself_alone(say, case):
            step(*_batch(tokens))  # the kernels, the states and the host's slots
            for index in budget.rounds(1, 2):
                say(case=case, tokens=tokens, round=index, **_measured(step, zero, tokens))
        rows.cleared()
    say(case="memory", card_bytes=memory, planned_tokens=LONGEST)
    if rows.ON_GPU:  # a context, as planned, is outside of what torch may allocate
        total = torch.cuda.get_device_properties(rows.DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction((memory - longest.process.context) / total)
    for tokens in (round(LONGEST * each / 16) * 16 for each in LONGER):
        case = f"{NAME}, {tokens} tokens, in the memory for {LONGEST}"
        if budget.spent():
            say(case=case, left_out="no time was left")
            break
        try:
            say(case=case, limited=True, tokens=tokens, **_measured(step, zero, tokens))
        except torch.OutOfMemoryError:
            say(case=case, limited=True, tokens=tokens, out_of_memory=True)
            break
        rows.cleared()


def _batch(num_tokens: int) -> tuple[Tensor, Tensor]:
    return rows.batch(1, CONFIG["vocab_size"], seq_len=num_tokens)


def _training() -> tuple[Callable[[Tensor, Tensor], None], Zero]:
    """A step of tokens and targets, and its engine."""
    with _folder() as folder:
        build = lambda: build_model(f"hf:{folder}", overrides=OVERRIDES, lora=LORA)  # noqa: E731
        model = rows.filled(lambda: _narrow(build()))
    zero = Zero(model, 1, units=model.units, comm=LocalCommunicator(), precision=rows.BF16)
    optimizer = zero.optimizer(torch.optim.AdamW, **rows.ADAMW, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        model(tokens, targets).backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, zero


def _narrow(model: LanguageModel) -> LanguageModel:
    """What is frozen in bfloat16, as it is computed with, so that it never takes the double."""
    for param in model.parameters():
        if not param.requires_grad:
            param.data = param.data.bfloat16()
    return model


def _measured(step: Callable[[Tensor, Tensor], None], zero: Zero, num_tokens: int) -> dict[str, Any]:
    """Seconds of a step and its peak, in bytes that tensors take."""
    given = _batch(num_tokens)
    if not rows.ON_GPU:
        recorder = AllocationRecorder(zero.holdings, mapped=False)  # slots of inputs are the host's
        began = time.perf_counter()
        with recorder:
            step(*given)
        recorder.remove()
        return {"step_s": time.perf_counter() - began, "peak_bytes": recorder.peak.num_bytes}
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step(*given)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    return {"step_s": took, "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved()}  # fmt: skip


@functools.cache
def planned(tokens: int, gpu: str = "h100-80gb") -> Row:
    """The plan of a step; ``gpu``: as `zeroshard plan` takes it, in a rehearsal a CPU."""
    with _folder() as folder:
        return planner_for(
            f"hf:{folder}",
            gpu=TOY_DEVICE if rows.TOY else gpu,
            seq_len=tokens,
            dtype="bfloat16",
            impl="kernels",  # the run calls the model, which it does not compile
            lora=LORA,
            overrides=OVERRIDES,
        ).row(1, 1)


def _folder() -> tempfile.TemporaryDirectory[str]:
    found = tempfile.TemporaryDirectory()
    Path(found.name, "config.json").write_text(json.dumps(CONFIG))
    return found
