"""State sharded inside groups of ranks and replicated across them: the numbers of one process, the same on every rank.

At one world size, shard size and communicator stages 1, 2 and 3 give the same bits. Between shard sizes the order of
sums differs, ``(x0 + x1) + (x2 + x3)`` for pairs and ``((x0 + x1) + x2) + x3`` for all four, so there only numbers
agree. Stage 0 has no shards to size.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroshard.comm import (
    Communicator,
    ObservedCommunicator,
    RingCommunicator,
    SharedMemoryCommunicator,
    TorchCommunicator,
    run_threads,
)
from zeroshard.models import build_model
from zeroshard.zero import MixedPrecision, Zero

VOCAB, SEQ_LEN, NUM_STEPS, MAX_NORM, WORLD_SIZE = 31, 8, 3, 0.5, 4
SHARD_SIZES = (1, 2, 4)
STAGES = (1, 2, 3)
ACCUMULATIONS = [(1, None), (2, "local"), (2, "sharded")]
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
Result = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, weights


def _model() -> nn.Module:
    return build_model(
        "gpt2-demo", vocab_size=VOCAB, seq_len=SEQ_LEN, overrides={"n_layer": 2, "n_head": 3, "n_embd": 9}
    )


def _batch(step: int, num_rows: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, VOCAB, (num_rows, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1], rows[:, 1:]


@functools.cache
def one_process(num_micro: int) -> Result:
    model = _model()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(*_batch(step, WORLD_SIZE * num_micro))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def train(
    comm: Communicator,
    stage: int,
    shard_size: int | None,
    num_micro: int = 1,
    accumulate: Any = None,
    precision: MixedPrecision | None = None,
) -> Result:
    model = _model()
    zero = Zero(model, stage, comm=comm, accumulate=accumulate, precision=precision, shard_size=shard_size)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        tokens, targets = _batch(step, WORLD_SIZE * num_micro)
        total = 0.0
        for micro in range(num_micro):
            row = slice(micro * WORLD_SIZE + comm.rank, micro * WORLD_SIZE + comm.rank + 1)
            with zero.micro_batch(last=micro == num_micro - 1):
                loss = model(tokens[row], targets[row]) / num_micro
                loss.backward()
            total += loss.item()
        norms.append(zero.clip_grad_norm_(MAX_NORM).item())
        optim.step()
        optim.zero_grad()
        losses.append(total)
    return losses, norms, dict(zero.state_dict())


def every_cell(comm: Communicator, kind: str, shard_sizes: list, accumulations: list) -> dict[Any, Result]:
    """By shard size, accumulation and stage."""
    kinds = {"torch": TorchCommunicator, "ring": RingCommunicator, "shm": SharedMemoryCommunicator}
    own = kinds[kind]() if kind in kinds else comm
    found = {
        (shard_size, num_micro, accumulate, stage): train(own, stage, shard_size, num_micro, accumulate)
        for shard_size in shard_sizes
        for num_micro, accumulate in accumulations
        for stage in STAGES
    }
    if kind in ("ring", "shm"):
        own.close()
    return found


def _check(by_rank: list[dict[Any, Result]]) -> None:
    for key in by_rank[0]:
        shard_size, num_micro, accumulate, _ = key
        for rank in by_rank:
            # Stage 1 at the same shard size, on every rank; and a shard of all ranks is no level of its own.
            _assert_same_bits(rank[key], rank[shard_size, num_micro, accumulate, 1])
            if shard_size == WORLD_SIZE:
                _assert_same_bits(rank[key], rank[None, *key[1:]])
            assert rank[key][1] == by_rank[0][key][1]
            assert all(torch.equal(rank[key][2][name], whole) for name, whole in by_rank[0][key][2].items())
        losses, norms, weights = one_process(num_micro)
        means = [sum(ours) / WORLD_SIZE for ours in zip(*(rank[key][0] for rank in by_rank), strict=True)]
        assert means == pytest.approx(losses, abs=1e-5)
        assert by_rank[0][key][1] == pytest.approx(norms, abs=1e-5)
        for name, whole in weights.items():
            torch.testing.assert_close(by_rank[0][key][2][name], whole, rtol=0, atol=1e-5)


def _assert_same_bits(ours: Result, other: Result) -> None:
    assert ours[:2] == other[:2]
    assert all(torch.equal(ours[2][name], other[2][name]) for name in other[2])


def test_thread_ranks_equal_one_process_and_stages_each_other():
    cells = [None, *SHARD_SIZES], ACCUMULATIONS
    _check(run_threads(lambda comm: every_cell(comm, "threads", *cells), WORLD_SIZE))


@pytest.mark.parametrize("kind", ["torch", "ring", "shm"])
def test_processes_equal_one_process_and_stages_each_other(kind, gloo_ranks):
    _check(gloo_ranks(WORLD_SIZE).run(every_cell, kind, [1, 2], [(2, "sharded")]))


@pytest.mark.parametrize(("num_micro", "accumulate"), ACCUMULATIONS)
@pytest.mark.parametrize("shard_size", SHARD_SIZES)
def test_narrow_weights_have_the_same_bits_at_every_stage(shard_size, num_micro, accumulate):
    cell = {"shard_size": shard_size, "num_micro": num_micro, "accumulate": accumulate, "precision": BF16}
    first, *others = (run_threads(lambda comm, stage=stage: train(comm, stage, **cell), WORLD_SIZE) for stage in STAGES)
    for by_rank in others:
        for ours, theirs in zip(by_rank, first, strict=True):
            _assert_same_bits(ours, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_gathered_inside_groups_and_only_shards_of_gradients_cross(stage):
    def go(comm):
        observed = ObservedCommunicator(comm)
        zero = Zero(_model(), stage, comm=observed, shard_size=2)
        optim = zero.optimizer(torch.optim.AdamW)
        observed.drain()
        for step in range(2):
            zero.model(*_batch(step, 1)).backward()
            optim.step()
            optim.zero_grad()
        return {(r.op, r.world_size, r.num_bytes) for r in observed.records if r.scope.endswith(("weights", "grads"))}

    (sent, *others) = run_threads(go, 8)
    assert all(other == sent for other in others)
    assert {(op, world_size) for op, world_size, _ in sent} == {
        ("all_gather", 2),
        ("reduce_scatter", 2),
        ("all_reduce", 4),
    }
    whole = {num_bytes for op, _, num_bytes in sent if op == "reduce_scatter"}
    assert {2 * num_bytes for op, _, num_bytes in sent if op == "all_reduce"} == whole
