"""The logic of large worlds: a thousand thread ranks of a toy model, against one process."""

from __future__ import annotations

import threading

import pytest
import torch

from zeroshard import Zero
from zeroshard.comm import run_threads
from zeroshard.models import InitialValues, build_model

NUM_RANKS, NUM_STEPS, SEQ_LEN, VOCAB = 1024, 2, 8, 61


def toy(device):
    with torch.device(device):
        return build_model(
            "gpt2-demo", vocab_size=VOCAB, seq_len=SEQ_LEN, overrides={"n_layer": 2, "n_head": 2, "n_embd": 32}
        )


def rows(rank, step):
    generator = torch.Generator().manual_seed(rank * NUM_STEPS + step)
    window = torch.randint(VOCAB, (1, SEQ_LEN + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def trained_by_one_process():
    model = toy("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        batch = [torch.cat(parts) for parts in zip(*(rows(rank, step) for rank in range(NUM_RANKS)), strict=True)]
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def trained(comm, stage):
    model = toy("meta")
    zero = Zero(model, stage, list(model.blocks), comm, init=InitialValues(model))
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        model(*rows(comm.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.full_params():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return weights if comm.rank in (0, NUM_RANKS - 1) else None


@pytest.fixture
def small_stacks():
    before = threading.stack_size(1 << 20)
    yield
    threading.stack_size(before)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_ranks_train_what_one_process_does(small_stacks):
    first, second = (
        run_threads(lambda comm, stage=stage: trained(comm, stage), NUM_RANKS, timeout_s=1800) for stage in (2, 3)
    )
    wanted = trained_by_one_process()
    for name, param in wanted.items():
        assert torch.equal(first[0][name], first[-1][name]), name
        assert torch.equal(first[0][name], second[0][name]), name
        torch.testing.assert_close(first[0][name], param, rtol=1e-4, atol=2e-5, msg=name)
