"""The collectives of a step are those that were predicted: operation, bytes, buffer and order."""

from __future__ import annotations

import pytest
import torch

from zeroshard.comm import CONTROL, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.traffic import bytes_by_op, messages
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


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("row", ROWS)
def test_a_step_sends_what_was_predicted_in_that_order(row, world_size, num_micro, precision):
    model = _model()
    predicted = _predicted(model, world_size, ROWS[row], num_micro, precision)
    observed = _third_step(NullCommunicator(world_size, world_size - 1), model, ROWS[row], num_micro, precision)
    assert _sent(observed) == predicted


@pytest.mark.pairwise
@pytest.mark.parametrize("prefetch", [0, 1, 3, 9])
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("checkpointed", ["none", "full", "selective"])
@pytest.mark.parametrize("row", ROWS)
def test_neither_prefetch_nor_checkpointing_sends_more(row, checkpointed, accumulate, prefetch):
    model = _model(checkpointed)
    kwargs = {"accumulate": accumulate, "prefetch": prefetch}
    predicted = _predicted(model, 2, ROWS[row], 2, **kwargs)
    assert _sent(_third_step(NullCommunicator(2), model, ROWS[row], 2, **kwargs)) == predicted


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("row", ROWS)
def test_whole_tensors_and_their_padding_travel_as_predicted(row, world_size):
    model = _model()
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if not any(param is matrix for matrix in matrices)]
    found = messages(buffers_of(model, world_size, whole=matrices), ROWS[row])
    observed = ObservedCommunicator(NullCommunicator(world_size))
    zero = Zero(model, stage=ROWS[row], comm=observed)
    optims = [zero.optimizer(torch.optim.AdamW, others), zero.optimizer(torch.optim.Muon, matrices)]
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(3):
        observed.drain()
        model(tokens, tokens).backward()
        for optim in optims:
            optim.step()
        zero.zero_grad()
    assert _sent(observed) == [(m.op, m.num_bytes, f"{m.buffer}/{m.phase}") for m in found]


@pytest.mark.parametrize("row", ROWS)
def test_ranks_that_talk_send_what_was_predicted(row):
    by_rank = run_threads(lambda comm: _sent(_third_step(comm, _model(), ROWS[row], 2)), 3)
    assert by_rank == [_predicted(_model(), 3, ROWS[row], 2)] * 3


def _hybrid(comm, row, shard_size, num_micro, accumulate, precision=None):
    kwargs = {"shard_size": shard_size, "accumulate": accumulate}
    observed = _third_step(comm, _model(), row, num_micro, precision, **kwargs)
    found = [(r.op, r.num_bytes, r.scope, r.world_size) for r in observed.records if r.scope != CONTROL]
    planned = messages(
        buffers_of(_model(), shard_size),
        row,
        precision,
        num_micro=num_micro,
        accumulate=accumulate,
        num_replicas=comm.world_size // shard_size,
    )
    return found, [(m.op, m.num_bytes, f"{m.buffer}/{m.phase}", m.world_size) for m in planned]


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_micro", "accumulate"), [(1, None), (3, "local"), (3, "sharded")])
@pytest.mark.parametrize(("world_size", "shard_size"), [(4, 1), (4, 2), (4, 4), (6, 3), (8, 2)])
@pytest.mark.parametrize("row", [row for row in ROWS if row != "stage 0"])
def test_replicas_add_a_shard_to_each_reduction(row, world_size, shard_size, num_micro, accumulate, precision):
    comm = NullCommunicator(world_size, world_size - 1)
    found, planned = _hybrid(comm, ROWS[row], shard_size, num_micro, accumulate, precision)
    assert found == planned


@pytest.mark.parametrize("row", [row for row in ROWS if row != "stage 0"])
def test_replicas_that_talk_send_what_was_predicted(row):
    for found, planned in run_threads(lambda comm: _hybrid(comm, ROWS[row], 2, 2, None), 4):
        assert found == planned


def test_what_crosses_between_groups_is_one_shard_of_the_model():
    buffers = buffers_of(_model(), 4)
    total = sum(buffer.layout.padded_numel * 4 for buffer in buffers)
    for stage in (1, 2, 3):
        found = messages(buffers, STAGES[stage], num_replicas=8)
        across = [message for message in found if message.world_size == 8]
        assert bytes_by_op(across) == {"all_reduce": total // 4}
        assert [message for message in found if message.world_size == 4] == messages(buffers, STAGES[stage])


def test_the_totals_are_those_of_the_stage_table():
    buffers = buffers_of(_model(), 4)
    padded = {b.name: b.layout.padded_numel * 4 for b in buffers}
    total, root, last, num_micro = sum(padded.values()), padded["root"], padded[buffers[-1].name], 3
    assert [bytes_by_op(messages(buffers, STAGES[stage], num_micro=num_micro)) for stage in STAGES] == [
        {"all_reduce": total},
        {"reduce_scatter": total, "all_gather": total},
        {"reduce_scatter": num_micro * total, "all_gather": total},
        {"reduce_scatter": num_micro * total, "all_gather": num_micro * (2 * total - root - last)},
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
