"""A loop written for Hugging Face Accelerate, whose model is sharded: one line of it, the import, is ours.

    torchrun --standalone --nproc-per-node=2 examples/accelerate_loop.py OUT

A tiny LLaMA with random weights learns random tokens, on the CPU or on GPUs; the losses are those of one process.
``OUT`` receives the state after each epoch, sharded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from zeroshard.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator

SIZES: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "dataloader_config": DataLoaderConfiguration(split_batches=True),  # 8 sequences on all ranks together
    "cpu": not torch.cuda.is_available(),
}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=32, **SIZES))


def rows(count: int, length: int = 16) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(96, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(accelerator: Any, out: str, first_epoch: int = 0) -> tuple[Any, list[float]]:
    """The loop; nothing in it knows of zeroshard. Returns the model and each micro-batch's loss."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches: Any = DataLoader(rows(32), batch_size=8)  # ty: ignore[invalid-argument-type]
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=8)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    if first_epoch:
        accelerator.load_state(f"{out}/epoch-{first_epoch}")
    losses = []
    for epoch in range(first_epoch, 2):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        accelerator.save_state(f"{out}/epoch-{epoch + 1}")  # on every rank
    return model, losses


def main() -> None:
    accelerator = Accelerator(**SETTINGS)
    model, losses = train(accelerator, sys.argv[1])
    accelerator.print(f"{accelerator.num_processes} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    accelerator.print(accelerator.engine_of(model).memory_bytes())
    accelerator.end_training()


if __name__ == "__main__":
    main()
