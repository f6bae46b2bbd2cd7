"""Sharding changes where state lives and nothing else.

Each stage x communicator x world size x accumulation x model x optimizer, five steps with clipping, against one process
on the global batch: within 1e-5. And between the stages at one world size: the same bits of losses, gradient norms
and weights.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.comm import Communicator, run_threads
from zeroshard.models import build_model
from zeroshard.zero import STAGES, Zero

VOCAB, SEQ_LEN, MICRO_BATCH, NUM_STEPS, MAX_NORM = 31, 8, 2, 3, 0.5
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-tied": ("gpt2-demo", {"n_layer": 2, "n_head": 3, "n_embd": 9}),
    "llama-untied": ("llama-tiny", {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 12}),
}
# Learning rates that leave rounding as small as it is: Adam divides a rounding error by its own size.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
    "adam-fused": (torch.optim.Adam, {"lr": 1e-3, "fused": True}),
}
# How many micro-batches a step has, and where they add up: once reduced together, once each for itself.
ACCUMULATIONS = [(1, None), (3, "local"), (3, "sharded")]
# Processes take turns on few cores: over gloo, gradients are reduced for each micro-batch with one optimizer only.
GLOO_ACCUMULATIONS = {"adamw": ACCUMULATIONS, "sgd-momentum": ACCUMULATIONS[:2], "adam-fused": ACCUMULATIONS[:2]}


def _model(name: str) -> nn.Module:
    preset, overrides = MODELS[name]
    return build_model(preset, vocab_size=VOCAB, seq_len=SEQ_LEN, overrides=overrides)


def _batch(step: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, VOCAB, (num_rows, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1], rows[:, 1:]


@functools.cache
def one_process(model_name: str, optimizer: str, num_rows: int) -> tuple[list[float], list[float], dict]:
    """Losses, norms and weights of a plain loop on the global batch."""
    model = _model(model_name)
    optimizer_cls, kwargs = OPTIMIZERS[optimizer]
    optim = optimizer_cls(model.parameters(), **kwargs)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(*_batch(step, num_rows))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def _train(comm: Communicator, model_name: str, optimizer: str, stage: int, num_micro: int, accumulate: Any):
    model = _model(model_name)
    zero = Zero(model, stage=stage, comm=comm, accumulate=accumulate)
    optimizer_cls, kwargs = OPTIMIZERS[optimizer]
    optim = zero.optimizer(optimizer_cls, **kwargs)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        tokens, targets = _batch(step, comm.world_size * num_micro * MICRO_BATCH)
        total = 0.0
        for micro in range(num_micro):
            start = (micro * comm.world_size + comm.rank) * MICRO_BATCH
            rows = slice(start, start + MICRO_BATCH)
            with zero.micro_batch(last=micro == num_micro - 1):
                loss = model(tokens[rows], targets[rows]) / num_micro
                loss.backward()
            total += loss.item()
        norms.append(zero.clip_grad_norm_(MAX_NORM).item())
        optim.step()
        optim.zero_grad()
        losses.append(total)
    return losses, norms, dict(zero.state_dict())


def every_stage(comm: Communicator, model_name: str, optimizer: str, accumulations: list) -> dict[Any, Any]:
    """(num_micro, accumulate, stage) -> this rank's losses, the norms, the weights."""
    return {
        (num_micro, accumulate, stage): _train(comm, model_name, optimizer, stage, num_micro, accumulate)
        for num_micro, accumulate in accumulations
        for stage in STAGES
    }


def _check(by_rank: list[dict[Any, Any]], model_name: str, optimizer: str, accumulations: list) -> None:
    world_size = len(by_rank)
    for num_micro, accumulate in accumulations:
        losses, norms, weights = one_process(model_name, optimizer, world_size * num_micro * MICRO_BATCH)
        for stage in STAGES:
            key = (num_micro, accumulate, stage)
            for rank in by_rank:
                _assert_same_bits(rank[key], rank[num_micro, accumulate, 0])
                assert rank[key][1] == by_rank[0][key][1]
            mean_losses = [sum(ours) / world_size for ours in zip(*(rank[key][0] for rank in by_rank), strict=True)]
            assert mean_losses == pytest.approx(losses, abs=1e-5)
            assert by_rank[0][key][1] == pytest.approx(norms, abs=1e-5)
            assert list(by_rank[0][key][2]) == list(weights)
            for name, whole in weights.items():
                torch.testing.assert_close(by_rank[0][key][2][name], whole, rtol=0, atol=1e-5)


def _assert_same_bits(ours: Any, other: Any) -> None:
    assert ours[:2] == other[:2]
    assert all(torch.equal(ours[2][name], other[2][name]) for name in other[2])


CELLS = [
    pytest.mark.pairwise,
    pytest.mark.parametrize("optimizer", OPTIMIZERS),
    pytest.mark.parametrize("model_name", MODELS),
    pytest.mark.parametrize("world_size", [1, 2, 3, 4]),
]


def _in_every_cell(test):
    return functools.reduce(lambda decorated, mark: mark(decorated), CELLS, test)


@_in_every_cell
def test_thread_ranks_equal_one_process_and_stages_each_other(world_size, model_name, optimizer):
    by_rank = run_threads(lambda comm: every_stage(comm, model_name, optimizer, ACCUMULATIONS), world_size)
    _check(by_rank, model_name, optimizer, ACCUMULATIONS)


@_in_every_cell
def test_gloo_ranks_equal_one_process_and_stages_each_other(world_size, model_name, optimizer, gloo_ranks):
    accumulations = GLOO_ACCUMULATIONS[optimizer]
    by_rank = gloo_ranks(world_size).run(every_stage, model_name, optimizer, accumulations)
    _check(by_rank, model_name, optimizer, accumulations)
