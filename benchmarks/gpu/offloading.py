"""Steps with the optimizer's state on the host: seconds and the allocator's peak, beside those without offloading."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rows
import torch
from qwen_shapes import QWEN3, QWEN3_ALIKE, QWEN3_TOY

from zeroshard.comm import LocalCommunicator
from zeroshard.host import host_memory
from zeroshard.models import LanguageModel, build_model
from zeroshard.zero import Offload, Zero

# NVIDIA-NeMo/RL, issue 3628, has Qwen3-0.6B on one H100: 0.752 s and 15.24 GiB without offloading, 1.678 s and
# 10.53 GiB with all of the optimizer offloaded.
NAME = "qwen3-0.6b"
# Published of Qwen2.5-7B on one GPU: 13,860 tokens/s (llmq, all in bf16, not offloaded), 272 TFLOP/s (MegaTrain,
# arXiv 2604.05091).
HOST_BYTES_7B = 6.74e9 * 16  # fp32 master, two states, gradient


def offloaded(budget: rows.Budget, say: rows.Say) -> None:
    """Say seconds and peaks of steps of one and of eight micro-batches, by what is on the host."""
    micro = 1 if rows.TOY else 4
    for where, settings in (("device", None), ("host", Offload(optimizer="host", master="host", grads="host"))):
        case = f"{NAME}, optimizer on the {where}"
        if budget.spent():
            say(case=case, left_out="no time was left")
            continue
        with rows.losing_itself_alone(say, case):
            config = {**QWEN3_ALIKE, **(QWEN3_TOY if rows.TOY else QWEN3[NAME])}
            for record in _measured(budget, config, settings, micro):
                say(case=case, micro_batch=micro, **record)
        rows.cleared()


def _measured(
    budget: rows.Budget, config: dict[str, Any], settings: Offload | None, micro: int
) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        build = lambda: build_model(f"hf:{folder}", seq_len=rows.SEQ_LEN, overrides={"from_config": True})  # noqa: E731
        model = rows.filled(build)
    return _steps(budget, model, int(config["vocab_size"]), settings, micro, (1, 8))


def _steps(
    budget: rows.Budget,
    model: LanguageModel,
    vocab: int,
    settings: Offload | None,
    micro: int,
    counts: tuple[int, ...],
) -> Iterator[dict[str, Any]]:
    """Of steps of each of these numbers of micro-batches: the least seconds of two, if there is time, and the peak.

    A step waits for the update of the one before it, which takes as long whatever that one's number was.
    """
    zero = Zero(model, 1, units=model.units, comm=LocalCommunicator(), precision=rows.BF16, offload=settings)
    optimizer = zero.optimizer(torch.optim.AdamW, **rows.ADAMW, fused=True)
    tokens, targets = rows.batch(micro, vocab)

    def step(num_micro: int) -> float:
        if rows.ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        rows.synchronise()
        began = time.perf_counter()
        for index in range(num_micro):
            with zero.micro_batch(index == num_micro - 1):
                (model(tokens, targets) / num_micro).backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.synchronise()
        return time.perf_counter() - began

    step(counts[0])  # makes the states
    for num_micro in counts:
        seconds = []
        for _ in range(2):
            if not seconds or not budget.spent():
                seconds.append(step(num_micro))
        peak = torch.cuda.max_memory_allocated() if rows.ON_GPU else 0
        yield {"num_micro": num_micro, "step_s": min(seconds), "peak_bytes": peak,
               "tokens": micro * num_micro * rows.SEQ_LEN}  # fmt: skip


def seven_billion(budget: rows.Budget, say: rows.Say) -> None:
    """Say seconds, tokens/s and FLOP/s of Llama 7B, by the number of micro-batches: up to llmq's 524,288 tokens."""
    case, available = "llama-7b, optimizer on the host", host_memory.available_bytes()
    if not rows.TOY and available is not None and available < HOST_BYTES_7B:
        say(
            case=case,
            left_out=f"the host has {available / 2**30:.0f} GiB left, and {HOST_BYTES_7B / 2**30:.0f} are needed",
        )
        return
    micro, overrides = (1, {**rows.TINY, "n_kv_head": 2}) if rows.TOY else (4, {})
    counts = (1, 2) if rows.TOY else (2, 8, 32, 128)
    with rows.losing_itself_alone(say, case):
        model = rows.filled(
            lambda: build_model("llama-7b", vocab_size=rows.VOCAB, seq_len=rows.SEQ_LEN, overrides=overrides)
        )
        flops = model.num_flops_per_token(rows.SEQ_LEN)
        for record in _steps(budget, model, rows.VOCAB, Offload(), micro, counts):
            tokens_per_s = record["tokens"] / record["step_s"]
            rates = {"tokens_per_s": tokens_per_s, "flops_per_s": tokens_per_s * flops}
            say(case=case, micro_batch=micro, **record, **rates)
    rows.cleared()
