"""NaN or infinity on one rank: no rank takes that step, all go on equal, and the module that made it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zeroshard.comm import run_threads
from zeroshard.errors import ExitStatus
from zeroshard.parallel import STRATEGIES
from zeroshard.train.loop.loop import take_step, train
from zeroshard.train.setup.build import build_run

CPU = torch.device("cpu")
BAD_RANK, NUM_STEPS, BAD = 1, 5, {1, 3}


def _spoil_in(run, step_now):
    """Rank `BAD_RANK` has a loss that is not finite in the first step of `BAD`, and a gradient in the other."""

    def on_loss(module, args, loss):
        if run.strategy.comm.rank != BAD_RANK or step_now[0] not in BAD:
            return loss
        if step_now[0] == min(BAD):
            return loss * float("inf")
        loss = loss * 1.0
        loss.register_hook(lambda grad: grad * float("nan"))
        return loss

    run.strategy.model.register_forward_hook(on_loss)


def _state(strategy):
    return {(s.name, s.kind): s.tensor.clone() for s in strategy.named_shards()}


def steps_with_bad_numbers(comm, config):
    run = build_run(config, comm, CPU)
    step_now = [0]
    _spoil_in(run, step_now)
    records, states = [], [_state(run.strategy)]
    for step_now[0] in range(NUM_STEPS):
        records.append(take_step(run, step_now[0], lambda: False)[0])
        states.append(_state(run.strategy))
    run.close()
    return records, states, run.strategy.state_dict()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(strategy, tiny_config, gloo_ranks):
    config = tiny_config(strategy=strategy, ema_decay=0.9)
    by_rank = gloo_ranks(2).run(steps_with_bad_numbers, config)
    for records, states, weights in by_rank:
        assert [record.why_skipped for record in records] == ["", "not finite", "", "not finite", ""]
        assert [record.num_skipped for record in records] == [0, 1, 1, 2, 2]
        assert records[2].lr == records[1].lr  # the schedule waits
        for step in range(NUM_STEPS):
            before, after = states[step], states[step + 1]
            same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
            assert same == (step in BAD)
        assert all(tensor.isfinite().all() for tensor in weights.values())
        assert all(torch.equal(tensor, by_rank[0][2][name]) for name, tensor in weights.items())


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
        status = train(run)
        run.close()
        return status

    assert run_threads(rank_main, 2) == [ExitStatus.NOT_FINITE] * 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    if way == "forward":
        assert "the first NaN/Inf was the output of blocks.1.mlp (MLP) on rank 1;" in said[0]
    else:
        assert "the first NaN/Inf was the gradient that reached the output of blocks.1.mlp" in said[0]
    steps = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    assert [step["num_skipped"] for step in steps if step["event"] == "step"] == [1, 2]
