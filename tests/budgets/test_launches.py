"""What the engine launches in a step of four micro-batches, beside the model's own operations: counts and bounds.

A bound that can be lowered is lowered. What the copies are for is in `docs/log.md`.
"""

import pytest
import torch

from launches import launches_of
from zeroshard.comm import run_threads
from zeroshard.models import build_model
from zeroshard.zero import MixedPrecision, Zero
from zeroshard.zero.core import small_grads

NUM_MICRO = 4
PLAIN, AS_TRAINED = "each backward reduces", "as the trainer accumulates"
BOUNDS = {  # (dtype, ranks, stage, loop): launches of the engine, and how many of them are copies
    ("fp32", 1, 1, PLAIN): (68, 14),  # 134 and 101 before small gradients waited and one rank added in place
    ("fp32", 1, 3, PLAIN): (68, 14),  # 134, 101
    ("fp32", 2, 1, PLAIN): (101, 19),  # 146, 10
    ("fp32", 2, 3, PLAIN): (114, 16),  # 159, 7
    ("bf16", 1, 1, PLAIN): (80, 20),  # 146, 107
    ("bf16", 1, 3, PLAIN): (80, 20),  # 146, 107
    ("bf16", 2, 1, PLAIN): (141, 53),  # 249, 107
    ("bf16", 2, 3, PLAIN): (158, 60),  # 266, 114
    ("fp32", 1, 1, AS_TRAINED): (68, 14),  # 122, 14
    ("bf16", 1, 1, AS_TRAINED): (80, 20),  # 134, 20
    ("fp32", 2, 1, AS_TRAINED): (74, 7),  # 128, 7
    ("bf16", 2, 1, AS_TRAINED): (93, 20),  # 147, 20
}


@pytest.mark.parametrize("case", BOUNDS, ids=str)
def test_a_step_launches_no_more_than_its_budget(case, monkeypatch):
    dtype, world_size, stage, loop = case
    monkeypatch.setattr(small_grads, "SMALL_NUMEL", 1024)  # matrices are large and all else is small, as in GPT-2 124M

    def rank_main(comm):
        torch.manual_seed(0)
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32}
        model = build_model("gpt2-demo", vocab_size=64, seq_len=16, overrides=sizes)
        precision = MixedPrecision(torch.bfloat16) if dtype == "bf16" else None
        zero = Zero(model, stage, units=model.units, comm=comm, precision=precision)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        tokens = torch.randint(0, 64, (2, 16))

        def step():
            for micro in range(NUM_MICRO):
                with zero.micro_batch(last=loop is PLAIN or micro == NUM_MICRO - 1):
                    (model(tokens, tokens) / NUM_MICRO).backward()
            zero.clip_grad_norm_(1e-3)
            optimizer.step()
            optimizer.zero_grad()

        return launches_of(step)

    for found in run_threads(rank_main, world_size):
        launches, copies = BOUNDS[case]
        assert sum(found.of_engine.values()) <= launches, found.of_engine
        assert found.copies_of_engine <= copies, found.copies
        assert found.of_model["addmm"] > 0
