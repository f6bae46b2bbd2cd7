"""Runs that are held to their plan, by what travels: each keeps it, and one that moves other bytes is stopped."""

import gc
from dataclasses import replace

import pytest
import torch

from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.host.errors import ExitStatus
from zeroshard.host.slab import room
from zeroshard.lab.planner.run_plan import predict
from zeroshard.models.inputs_on_host import slot_bytes
from zeroshard.train.loop.loop import train
from zeroshard.train.setup.build import build_run
from zeroshard.zero import STAGES, LocalSteps

CPU = torch.device("cpu")
SOAK = pytest.mark.soak
EXACT = {"wire": {}}  # what a run is planned as that has a wire format
BLOCKS_OF_32 = {"wire": {"gather": "int8", "reduce": "int8", "block": 32}}


def _wire(strategy, weights, grads, other=EXACT, **given):
    return 2, {"strategy": strategy, "wire": {"weights": weights, "grads": grads}, **given}, other


def _outer_steps(strategy, shard_size, **replicas):
    other = torch.float32 if replicas.get("wire") == "bfloat16" else torch.float16
    steps = LocalSteps(2, fragments=replicas.get("fragments", 1), wire=other)
    given = {"strategy": strategy, "shard_size": shard_size, "local_steps": {"every": 2, **replicas}}
    return 4, given, {"local_steps": steps}


NO_COPY = {"row": STAGES[3]}
INT8 = {"weights": "int8", "grads": "int8"}
CASES = {
    "bfloat16 and float16": (*_wire("zero2", "bfloat16", "float16"), SOAK),
    "float16 and bfloat16": (*_wire("zero3", "float16", "bfloat16"), SOAK),
    "float32 and int8, bf16 computes": _wire("zero3", "float32", "int8", dtype="bfloat16"),
    "int8 both ways": (*_wire("zero2", "int8", "int8", BLOCKS_OF_32), SOAK),
    "int8 and e4m3": (*_wire("zero3", "int8", "e4m3", BLOCKS_OF_32), SOAK),
    "e4m3 and int4": (*_wire("zero1", "e4m3", "int4", BLOCKS_OF_32), SOAK),
    "int4 and as it is": (*_wire("zero2", "int4", "as-is"), SOAK),
    "int8 over two replicas": (*_wire("zero3", "as-is", "int8", shard_size=1), SOAK),
    "int8 between nodes": (
        4,
        {"strategy": "zero2", "wire": {**INT8, "node_size": 2}},
        {"wire": {"gather": "int8", "reduce": "int8"}},
    ),
    "copy": (4, {"strategy": "zero3", "node_copy": 2}, NO_COPY),
    "copy, int8, several micro-batches": (
        4,
        {"strategy": "zero3", "node_copy": 2, "wire": INT8, "grad_accum_steps": 2},
        NO_COPY,
        SOAK,
    ),
    "reproducible": (2, {"strategy": "zero1", "reproducible": 4}, {"reproducible": None}),
    "reproducible, unsharded": (
        2,
        {"strategy": "zero0", "reproducible": 4, "dtype": "bfloat16"},
        {"reproducible": None},
        SOAK,
    ),
    "local steps": (*_outer_steps("zero2", 2), SOAK),
    "local steps in bfloat16": (*_outer_steps("zero3", 2, wire="bfloat16", fragments=2), SOAK),
    "local steps in int8": _outer_steps("zero0", 2, wire="int8"),
    "local steps in int4": (*_outer_steps("zero1", 1, wire="int4"), SOAK),
    "local steps in e4m3": (*_outer_steps("zero3", 2, wire="e4m3"), SOAK),
}


@pytest.fixture(autouse=True)
def _small_parameters_travel_so_too(monkeypatch):
    monkeypatch.setattr("zeroshard.zero.precision.EXACT_NUMEL", 64)


def _trained(comm, config, planner):
    run = build_run(config, comm, CPU, predict=planner)
    try:
        return train(run), run.contract
    finally:
        run.close()


def _moving(**other):
    """A planner of what a run holds, and of what another would send."""

    def planner(job):
        sent = predict(replace(job, **other))
        return replace(predict(job), messages=sent.messages, outer_steps=sent.outer_steps)

    return planner


@pytest.mark.redundant(but=["local steps in int8"])
@pytest.mark.parametrize(
    ("num_ranks", "given", "other"), [pytest.param(*each[:3], id=name, marks=each[3:]) for name, each in CASES.items()]
)
def test_a_run_is_held_to_what_it_sends(tiny_config, num_ranks, given, other):
    config = tiny_config(plan={"enforce": True}, eval_interval=0, max_steps=3, warmup_steps=1, **given)
    for status, contract in run_threads(lambda comm: _trained(comm, config, predict), num_ranks):
        assert (status, contract.difference, contract.num_checked) == (ExitStatus.OK, "", 2)
    elsewhere = config.model_copy(update={"out": f"{config.out}-other"})
    for status, contract in run_threads(lambda comm: _trained(comm, elsewhere, _moving(**other)), num_ranks):
        assert status == ExitStatus.CHECK_FAILED
        assert "collective" in contract.difference


IN_8_BITS = {
    "unsharded": (2, {"strategy": "zero0"}),
    "alone": (1, {"strategy": "zero1"}),
    "bfloat16, several micro-batches": (2, {"strategy": "zero1", "dtype": "bfloat16", "grad_accum_steps": 2}),
    "replicas, an average of the weights": (4, {"strategy": "zero2", "shard_size": 2, "ema_decay": 0.9}),
    "copy, int8": (4, {"strategy": "zero3", "node_copy": 2, "wire": INT8}),
    "reproducible": (2, {"strategy": "zero3", "reproducible": 4, "grad_accum_steps": 2}),
    "local steps": (4, {"strategy": "zero3", "shard_size": 2, "local_steps": {"every": 2, "wire": "int8"}}),
    "off the device": (2, {"strategy": "zero3", "offload": {"state": "all"}}),
    "reduced in bfloat16": (2, {"strategy": "zero2", "dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
}


KEPT_IN = (("unsharded", "bf16"), ("off the device", "int8"), ("reduced in bfloat16", "bf16"))


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("num_ranks", "given", "state_format"),
    [pytest.param(*IN_8_BITS[name], form, id=f"{name}, {form}") for name, form in KEPT_IN],
)
def test_a_run_with_states_in_another_format_is_held_to_their_bytes(tiny_config, num_ranks, given, state_format):
    how = {"plan": {"enforce": True}, "eval_interval": 0, "max_steps": 3, "warmup_steps": 1}
    config = tiny_config(state_format=state_format, **how, **given)
    for status, contract in run_threads(lambda comm: _trained(comm, config, predict), num_ranks):
        assert (status, contract.difference, contract.num_checked) == (ExitStatus.OK, "", 2)


@pytest.mark.redundant
@pytest.mark.parametrize("given", [{}, {"dtype": "bfloat16", "grad_accum_steps": 2, "strategy": "zero3"}])
def test_a_run_with_inputs_on_the_host_is_held_to_their_slots(tiny_config, given):
    config = tiny_config(plan={"enforce": True}, eval_interval=0, max_steps=3, warmup_steps=1, **given)
    model = config.model.model_copy(update={"n_layer": 3, "activation_checkpointing": "offload"})
    config = config.model_copy(update={"model": model})
    gc.collect()  # an earlier run's blocks keep its slots
    ((status, contract),) = run_threads(lambda comm: _trained(comm, config, predict), 1)
    assert (status, contract.difference, contract.num_checked) == (ExitStatus.OK, "", 2)
    tokens = config.micro_batch_size * config.seq_len
    itemsize = 2 if given else 4
    assert contract.memory_bytes["host_inputs"] == 2 * room(tokens * config.model.n_embd * itemsize)
    assert "host_inputs" in contract.line()


@pytest.mark.redundant
def test_slots_of_a_model_that_is_still_here_are_no_part_of_another_run(tiny_config):
    plain = tiny_config(plan={"enforce": True}, eval_interval=0, max_steps=3, warmup_steps=1)
    model = plain.model.model_copy(update={"n_layer": 3, "activation_checkpointing": "offload"})
    earlier = build_run(plain.model_copy(update={"model": model}), NullCommunicator(1), CPU)
    try:
        train(earlier)
        assert slot_bytes() > 0
        plain = plain.model_copy(update={"out": f"{plain.out}-plain"})
        ((status, contract),) = run_threads(lambda comm: _trained(comm, plain, predict), 1)
        assert (status, contract.difference) == (ExitStatus.OK, "")
        assert "host_inputs" not in contract.memory_bytes
    finally:
        earlier.close()


NO_MASTERS = {  # weights are bfloat16: no averages, no local steps
    "alone": (1, {"strategy": "zero1"}),
    "several micro-batches": (2, {"strategy": "zero1", "grad_accum_steps": 2}),
    "reproducible": (2, {"strategy": "zero3", "reproducible": 4, "grad_accum_steps": 2}),
    "off the device": (2, {"strategy": "zero3", "offload": {"state": "all"}}),
    "reduced in float32": (4, {"strategy": "zero2", "shard_size": 2, "reduce_dtype": "float32"}),
}


# The others differ in bytes that tests/budgets holds to the plan without a run.
QUICK = {
    "adamw8bit": ("alone", "replicas, an average of the weights", "reproducible", "off the device"),
    "flash-adamw": ("several micro-batches", "off the device"),
}


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("optimizer", "num_ranks", "given"),
    [
        pytest.param(optimizer, *each, id=f"{optimizer}, {name}", marks=[] if name in QUICK[optimizer] else SOAK)
        for optimizer, settings in (("adamw8bit", IN_8_BITS), ("flash-adamw", NO_MASTERS))
        for name, each in settings.items()
    ],
)
def test_a_run_with_8_bit_states_is_held_to_their_bytes(tiny_config, optimizer, num_ranks, given):
    how = {"plan": {"enforce": True}, "eval_interval": 0, "max_steps": 3, "warmup_steps": 1}
    dtype = {"dtype": "bfloat16"} if optimizer == "flash-adamw" else {}
    config = tiny_config(optimizer=optimizer, **how, **dtype, **given)
    for status, contract in run_threads(lambda comm: _trained(comm, config, predict), num_ranks):
        assert (status, contract.difference, contract.num_checked) == (ExitStatus.OK, "", 2)
