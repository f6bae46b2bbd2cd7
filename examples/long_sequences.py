"""One sequence on several ranks: a LLaMA of `transformers`, each rank with its part of the tokens, sharded at stage 3.

    torchrun --standalone --nproc-per-node=2 examples/long_sequences.py

Every rank reads the same row and cuts its part. Losses are those of one process, which rank 0 computes too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from zeroshard import Zero
from zeroshard.comm import TorchCommunicator
from zeroshard.models import SequenceParallel, share_sequences

LENGTH, VOCAB = 256, 96
SIZES: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **SIZES))


def row(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [1, T] of a whole row; its first half is a prompt, which has no targets."""
    ids = torch.randint(VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    targets = ids[:, 1:].clone()
    targets[:, : LENGTH // 2] = -100
    return ids[:, :-1], targets


def sum_of_losses(model: LlamaForCausalLM, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def main() -> None:
    comm = TorchCommunicator()  # of all ranks that torchrun has started
    model = build()
    sequence = SequenceParallel.of(comm, comm.world_size)
    share_sequences(model, sequence)
    zero = Zero(model, stage=3, units=model.model.layers, comm=comm)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    alone = build() if comm.rank == 0 else None
    optim_alone = torch.optim.AdamW(alone.parameters(), lr=1e-2) if alone else None
    for step in range(3):
        tokens, targets = sequence.cut(*row(step))
        loss = sequence.mean(sum_of_losses(model, tokens, targets), targets)
        loss.backward()
        optim.step()
        optim.zero_grad()
        told = loss.detach().clone()
        comm.all_reduce(told).wait()
        if alone and optim_alone:
            tokens, targets = row(step)
            whole = sum_of_losses(alone, tokens, targets) / int((targets != -100).sum())
            whole.backward()
            optim_alone.step()
            optim_alone.zero_grad()
            print(f"step {step}  shared {float(told) / comm.world_size:.5f}  alone {float(whole.detach()):.5f}")


if __name__ == "__main__":
    main()
