"""What users do to replicas that take local steps beside the ordinary loop: it works, or is told in a line."""

import pytest
import torch

from exactness import same_bits
from local_steps_runs import DILOCO, Net, both, engine_of, loss_of, train
from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.zero import LocalSteps, Zero


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
        zero.local_steps.step()
        sent.append([(record.op, record.num_bytes, record.label) for record in observed.records])
    assert scaler.get_scale() == 1.0
    assert sent[0] == sent[1] != []


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_written_after_an_outer_step_is_saved_beside_the_global_weights(stage, tmp_path):
    def rank_main(comm):
        engine = engine_of(comm, stage, DILOCO, 2)
        net, zero, _ = engine
        train(comm, engine, range(3))
        with torch.no_grad():
            net.last.bias.clamp_(-0.01, 0.01)
        global_weights, local = both(zero)
        assert local["last.bias"].abs().max() <= 0.01 < global_weights["last.bias"].abs().max()
        checkpoint.save(tmp_path / "saved", zero, step=3)
        train(comm, engine, range(3, 5))
        other = engine_of(comm, 2, DILOCO, 2)
        checkpoint.load(tmp_path / "saved", other[1])
        train(comm, other, range(3, 5))
        return both(zero), both(other[1])

    for went_on, resumed in run_threads(rank_main, 4):
        assert all(same_bits(one, other) for one, other in zip(went_on, resumed, strict=True))


def test_a_number_of_steps_is_no_local_steps():
    def rank_main(comm):
        with pytest.raises(TypeError, match=r"^local_steps: 4 is no LocalSteps; give LocalSteps\(every=H\)"):
            engine_of(comm, 2, 4)

    run_threads(rank_main, 2)


@pytest.mark.parametrize("when", ["before the step", "after each backward"])
def test_replicas_that_are_stepped_at_the_wrong_place_say_so(when):
    def rank_main(comm):
        net, zero, optim = engine_of(comm, 1, LocalSteps(every=4))
        for micro in range(2):
            with zero.micro_batch(last=micro == 1):
                loss_of(net, micro, comm.rank, comm.world_size).backward()
            if micro == 1 or when == "after each backward":
                zero.local_steps.step()
        with pytest.raises(RuntimeError, match=r"^step: zero\.local_steps\.step\(\) was called before an optimizer"):
            optim.step()

    run_threads(rank_main, 2)


@pytest.mark.redundant
@pytest.mark.parametrize("clear", ["none", "zero", "by hand"])
def test_a_step_that_was_skipped_and_cleared_is_no_mistake(clear):
    def rank_main(comm):
        net, zero, optim = engine_of(comm, 2, LocalSteps(every=4))
        for step in range(3):
            loss_of(net, step, comm.rank, comm.world_size).backward()
            if step != 1:
                optim.step()
            zero.local_steps.step()
            if clear == "by hand":
                for param in net.parameters():
                    param.grad = None
            else:
                optim.zero_grad(set_to_none=clear == "none")
        return zero.local_steps.num_steps

    assert run_threads(rank_main, 2) == [3, 3]


@pytest.mark.parametrize("shared", [False, True], ids=["units apart", "in the same units"])
def test_half_of_a_step_is_told_of(shared):
    """Two optimizers, and an outer step between their steps."""

    def rank_main(comm):
        net = Net()
        zero = Zero(net, 2, comm=comm, shard_size=1, local_steps=LocalSteps(every=4))
        params = list(net.parameters())
        halves = (params[::2], params[1::2]) if shared else (params[:3], params[3:])
        one, other = (zero.optimizer(torch.optim.AdamW, half) for half in halves)
        for step in range(2):
            loss_of(net, step, comm.rank, comm.world_size).backward()
            one.step()
            if step == 1:
                zero.local_steps.step()
                one.zero_grad()
                with pytest.raises(RuntimeError, match=r"^step: zero\.local_steps\.step\(\) was called before an"):
                    other.step()
                other.zero_grad()
                loss_of(net, step, comm.rank, comm.world_size).backward()
                one.step()
            other.step()
            zero.local_steps.step()
            zero.zero_grad()
        return zero.local_steps.num_steps

    assert run_threads(rank_main, 2) == [3, 3]


def test_a_scaler_may_skip_the_step_of_one_optimizer_of_two():
    net = Net()
    zero = Zero(net, 1, comm=LocalCommunicator(), shard_size=1, local_steps=LocalSteps(every=4))
    params = list(net.parameters())
    optimizers = [zero.optimizer(torch.optim.SGD, half, lr=0.1) for half in (params[:2], params[2:])]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(3):
        scaler.scale(loss_of(net, step, 0, 1)).backward()
        if step == 1:
            net.first.bias.grad.fill_(torch.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        zero.local_steps.step()
        zero.zero_grad()
    assert zero.local_steps.num_steps == 3
    assert scaler.get_scale() == 1.0


@pytest.mark.redundant(but=["between outer steps-2"])
@pytest.mark.pairwise("stage")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_steps", [2, 3], ids=["between outer steps", "at rest"])
def test_gradients_of_global_weights_may_be_read_and_not_stepped_by(stage, num_steps):
    def rank_main(comm):
        net, zero, optim = engine = engine_of(comm, stage, DILOCO, 2)
        train(comm, engine, range(num_steps))
        with zero.local_steps.global_weights():
            loss_of(net, 7, 0, 1).backward()
            with pytest.raises(RuntimeError, match=r"^step: global weights are in the place of local ones"):
                optim.step()
        of_global_weights = zero.full_grads()
        before = zero.state_dict()
        with pytest.raises(RuntimeError, match=r"^step: these are gradients of .* call zero_grad\(\)"):
            optim.step()
        assert same_bits(zero.state_dict(), before)
        optim.zero_grad()
        train(comm, engine, range(num_steps, 4))
        return of_global_weights

    alike = run_threads(rank_main, 4)
    assert all(same_bits(alike[0], other) for other in alike)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_evaluation_of_global_weights_between_forward_and_backward_leaves_the_gradients_as_they_are(stage):
    def rank_main(comm):
        grads = []
        for evaluated in (False, True):
            net, zero, _ = engine = engine_of(comm, stage, DILOCO, 2)
            train(comm, engine, range(2))
            loss = loss_of(net, 7, 0, 1)
            if evaluated:
                with zero.local_steps.global_weights(), torch.no_grad():
                    loss_of(net, 8, 0, 1)
            loss.backward()
            grads.append(zero.full_grads())
        return grads

    assert all(same_bits(without, after) for without, after in run_threads(rank_main, 4))


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [1, 3])
def test_no_backward_goes_through_a_forward_of_other_weights(stage):
    def rank_main(comm):
        net, zero, optim = engine = engine_of(comm, stage, DILOCO, 2)
        train(comm, engine, range(2))
        before = loss_of(net, 7, 0, 1)
        with zero.local_steps.global_weights():
            inside = loss_of(net, 7, 0, 1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                before.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            inside.backward()
        optim.zero_grad()
        train(comm, engine, range(2, 3))

    run_threads(rank_main, 2)
