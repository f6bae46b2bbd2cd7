"""Steps with the optimizer's state on the host: seconds and the allocator's peak, beside those without offloading."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import rows
import torch

from zeroshard.comm import LocalCommunicator
from zeroshard.models import build_model
from zeroshard.zero import Offload, Zero

# Published configurations; NVIDIA-NeMo/RL, issue 3628, has Qwen3-0.6B on one H100: 0.752 s and 15.24 GiB without
# offloading, 1.678 s and 10.53 GiB with all of the optimizer offloaded.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 3072},
}  # fmt: skip
ALIKE = {
    **rows.QWEN_ALIKE,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
}
TOY = {**rows.QWEN_TOY, "num_key_value_heads": 2, "head_dim": 8}


def offloaded(budget: rows.Budget, say: rows.Say) -> None:
    """Say seconds and peaks of steps of one and of eight micro-batches, by what is on the host."""
    micro = 1 if rows.TOY else 4
    for name, shape in SHAPES.items():
        for where, settings in (("device", None), ("host", Offload(optimizer="host", master="host", grads="host"))):
            case = f"{name}, optimizer on the {where}"
            if budget.spent():
                say(case=case, left_out="no time was left")
                continue
            with rows.losing_itself_alone(say, case):
                for record in _measured({**ALIKE, **(TOY if rows.TOY else shape)}, settings, micro):
                    say(case=case, micro_batch=micro, **record)
            rows.cleared()


def _measured(config: dict[str, Any], settings: Offload | None, micro: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        build = lambda: build_model(f"hf:{folder}", seq_len=rows.SEQ_LEN, overrides={"from_config": True})  # noqa: E731
        model = rows.filled(build)
    zero = Zero(model, 1, units=model.units, comm=LocalCommunicator(), precision=rows.BF16, offload=settings)
    optimizer = zero.optimizer(torch.optim.AdamW, **rows.ADAMW, fused=True)
    tokens, targets = rows.batch(micro, int(config["vocab_size"]))
    found = []
    for num_micro in (1, 8):
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
