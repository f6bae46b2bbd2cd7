"""float16: where one rank's gradients overflow, no rank takes the step, and all go on equal; at every strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tiny_runs import events_of
from zeroshard.comm import LocalCommunicator
from zeroshard.errors import ExitStatus
from zeroshard.parallel import STRATEGIES
from zeroshard.train.loop.loop import take_step, train
from zeroshard.train.setup.build import build_run

CPU = torch.device("cpu")
BAD_STEP, BAD_RANK, NUM_STEPS = 2, 1, 5


def _overflow_in(run, step_now, bad):
    """From now on, gradients of rank `BAD_RANK` overflow in those steps.

    One element alone where that can be done, so that sharded gradients are not finite on a single rank.
    """

    def is_bad():
        return run.strategy.comm.rank == BAD_RANK and step_now[0] in bad

    def spoil(grad):
        if is_bad():
            grad = grad.clone()
            grad[0] = float("inf")
        return grad

    if run.config["strategy"] == "fsdp2":  # its parameters change places with others while they are used
        run.strategy.model.register_forward_hook(lambda module, args, loss: loss * 1e8 if is_bad() else loss)
    else:
        weights = dict(run.strategy.model.named_parameters())
        next(param for name, param in weights.items() if name.endswith("ln_f.bias")).register_hook(spoil)


def _state(strategy):
    shards = {(s.name, s.kind): s.tensor.clone() for s in strategy.named_shards()}
    return {name: tensor.clone() for name, tensor in strategy.state_dict().items()}, shards


def steps_with_an_overflow(comm, config):
    run = build_run(config, comm, CPU)
    step_now = [0]
    _overflow_in(run, step_now, {BAD_STEP})
    records, states = [], [_state(run.strategy)]
    for step_now[0] in range(NUM_STEPS):
        records.append(take_step(run, step_now[0], lambda: False)[0])
        states.append(_state(run.strategy))
    run.close()
    return records, states


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_on_one_rank_is_skipped_by_all(strategy, tiny_config, gloo_ranks):
    config = tiny_config(strategy=strategy, dtype="float16", grad_accum_steps=2)
    by_rank = gloo_ranks(2).run(steps_with_an_overflow, config)
    for records, states in by_rank:
        assert [record.skipped for record in records] == [step == BAD_STEP for step in range(NUM_STEPS)]
        assert [record.num_skipped for record in records] == [0, 0, 1, 1, 1]
        assert [record.loss_scale for record in records] == [65536, 65536, 65536, 32768, 32768]
        assert records[BAD_STEP + 1].lr == records[BAD_STEP].lr  # the schedule waits
        assert records[BAD_STEP + 2].lr != records[BAD_STEP].lr
        for step in range(NUM_STEPS):
            for before, after in zip(states[step], states[step + 1], strict=True):
                changed = before.keys() != after.keys() or not _equal(before, after)
                assert changed == (step != BAD_STEP)
    for (weights, _), (others, _) in zip(by_rank[0][1], by_rank[1][1], strict=True):
        assert _equal(weights, others)
    assert [record.grad_norm for record in by_rank[0][0]] == [record.grad_norm for record in by_rank[1][0]]


def resumed_and_whole(comm, config, until):
    def go(config, until=None):
        run = build_run(config, comm, CPU)
        step_now = [0]
        _overflow_in(run, step_now, {BAD_STEP})
        inner = run.learning_rate

        def noting(step):  # called once a step, with the number of steps taken
            step_now[0] = step + run.scaler.num_skipped
            return inner(step)

        run = replace(run, learning_rate=noting)
        if until is not None:
            run = replace(run, schedule=replace(run.schedule, max_steps=until))
        train(run)
        run.close()
        return run.scaler.state_dict(), _state(run.strategy)[0]

    whole = go(config)
    parts = config.model_copy(update={"out": f"{config.out}-parts"})
    go(parts, until)
    resumed = go(parts.model_copy(update={"resume": "auto"}))
    return whole[0] == resumed[0] and _equal(whole[1], resumed[1]), whole[0]


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_a_resumed_run_goes_on_with_the_scale_and_the_schedule(strategy, tiny_config, gloo_ranks):
    config = tiny_config(strategy=strategy, dtype="float16", eval_interval=0, loss_scale_interval=3)
    for same, scaler in gloo_ranks(2).run(resumed_and_whole, config, 4):
        assert same
        assert scaler == {"scale": 65536.0, "num_since_overflow": 0, "num_skipped": 1}


def test_a_skip_is_in_the_log_and_endless_overflow_ends_the_run(tiny_config, capsys):
    config = tiny_config(dtype="float16", loss_scale=4.0, eval_interval=0)
    run = build_run(config, LocalCommunicator(), CPU)
    run.strategy.model.register_forward_hook(lambda module, args, loss: loss * 1e12)
    assert train(run) == ExitStatus.NOT_FINITE
    run.close()
    steps = events_of(config.out, "step")
    assert [(step["loss_scale"], step["num_skipped"], step["skipped"]) for step in steps] == [
        (4.0, 1, True),
        (2.0, 2, True),
        (1.0, 3, True),
    ]
    assert all(step["grad_norm"] is None for step in steps)
    assert "is NaN/Inf at a loss scale of 1, the last of 3 skipped steps; the first " in capsys.readouterr().err


def test_other_dtypes_scale_nothing(tiny_config):
    for dtype in ("float32", "bfloat16"):
        run = build_run(tiny_config(dtype=dtype, out=f"{tiny_config().out}-{dtype}"), LocalCommunicator(), CPU)
        run.close()
        assert run.scaler is None
