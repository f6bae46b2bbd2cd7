import json

import pytest
import torch
from torch import nn

from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.optim import LossScaler


def _optimizer(*grads):
    params = [nn.Parameter(torch.zeros(3)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else torch.tensor(grad)
    return torch.optim.SGD(params, lr=1.0)


def _judge(scaler, finite):
    verdict = scaler.unscale_(_optimizer([1.0, 2.0, 3.0 if finite else float("inf")]))
    scaler.update()
    return verdict


def test_scaling_and_unscaling_change_no_bit():
    scaler = LossScaler(LocalCommunicator())
    loss = torch.tensor(0.3)
    assert scaler.scale_loss(loss).item() == loss.item() * 65536
    assert scaler.scale_loss(loss.half()).dtype == torch.float32
    values = torch.randn(3)
    optimizer = _optimizer((values * 65536).tolist(), None)
    assert scaler.unscale_(optimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][0].grad, values)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 2])
def test_what_one_rank_finds_all_ranks_know(bad, where):
    def rank_main(comm):
        scaler = LossScaler(comm)
        grads = [[1.0, 2.0, bad if comm.rank == where else 3.0], None]
        verdict = scaler.unscale_(_optimizer(*grads))
        scaler.update()
        return verdict, scaler.scale, scaler.num_skipped

    assert run_threads(rank_main, 3) == [(False, 32768.0, 1)] * 3


def test_a_rank_without_gradients_takes_part():
    assert run_threads(lambda comm: LossScaler(comm).unscale_(_optimizer(None)), 2) == [True, True]


def test_the_scale_doubles_after_an_interval_without_overflow_and_halves_at_one():
    scaler = LossScaler(LocalCommunicator(), scale=8.0, growth_interval=3)
    scales = []
    for finite in (True, True, False, True, True, True, True, True, True):
        assert _judge(scaler, finite) is finite
        scales.append(scaler.scale)
    assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16]
    assert scaler.num_skipped == 1


def test_a_scale_below_one_cannot_be_to_blame():
    scaler = LossScaler(LocalCommunicator(), scale=2.0)
    found = []
    for _ in range(2):
        _judge(scaler, finite=False)
        found.append(scaler.exhausted)
    assert found == [False, True]


def test_state_goes_through_json_and_the_interval_is_counted_on():
    scaler = LossScaler(LocalCommunicator(), scale=8.0, growth_interval=3)
    for finite in (False, True, True):
        _judge(scaler, finite)
    other = LossScaler(LocalCommunicator(), growth_interval=3)
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert other.state_dict() == scaler.state_dict()
    _judge(other, finite=True)
    assert (other.scale, other.num_skipped) == (8.0, 1)


def test_what_makes_no_sense_is_refused():
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="scale: "):
            LossScaler(LocalCommunicator(), scale)
    with pytest.raises(ValueError, match="growth_interval: 0"):
        LossScaler(LocalCommunicator(), growth_interval=0)
    with pytest.raises(RuntimeError, match="call unscale_"):
        LossScaler(LocalCommunicator()).update()
