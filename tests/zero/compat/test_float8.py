"""Matrix products in 8 bits, by torchao's own conversion of a model before the engine shards it."""

import pytest
import torch

from exactness import same_bits
from zeroshard import Zero
from zeroshard.comm import run_threads
from zeroshard.models import build_model

SIZES = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_kv_head": 1, "ffn_hidden": 64}


def _trained(comm, stage):
    """Losses, norms and weights of two steps."""
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    torch.manual_seed(0)
    model = build_model("llama-tiny", vocab_size=96, overrides=SIZES)
    config = float8.Float8LinearConfig(emulate=True, pad_inner_dim=True)
    float8.convert_to_float8_training(model.blocks, config=config)
    zero = Zero(model, stage=stage, units=model.blocks, comm=comm)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    found = []
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(2):
        tokens_BT = torch.randint(96, (2, 12), generator=generator)
        loss = model(tokens_BT, tokens_BT.roll(-1, 1))
        loss.backward()
        found.append((float(loss.detach()), float(zero.clip_grad_norm_(0.5))))
        optim.step()
        optim.zero_grad()
    return found, zero.state_dict()


def test_every_stage_has_the_same_bits():
    first, *others = [run_threads(lambda comm, s=stage: _trained(comm, s), 2)[0] for stage in range(4)]
    assert all(same_bits(first, other) for other in others)
    assert {name: tensor.dtype for name, tensor in first[1].items()} == dict.fromkeys(first[1], torch.float32)
