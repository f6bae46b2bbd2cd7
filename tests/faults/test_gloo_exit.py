"""gloo's threads abort a process that leaves them work; ours leave none. ``pytest --exits 50`` looks harder."""

import pytest
import torch

from ranks import GlooRanks
from zeroshard.models import build_model
from zeroshard.zero import Zero


def train(comm):
    overrides = {"n_layer": 2, "n_head": 3, "n_embd": 9}
    model = build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides=overrides)
    zero = Zero(model, stage=3, comm=comm)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(2):
        model(tokens, tokens).backward()
        optim.step()
        optim.zero_grad()
    model(tokens, tokens).backward()  # and leaves in the middle of a step
    return zero.clip_grad_norm_(1.0).item()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_four_ranks_leave_gloo_cleanly_every_time(request):
    for _ in range(request.config.getoption("--exits")):
        ranks = GlooRanks(4)
        norms = ranks.run(train)
        assert norms == [norms[0]] * 4
        assert ranks.close() == [0, 0, 0, 0]
