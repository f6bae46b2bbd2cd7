"""Communication that nothing runs beside; `test_contract.py` holds its results to the contract."""

import torch

from zeroshard.comm import BlockingCommunicator, Link, NullCommunicator, ThrottledCommunicator
from zeroshard.comm.wrappers import throttle as module


def test_an_operation_has_ended_when_its_call_returns(monkeypatch):
    slept = []
    monkeypatch.setattr(module, "sleep_until", slept.append)
    throttled = ThrottledCommunicator(NullCommunicator(2), Link(0.0, 1e6))
    whole, shard = torch.zeros(2000), torch.zeros(1000)
    blocking = BlockingCommunicator(throttled)
    for issue, num_bytes in (
        (lambda comm: comm.all_reduce(whole), 8000),
        (lambda comm: comm.reduce_scatter(shard, whole), 4000),
        (lambda comm: comm.all_gather(whole, shard), 4000),
        (lambda comm: comm.broadcast(whole, src=0), 8000),
    ):
        issue(throttled)
        assert not slept  # what it wraps returns at once
        issue(blocking)
        assert len(slept) >= 1, num_bytes
        slept.clear()
