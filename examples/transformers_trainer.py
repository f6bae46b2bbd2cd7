"""`transformers.Trainer`, sharded: the script is an ordinary one, but for the class of its trainer.

    torchrun --standalone --nproc-per-node=2 examples/transformers_trainer.py OUT

A tiny LLaMA with random weights learns random tokens, on the CPU or on GPUs; losses and norms are those of one process.
``OUT`` receives checkpoints, from which `trainer.train(resume_from_checkpoint=True)` goes on at any number of ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zeroshard.integrations.plugin import ZeroPlugin
from zeroshard.integrations.transformers import ZeroTrainer

SIZES: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS_PER_MICRO_BATCH = 8  # on all ranks together


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=32, **SIZES))


def rows(count: int, seed: int, length: int = 16) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(96, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(kind: type[Trainer], out: str, *, settings: dict[str, Any] | None = None, **kwargs: Any) -> Trainer:
    """A trainer of class ``kind``; ``settings`` replace those of `TrainingArguments` below."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    defaults: dict[str, Any] = {
        "output_dir": out,
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": ROWS_PER_MICRO_BATCH // world_size,
        "per_device_eval_batch_size": ROWS_PER_MICRO_BATCH // world_size,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
    }
    data: dict[str, Any] = {"train_dataset": rows(64, seed=1), "eval_dataset": rows(16, seed=2)}
    return kind(build(), TrainingArguments(**(defaults | (settings or {}))), **data, **kwargs)


def main() -> None:
    made = trainer(ZeroTrainer, sys.argv[1], zero_plugin=ZeroPlugin(stage=3))
    made.train()
    made.save_model()  # on every rank
    if made.is_world_process_zero():
        print(LlamaForCausalLM.from_pretrained(sys.argv[1]).config.model_type, "saved in", sys.argv[1])


if __name__ == "__main__":
    main()
