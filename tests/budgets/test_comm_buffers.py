"""Buffers that communicators keep for themselves, planned beside those of real ones, to the byte."""

import pytest
import torch

from zeroshard.comm import ObservedCommunicator, RingCommunicator, SharedMemoryCommunicator, buffer_bytes
from zeroshard.comm.registry import name_of
from zeroshard.lab.planner.run_plan import predict
from zeroshard.models import build_model
from zeroshard.train.records.plan_contract import Job
from zeroshard.zero import STAGES, Zero

BACKENDS = {"ring": RingCommunicator, "shm": SharedMemoryCommunicator}
ROWS, SEQ_LEN = 1, 8


def _model(width):
    overrides = {"n_layer": 2, "n_head": 2, "n_embd": width}
    return build_model("gpt2-demo", vocab_size=31, seq_len=SEQ_LEN, overrides=overrides)


def _kept(_, stage, width, shard_size):
    """By name: bytes that each communicator has after two steps."""
    found = {}
    for make in BACKENDS.values():
        comm = ObservedCommunicator(make())
        zero = Zero(model := _model(width), stage, comm=comm, units=model.units, shard_size=shard_size)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            model(*torch.zeros(2, ROWS, SEQ_LEN, dtype=torch.int64)).backward()
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found[name_of(comm)] = buffer_bytes(comm)
        comm.inner.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "shard_size", "stage", "width"), [(2, 2, 0, 16), (2, 2, 3, 256), (4, 2, 2, 256), (4, 1, 1, 256)]
)
def test_buffers_of_communicators_are_as_planned(gloo_ranks, world_size, shard_size, stage, width):
    with torch.device("meta"):
        facts = _model(width), STAGES[stage], 0, world_size, torch.float32, 1, ROWS, SEQ_LEN
    how = {"uniform_order": True, "device_type": "cpu", "estimates": False, "shard_size": shard_size}
    planned = {name: predict(Job(*facts, backend=name, **how)).comm_bytes for name in (*BACKENDS, "torch")}
    assert planned.pop("torch") is None
    given = stage, width, shard_size if shard_size < world_size else None
    assert gloo_ranks(world_size).run(_kept, *given) == [planned] * world_size
