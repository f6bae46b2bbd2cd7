"""NaN, infinity or an overflow of float16 on one rank: no rank takes that step, and all go on equal."""

from dataclasses import replace

import pytest
import torch

from exactness import same_bits
from tiny_runs import built, events_of
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import ExitStatus
from zeroshard.parallel import STRATEGIES
from zeroshard.train.loop.loop import take_step, train
from zeroshard.train.setup.build import build_run

CPU = torch.device("cpu")
BAD_RANK, NUM_STEPS = 1, 5
# Why a step was skipped: the steps, and what a run is given.
BAD = {"not finite": ({1, 3}, {"ema_decay": 0.9}), "overflow": ({2}, {"dtype": "float16", "grad_accum_steps": 2})}


def _spoil_in(run, step_now, why):
    """In the steps of `BAD` rank `BAD_RANK` has a loss or a gradient that is not finite.

    An overflow is that of one element alone where that can be done, so that it is sharded to a single rank.
    """
    bad, _ = BAD[why]

    def is_bad():
        return run.strategy.comm.rank == BAD_RANK and step_now[0] in bad

    def on_loss(module, args, loss):
        if not is_bad():
            return loss
        if why == "overflow":
            return loss * 1e8
        if step_now[0] == min(bad):
            return loss * float("inf")
        loss = loss * 1.0
        loss.register_hook(lambda grad: grad * float("nan"))
        return loss

    def spoil(grad):
        if is_bad():
            grad = grad.clone()
            grad[0] = float("inf")
        return grad

    if why == "not finite" or run.config["strategy"] == "fsdp2":  # its parameters change places with others in use
        run.strategy.model.register_forward_hook(on_loss)
    else:
        weights = dict(run.strategy.model.named_parameters())
        next(param for name, param in weights.items() if name.endswith("ln_f.bias")).register_hook(spoil)


def _state(strategy):
    return {(s.name, s.kind): s.tensor.clone() for s in strategy.named_shards()}


def steps_with_bad_numbers(comm, config, why):
    run = build_run(config, comm, CPU)
    step_now = [0]
    _spoil_in(run, step_now, why)
    records, states = [], [_state(run.strategy)]
    for step_now[0] in range(NUM_STEPS):
        records.append(take_step(run, step_now[0], lambda: False)[0])
        states.append(_state(run.strategy))
    run.close()
    return records, states, dict(run.strategy.state_dict())


@pytest.mark.redundant
@pytest.mark.pairwise("strategy")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("why", BAD)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(why, strategy, tiny_config, gloo_ranks):
    bad, given = BAD[why]
    by_rank = gloo_ranks(2).run(steps_with_bad_numbers, tiny_config(strategy=strategy, **given), why)
    for records, states, weights in by_rank:
        assert [record.why_skipped for record in records] == [why if step in bad else "" for step in range(NUM_STEPS)]
        assert [record.num_skipped for record in records] == [
            len({*range(step + 1)} & bad) for step in range(NUM_STEPS)
        ]
        scales = [65536, 65536, 65536, 32768, 32768] if why == "overflow" else [None] * NUM_STEPS
        assert [record.loss_scale for record in records] == scales
        for step in range(NUM_STEPS):
            assert same_bits(states[step], states[step + 1]) == (step in bad)
            if step in bad:
                assert records[step + 1].lr == records[step].lr  # the schedule waits
        assert why == "not finite" or records[4].lr != records[2].lr  # and goes on
        assert all(tensor.isfinite().all() for tensor in weights.values())
        assert same_bits(weights, by_rank[0][2])
    for mine, theirs in zip(by_rank[0][0], by_rank[1][0], strict=True):
        assert mine.grad_norm == theirs.grad_norm or why == "not finite"


def resumed_and_whole(comm, config, until):
    def go(config, until=None):
        run = build_run(config, comm, CPU)
        step_now = [0]
        _spoil_in(run, step_now, "overflow")
        inner = run.learning_rate

        def noting(step):  # called once a step, with the number of steps taken
            step_now[0] = step + run.scaler.num_skipped
            return inner(step)

        run = replace(run, learning_rate=noting)
        if until is not None:
            run = replace(run, schedule=replace(run.schedule, max_steps=until))
        train(run)
        run.close()
        return run.scaler.state_dict(), dict(run.strategy.state_dict())

    whole = go(config)
    parts = config.model_copy(update={"out": f"{config.out}-parts"})
    go(parts, until)
    resumed = go(parts.model_copy(update={"resume": "auto"}))
    return whole[0] == resumed[0] and same_bits(whole[1], resumed[1]), whole[0]


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp2", marks=pytest.mark.soak)])
def test_a_resumed_run_goes_on_with_the_scale_and_the_schedule(strategy, tiny_config, gloo_ranks):
    config = tiny_config(strategy=strategy, dtype="float16", eval_interval=0, loss_scale_interval=3)
    for same, scaler in gloo_ranks(2).run(resumed_and_whole, config, 4):
        assert same
        assert scaler == {"scale": 65536.0, "num_since_overflow": 0, "num_skipped": 1}


@pytest.mark.redundant
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
        run = built(tiny_config(dtype=dtype, out=f"{tiny_config().out}-{dtype}"))
        assert run.scaler is None


@pytest.mark.redundant(but=["2-backward"])
@pytest.mark.parametrize(("stage", "way"), [(0, "forward"), (3, "forward"), (2, "backward"), (3, "backward")])
def test_the_first_module_that_went_wrong_is_named_with_its_rank(stage, way, tiny_config, capsys):
    config = tiny_config(strategy=f"zero{stage}", eval_interval=0, optim={"max_not_finite": 2})

    def rank_main(comm):
        run = build_run(config, comm, CPU)

        def poison(module, args, output):
            if way == "forward":
                return output * float("nan")
            output = output * 1.0
            output.register_hook(lambda grad: grad * float("inf"))
            return output

        if comm.rank == BAD_RANK:
            run.strategy.model.blocks[1].mlp.register_forward_hook(poison)
        try:
            return train(run)
        finally:
            run.close()

    assert run_threads(rank_main, 2) == [ExitStatus.NOT_FINITE] * 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    if way == "forward":
        assert "the first NaN/Inf was the output of blocks.1.mlp (MLP) on rank 1;" in said[0]
    else:
        assert "the first NaN/Inf was the gradient that reached the output of blocks.1.mlp" in said[0]
    assert [step["num_skipped"] for step in events_of(config.out, "step")] == [1, 2]
