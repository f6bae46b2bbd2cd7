"""Resident bytes of each category equal the prediction, exactly, on every rank."""

from __future__ import annotations

import pytest
import torch

from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.models import build_model
from zeroshard.zero import STAGES, MixedPrecision, ShardingStrategy, Zero

MODELS = {
    "gpt2-demo": {"n_layer": 2, "n_head": 3, "n_embd": 9},
    "llama-tiny": {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 12},
}
PRECISIONS = {
    "fp32": MixedPrecision(),
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "bf16-reduced": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {"fused": True}),
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


def _model(name):
    return build_model(name, vocab_size=31, seq_len=8, overrides=MODELS[name])


def _measured(comm, model, strategy, precision, optimizer, num_reductions=1, **zero_kwargs):
    zero = Zero(model, stage=strategy, comm=comm, precision=precision, **zero_kwargs)
    cls, kwargs = OPTIMIZERS[optimizer]
    optim = zero.optimizer(cls, lr=1e-3, **kwargs)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(2):
        optim.zero_grad()
        for _ in range(num_reductions):
            model(tokens, tokens).backward()
        found = zero.memory_bytes()
        optim.step()
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_resident_bytes_are_as_predicted_on_every_rank(stage, world_size, precision, model_name):
    policy = PRECISIONS[precision]
    for rank in range(world_size):
        model = _model(model_name)
        predicted = state_bytes(buffers_of(model, world_size), STAGES[stage], rank, OPTIMIZER_STATES["AdamW"], policy)
        comm = NullCommunicator(world_size, rank)
        assert _measured(comm, model, STAGES[stage], policy, "AdamW") == predicted


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_talk_hold_what_was_predicted(stage, world_size):
    by_rank = run_threads(
        lambda comm: _measured(comm, _model("gpt2-demo"), STAGES[stage], MixedPrecision(), "AdamW"), world_size
    )
    buffers = buffers_of(_model("gpt2-demo"), world_size)
    assert by_rank == [state_bytes(buffers, STAGES[stage], r, OPTIMIZER_STATES["AdamW"]) for r in range(world_size)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_optimizer_keeps_what_the_table_says(stage, optimizer):
    model = _model("gpt2-demo")
    whole = model.parameters() if optimizer == "Adafactor" else ()
    predicted = state_bytes(buffers_of(model, 3, whole=whole), STAGES[stage], 1, OPTIMIZER_STATES[optimizer])
    assert _measured(NullCommunicator(3, 1), model, STAGES[stage], MixedPrecision(), optimizer) == predicted


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_reduced_twice_in_a_step_need_a_second_buffer_where_they_are_whole(stage, precision):
    model, policy = _model("llama-tiny"), PRECISIONS[precision]
    predicted = state_bytes(buffers_of(model, 4), STAGES[stage], 2, OPTIMIZER_STATES["SGD"], policy, num_reductions=2)
    found = _measured(NullCommunicator(4, 2), model, STAGES[stage], policy, "SGD", num_reductions=2)
    assert found == predicted


def test_frozen_parameters_have_weights_and_nothing_else():
    model = _model("gpt2-demo")
    model.blocks.requires_grad_(False)
    predicted = state_bytes(buffers_of(model, 4), STAGES[3], 0, OPTIMIZER_STATES["AdamW"])
    whole = state_bytes(buffers_of(_model("gpt2-demo"), 4), STAGES[3], 0, OPTIMIZER_STATES["AdamW"])
    assert _measured(NullCommunicator(4), model, STAGES[3], MixedPrecision(), "AdamW") == predicted
    assert predicted["params"] == whole["params"]
    assert predicted["grads"] < whole["grads"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_row_of_the_table_is_all_that_the_formula_reads(stage):
    """By hand: 10 + 7 elements over 4 ranks, padded to 12 and 8, in fp32 with AdamW."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(6, 1))
    row: ShardingStrategy = STAGES[stage]
    found = state_bytes(buffers_of(model, 4, list(model)), row, 3, OPTIMIZER_STATES["AdamW"])
    whole, shard = 4 * (12 + 8), 4 * (3 + 2)
    # Shards of 3 cut the first buffer into 5 pieces, shards of 2 the second into 4, and each piece has a step count.
    # Rank 3 owns one element of each buffer; the rest of its shards is padding.
    adam = {"replicate": 2 * 4 * 17 + 4 * 9, "shard": 2 * 4 * 2 + 2 * 4}
    by_placement = {"replicate": whole, "shard": shard}
    assert found == {
        "params": by_placement[row.params.value],
        "grads": by_placement[row.grads.value],
        "master": 0,
        "optimizer": adam[row.optim.value],
    }


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("world_size", "shard_size"), [(4, 1), (4, 2), (4, 4), (6, 3)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_replica_holds_what_a_world_of_its_size_does(stage, world_size, shard_size, precision):
    policy = PRECISIONS[precision]
    for rank in range(world_size):
        model = _model("gpt2-demo")
        buffers = buffers_of(model, shard_size)
        predicted = state_bytes(buffers, STAGES[stage], rank % shard_size, OPTIMIZER_STATES["AdamW"], policy)
        comm = NullCommunicator(world_size, rank)
        assert _measured(comm, model, STAGES[stage], policy, "AdamW", shard_size=shard_size) == predicted


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 5, 20])
@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_and_the_padding_of_whole_tensors_are_as_predicted(stage, world_size, precision):
    policy = PRECISIONS[precision]
    for rank in range(0, world_size, max(world_size // 4, 1)):  # of 20 ranks most own no tensor of a unit
        model = _model("gpt2-demo")
        matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
        predicted = state_bytes(
            buffers_of(model, world_size, whole=matrices),
            STAGES[stage],
            rank,
            OPTIMIZER_STATES["AdamW"],
            policy,
            whole_optimizer=OPTIMIZER_STATES["Muon"],
        )
        zero = Zero(model, stage=stage, comm=NullCommunicator(world_size, rank), precision=policy)
        known = set(matrices)
        optims = [
            zero.optimizer(torch.optim.AdamW, [param for param in model.parameters() if param not in known]),
            zero.optimizer(torch.optim.Muon, matrices),
        ]
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(2):
            zero.zero_grad()
            model(tokens, tokens).backward()
            found = zero.memory_bytes()
            for optim in optims:
                optim.step()
        assert found == predicted
