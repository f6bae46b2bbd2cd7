"""What users do to replicas that take local steps beside the ordinary loop: it works, or is told in a line."""

from __future__ import annotations

import pytest
import torch

from replica_runs import DILOCO, both, engine_of, loss_of, same, train
from zeroshard import checkpoint
from zeroshard.comm import NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.zero import LocalSteps


def test_a_replica_whose_first_step_is_skipped_sends_as_much_as_the_others():
    observed = ObservedCommunicator(NullCommunicator(2))
    net, zero, optim = engine_of(observed, 2, LocalSteps(every=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    sent = []
    for factor in (torch.inf, 1.0):
        observed.drain()
        scaler.scale(loss_of(net, 0, 0, 2) * factor).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        zero.replicas.step()
        sent.append([(record.op, record.num_bytes, record.scope) for record in observed.records])
    assert scaler.get_scale() == 1.0
    assert sent[0] == sent[1] != []


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_written_after_a_meeting_is_saved_beside_the_anchors(stage, tmp_path):
    def rank_main(comm):
        engine = engine_of(comm, stage, DILOCO, 2)
        net, zero, _ = engine
        train(comm, engine, range(3))
        with torch.no_grad():
            net.last.bias.clamp_(-0.01, 0.01)
        anchors, local = both(zero)
        assert local["last.bias"].abs().max() <= 0.01 < anchors["last.bias"].abs().max()
        checkpoint.save(tmp_path / "saved", zero, step=3)
        train(comm, engine, range(3, 5))
        other = engine_of(comm, 2, DILOCO, 2)
        checkpoint.load(tmp_path / "saved", other[1])
        train(comm, other, range(3, 5))
        return both(zero), both(other[1])

    for went_on, resumed in run_threads(rank_main, 4):
        assert all(same(one, other) for one, other in zip(went_on, resumed, strict=True))


@pytest.mark.parametrize("when", ["before the step", "after each backward"])
def test_replicas_that_are_stepped_at_the_wrong_place_say_so(when):
    def rank_main(comm):
        net, zero, optim = engine_of(comm, 1, LocalSteps(every=4))
        for micro in range(2):
            with zero.micro_batch(last=micro == 1):
                loss_of(net, micro, comm.rank, comm.world_size).backward()
            if micro == 1 or when == "after each backward":
                zero.replicas.step()
        with pytest.raises(RuntimeError, match=r"^step: zero\.replicas\.step\(\) was called while gradients waited"):
            optim.step()

    run_threads(rank_main, 2)


@pytest.mark.parametrize("clear", ["none", "zero", "by hand"])
def test_a_step_that_was_skipped_and_cleared_is_no_mistake(clear):
    def rank_main(comm):
        net, zero, optim = engine_of(comm, 2, LocalSteps(every=4))
        for step in range(3):
            loss_of(net, step, comm.rank, comm.world_size).backward()
            if step != 1:
                optim.step()
            zero.replicas.step()
            if clear == "by hand":
                for param in net.parameters():
                    param.grad = None
            else:
                optim.zero_grad(set_to_none=clear == "none")
        return zero.replicas.num_steps

    assert run_threads(rank_main, 2) == [3, 3]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 4, "fragments": 1.5}, "fragments: 1.5 is no whole number"),
        ({"every": 4, "overlap_steps": 1.5}, "overlap_steps: 1.5 is no whole number"),
        ({"every": 4, "overlap_steps": True}, "overlap_steps: True is no whole number"),
        ({"every": 4, "rounding_seed": "x"}, "rounding_seed: 'x' is no whole number"),
        ({"every": 4, "outer_lr": "0.7"}, "outer_lr: '0.7' is no number"),
        ({"every": 4, "outer_momentum": None}, "outer_momentum: None is no number"),
        ({"every": 4, "mixing": None}, "mixing: None is no number"),
        ({"every": 4, "wire": torch.float8_e4m3fn}, "wire: torch.float8_e4m3fn .* choose 'e4m3'"),
    ],
)
def test_settings_of_another_type_are_refused_before_they_are_used(given, words):
    with pytest.raises(ValueError, match=words):
        LocalSteps(**given)
