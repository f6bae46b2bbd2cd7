"""A NaN/Inf in one rank's gradients is told with that rank, before it is in every weight."""

import warnings

import pytest
import torch

from nets import Net, rows
from zeroshard.comm import ObservedCommunicator, run_threads
from zeroshard.zero import STAGES, Zero
from zeroshard.zero.guards import non_finite

WORLD_SIZE = 3


def train(comm, stage, bad, *, num_micro=1, after=lambda zero, step: True):
    """Steps whose rank and micro-batch ``bad[step]`` has a NaN; the warnings, and collectives of each step."""
    observed = ObservedCommunicator(comm)
    net = Net()
    zero = Zero(net, stage, comm=observed)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    num_sent = []
    for step, where in enumerate(bad):
        observed.drain()
        for micro in range(num_micro):
            x = rows(comm.rank)
            if where == (comm.rank, micro):
                x[0, 0] = float("nan")
            with zero.micro_batch(last=micro == num_micro - 1):
                net(x).square().mean().backward()
        if after(zero, step):
            optim.step()
        optim.zero_grad()
        num_sent.append(len(observed.records))
    return num_sent


def warned(stage, bad, **kwargs):
    """What ranks were warned of, and rank 0's collectives by step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_sent, *_ = run_threads(lambda comm: train(comm, stage, bad, **kwargs), WORLD_SIZE)
    return [str(each.message) for each in caught if "NaN" in str(each.message)], num_sent


@pytest.mark.redundant(but=["2-3"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_micro", [1, 2])
def test_the_rank_that_had_it_first_is_named_once_at_the_step(stage, num_micro):
    lines, num_sent = warned(stage, [None, (1, 0), (2, 0), None], num_micro=num_micro)
    (line,) = lines
    assert line.startswith("step: gradients of rank 1 had a NaN/Inf before they were averaged, so this step makes ")
    healthy = warned(stage, [None] * 2, num_micro=num_micro)[1]
    assert num_sent[1] == healthy[1] + 1  # who had it is exchanged, and in a healthy step nothing more is


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_said_where_the_step_is_skipped(stage):
    lines, _ = warned(stage, [(1, 0), None], after=lambda zero, step: step == 1)
    assert lines == []


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_raises_if_asked_to_alike_on_every_rank_and_changes_nothing(stage):
    errors = []

    def after(zero, step):
        before = {name: grad.clone() for name, grad in zero.full_grads().items()}
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped") as error:
            zero.clip_grad_norm_(1.0, error_if_nonfinite=True)
        errors.append(str(error.value))
        for name, grad in zero.full_grads().items():
            torch.testing.assert_close(grad, before[name], rtol=0, atol=0, equal_nan=True)
        return False

    lines, _ = warned(stage, [(2, 0)], after=after)
    assert lines == []
    assert len(errors) == WORLD_SIZE
    assert len(set(errors)) == 1
    assert errors[0].startswith("clip_grad_norm_: the total norm of order 2.0 for gradients is non-finite")
    assert "; rank 2 had the first NaN/Inf; " in errors[0]


@pytest.mark.redundant(but=["0"])
@pytest.mark.parametrize("stage", STAGES)
def test_finite_gradients_are_clipped_as_without(stage):
    def after(zero, step):
        assert zero.clip_grad_norm_(1e-3, error_if_nonfinite=True) > 1e-3
        assert zero.clip_grad_norm_(1.0) == pytest.approx(1e-3, rel=1e-3)
        return True

    assert warned(stage, [None], after=after)[0] == []


class Late:
    """A mark that is passed when it is asked for the second time, as if a device were a step behind."""

    def __init__(self):
        self.num_asked = 0

    def query(self):
        self.num_asked += 1
        return self.num_asked > 1

    def synchronize(self):
        self.num_asked = 9


@pytest.mark.parametrize(("skips", "number"), [(False, 1), (True, 0)])
def test_what_a_device_has_not_computed_yet_is_told_by_the_next_backward(monkeypatch, skips, number):
    look = non_finite._Look
    monkeypatch.setattr(non_finite, "_Look", lambda total, there, num_steps: look(total, Late(), num_steps))
    lines, _ = warned(2, [(1, 0), None, None], after=lambda zero, step: not (skips and step == 0))
    assert [line.split(" had ")[0] for line in lines] == ["step: gradients of rank 1"] * number


def test_a_clip_that_raises_waits_for_the_device(monkeypatch):
    look = non_finite._Look
    monkeypatch.setattr(non_finite, "_Look", lambda total, there, num_steps: look(total, Late(), num_steps))

    def after(zero, step):
        with pytest.raises(RuntimeError, match="; rank 1 had the first NaN/Inf; "):
            zero.clip_grad_norm_(1.0, error_if_nonfinite=True)
        return False

    assert warned(2, [(1, 0)], after=after)[0] == []
