"""Steps with the optimizer's state on the host: seconds and the allocator's peak, beside those without offloading."""

from __future__ import annotations

import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rows
import torch
from qwen_shapes import QWEN3, QWEN3_ALIKE, QWEN3_TOY

from zeroshard import host_memory
from zeroshard.comm import LocalCommunicator
from zeroshard.models import LanguageModel, build_model
from zeroshard.process import num_cpus
from zeroshard.zero import Offload, Zero

# NVIDIA-NeMo/RL, issue 3628, has Qwen3-0.6B on one H100: 0.752 s and 15.24 GiB without offloading, 1.678 s and
# 10.53 GiB with all of the optimizer offloaded.
NAME = "qwen3-0.6b"
# Published of Qwen2.5-7B on one GPU: 14,000 tokens/s (llmq, README), 272 TFLOP/s (MegaTrain, arXiv 2604.05091).
UPDATE_BYTES = 28  # of an element: gradient, weight and two states are read, the last three written
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
            for record in _measured({**QWEN3_ALIKE, **(QWEN3_TOY if rows.TOY else QWEN3[NAME])}, settings, micro):
                say(case=case, micro_batch=micro, **record)
        rows.cleared()
    for num_threads in sorted({1, 4, max(num_cpus() // 2, 1), num_cpus()}):
        if not budget.spent():
            rate = _update_bytes_per_s(1000 if rows.TOY else 100_000_000, num_threads)
            say(case="update on the host", num_threads=num_threads, bytes_per_s=rate)


def _update_bytes_per_s(numel: int, num_threads: int) -> float:
    """Bytes a second of torch's fused AdamW on the host, on a thread of its own, as the engine's."""

    def best() -> float:
        torch.set_num_threads(num_threads)
        param = torch.nn.Parameter(torch.zeros(numel))
        param.grad = torch.zeros(numel)
        optimizer = torch.optim.AdamW([param], **rows.ADAMW, fused=True)
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        return UPDATE_BYTES * numel / min(seconds)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(best).result()


def _measured(config: dict[str, Any], settings: Offload | None, micro: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        build = lambda: build_model(f"hf:{folder}", seq_len=rows.SEQ_LEN, overrides={"from_config": True})  # noqa: E731
        model = rows.filled(build)
    return _steps(model, int(config["vocab_size"]), settings, micro, (1, 8))


def _steps(
    model: LanguageModel, vocab: int, settings: Offload | None, micro: int, counts: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Of steps of each of these numbers of micro-batches: the least seconds of two, and the peak."""
    zero = Zero(model, 1, units=model.units, comm=LocalCommunicator(), precision=rows.BF16, offload=settings)
    optimizer = zero.optimizer(torch.optim.AdamW, **rows.ADAMW, fused=True)
    tokens, targets = rows.batch(micro, vocab)
    found = []
    for num_micro in counts:
        seconds = []
        for _ in range(3):
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
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() if rows.ON_GPU else 0
        found.append({"num_micro": num_micro, "step_s": min(seconds[1:]), "peak_bytes": peak,
                      "tokens": micro * num_micro * rows.SEQ_LEN})  # fmt: skip
    return found


def seven_billion(budget: rows.Budget, say: rows.Say) -> None:
    """Say seconds, tokens/s and FLOP/s of Llama 7B with activation checkpointing, by the number of micro-batches."""
    case, available = "llama-7b, optimizer on the host", host_memory.available_bytes()
    if not rows.TOY and available is not None and available < HOST_BYTES_7B:
        say(
            case=case,
            left_out=f"the host has {available / 2**30:.0f} GiB left, and {HOST_BYTES_7B / 2**30:.0f} are needed",
        )
        return
    micro, overrides = (1, {**rows.TINY, "n_kv_head": 2}) if rows.TOY else (8, {})
    with rows.losing_itself_alone(say, case):
        overrides = {**overrides, "activation_checkpointing": "full"}
        model = rows.filled(
            lambda: build_model("llama-7b", vocab_size=rows.VOCAB, seq_len=rows.SEQ_LEN, overrides=overrides)
        )
        flops = model.num_flops_per_token(rows.SEQ_LEN)
        for record in _steps(model, rows.VOCAB, Offload(), micro, (1, 4, 16)):
            tokens_per_s = record["tokens"] / record["step_s"]
            rates = {"tokens_per_s": tokens_per_s, "flops_per_s": tokens_per_s * flops}
            say(case=case, micro_batch=micro, **record, **rates)
    rows.cleared()
