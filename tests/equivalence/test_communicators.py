"""Our own collectives change nothing: the same bits at all stages, whichever dial is turned, among real processes."""

from __future__ import annotations

import pytest
import torch

from zeroshard.comm import RingCommunicator, SharedMemoryCommunicator
from zeroshard.comm.shm.shm import DIRECT_BYTES
from zeroshard.models import build_model
from zeroshard.zero import STAGES, MixedPrecision, Zero

VOCAB, SEQ_LEN, NUM_STEPS, NUM_MICRO, WIDTH = 67, 8, 2, 2, 96
assert 12 * WIDTH**2 * 4 > DIRECT_BYTES, "blocks are read where they lie"
COMMUNICATORS = {"ring": RingCommunicator, "shm": SharedMemoryCommunicator}
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
BF16_ALL_THE_WAY = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
# (activation checkpointing, what Zero is given)
DIALS = [
    ("none", {"accumulate": "local", "prefetch": 1}),
    ("full", {"accumulate": "sharded", "prefetch": 2}),
    ("every:2", {"accumulate": "local", "prefetch": 0, "precision": BF16}),
    ("selective", {"accumulate": "sharded", "prefetch": 5, "precision": BF16_ALL_THE_WAY}),
]


def _train(comm, stage, checkpointing, zero_kwargs):
    overrides = {"n_layer": 3, "n_head": 2, "n_embd": WIDTH, "activation_checkpointing": checkpointing}
    model = build_model("gpt2-demo", vocab_size=VOCAB, seq_len=SEQ_LEN, overrides=overrides)
    zero = Zero(model, stage=stage, comm=comm, **zero_kwargs)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    told = []
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            seed = (step * NUM_MICRO + micro) * comm.world_size + comm.rank
            rows = torch.randint(0, VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
            with zero.micro_batch(last=micro == NUM_MICRO - 1):
                loss = model(rows[:, :-1], rows[:, 1:]) / NUM_MICRO
                loss.backward()
            told.append(loss.item())
        told.append(zero.clip_grad_norm_(0.5).item())
        optim.step()
        optim.zero_grad()
    return told, dict(zero.state_dict())


def every_stage(comm, kind, dial):
    ours = COMMUNICATORS[kind](comm.group)
    try:
        return [_train(ours, stage, *DIALS[dial]) for stage in STAGES]
    finally:
        ours.close()


@pytest.mark.pairwise
@pytest.mark.parametrize("dial", range(len(DIALS)))
@pytest.mark.parametrize("kind", COMMUNICATORS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_stages_give_the_same_bits(gloo_ranks, world_size, kind, dial):
    by_rank = gloo_ranks(world_size).run(every_stage, kind, dial)
    first_weights = by_rank[0][0][1]
    for stages in by_rank:
        for told, weights in stages:
            assert told == stages[0][0]
            assert all(torch.equal(weights[name], first_weights[name]) for name in first_weights)
    assert by_rank[0][0][0] != by_rank[1][0][0], "ranks have losses of their own"
