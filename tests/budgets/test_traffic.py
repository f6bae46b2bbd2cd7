"""The collectives of a step are those that were predicted: operation, bytes, buffer and order."""

from __future__ import annotations

import pytest
import torch

from zeroshard.comm import CONTROL, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.lab.buffers import buffers_of
from zeroshard.lab.traffic import bytes_by_op, messages
from zeroshard.models import build_model
from zeroshard.zero import STAGES, MixedPrecision, Placement, ShardingStrategy, Zero

BF16 = MixedPrecision(param_dtype=torch.bfloat16)
KEEP_WEIGHTS = ShardingStrategy(Placement.SHARD, Placement.SHARD, Placement.SHARD, reshard_after_forward=False)
ROWS = {**{f"stage {stage}": row for stage, row in STAGES.items()}, "stage 3, weights kept": KEEP_WEIGHTS}


def _model(checkpointed="none"):
    overrides = {"n_layer": 4, "n_head": 3, "n_embd": 9, "activation_checkpointing": checkpointed}
    return build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides=overrides)


def _third_step(comm, model, row, num_micro, precision=None, **kwargs):
    """What the third step sends: those before it are settled."""
    observed = ObservedCommunicator(comm)
    zero = Zero(model, stage=row, comm=observed, precision=precision, **kwargs)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(3):
        observed.drain()
        for micro in range(num_micro):
            with zero.micro_batch(last=micro == num_micro - 1):
                model(tokens, tokens).backward()
        zero.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
    return observed


def _sent(observed):
    return [(r.op, r.num_bytes, r.scope) for r in observed.records if r.scope != CONTROL]


def _predicted(model, world_size, row, num_micro, precision=None, **kwargs):
    found = messages(buffers_of(model, world_size), row, precision, num_micro=num_micro, **kwargs)
    return [(m.op, m.num_bytes, f"{m.buffer}/{m.phase}") for m in found]


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("row", ROWS)
def test_a_step_sends_what_was_predicted_in_that_order(row, world_size, num_micro, precision):
    model = _model()
    predicted = _predicted(model, world_size, ROWS[row], num_micro, precision)
    observed = _third_step(NullCommunicator(world_size, world_size - 1), model, ROWS[row], num_micro, precision)
    assert _sent(observed) == predicted


@pytest.mark.parametrize("prefetch", [0, 1, 3, 9])
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("checkpointed", ["none", "full", "selective"])
@pytest.mark.parametrize("row", ROWS)
def test_neither_prefetch_nor_checkpointing_sends_more(row, checkpointed, accumulate, prefetch):
    model = _model(checkpointed)
    kwargs = {"accumulate": accumulate, "prefetch": prefetch}
    predicted = _predicted(model, 2, ROWS[row], 2, **kwargs)
    assert _sent(_third_step(NullCommunicator(2), model, ROWS[row], 2, **kwargs)) == predicted


@pytest.mark.parametrize("row", ROWS)
def test_ranks_that_talk_send_what_was_predicted(row):
    by_rank = run_threads(lambda comm: _sent(_third_step(comm, _model(), ROWS[row], 2)), 3)
    assert by_rank == [_predicted(_model(), 3, ROWS[row], 2)] * 3


def test_the_totals_are_those_of_the_stage_table():
    buffers = buffers_of(_model(), 4)
    padded = {b.name: b.layout.padded_numel * 4 for b in buffers}
    total, root, num_micro = sum(padded.values()), padded["root"], 3
    assert [bytes_by_op(messages(buffers, STAGES[stage], num_micro=num_micro)) for stage in STAGES] == [
        {"all_reduce": total},
        {"reduce_scatter": total, "all_gather": total},
        {"reduce_scatter": num_micro * total, "all_gather": total},
        {"reduce_scatter": num_micro * total, "all_gather": num_micro * (2 * total - root)},
    ]


def test_stage_zero_without_a_uniform_order_is_built_from_two_collectives():
    class Uneven(NullCommunicator):
        uniform_order = False

    model = _model()
    predicted = _predicted(model, 2, STAGES[0], 1, uniform_order=False)
    assert _sent(_third_step(Uneven(2), model, STAGES[0], 1)) == predicted
    assert {op for op, *_ in predicted} == {"reduce_scatter", "all_gather"}


@pytest.mark.parametrize("stage", STAGES)
def test_control_messages_are_a_few_bytes(stage):
    observed = _third_step(NullCommunicator(4), _model(), STAGES[stage], 1)
    num_params = len(list(_model().parameters()))
    control = observed.totals(control=True)
    assert sum(control.values()) <= num_params + 8 * (4 + 8)
