"""What else may be done with replicas that take local steps, and what is refused."""

import math

import pytest
import torch

from exactness import same_bits
from local_steps_runs import DILOCO, FRAGMENTS, Net, both, engine_of, loss_of, train
from zeroshard.comm import LocalCommunicator, ObservedCommunicator, run_threads
from zeroshard.zero import LocalSteps, Zero


def test_a_last_outer_step_may_be_called_for_and_the_model_taken_back():
    def rank_main(comm):
        engine = engine_of(comm, 3, FRAGMENTS)
        train(comm, engine, range(3))
        outer_steps = engine[1].local_steps.outer_step()
        global_weights, local = both(engine[1])
        assert same_bits(global_weights, local)
        train(comm, engine, range(3, 4))
        global_weights = both(engine[1])[0]
        engine[1].remove()
        assert same_bits(global_weights, engine[0].state_dict())
        return [outer_step.fragment for outer_step in outer_steps], global_weights

    (fragments, global_weights), (_, theirs) = run_threads(rank_main, 2)
    assert fragments == [0, 1]
    assert same_bits(global_weights, theirs)


def test_a_replica_that_skips_a_step_goes_on_with_the_others():
    def rank_main(comm):
        observed = ObservedCommunicator(comm)
        net, zero, optim = engine = engine_of(observed, 2, DILOCO, 2)
        observed.drain()
        for step in range(6):
            loss_of(net, step, comm.rank, comm.world_size).backward()
            taken = not (step == 1 and comm.rank < 2)
            if taken:
                optim.step()
            optim.zero_grad()
            zero.local_steps.step(taken=taken)
        return [(r.op, r.num_bytes, r.label) for r in observed.records], both(engine[1])[0]

    (issued, global_weights), *others = run_threads(rank_main, 4)
    assert all(theirs == issued and same_bits(global_weights, other) for theirs, other in others)


@pytest.mark.redundant
def test_another_stage_between_outer_steps_keeps_global_weights():
    def rank_main(comm):
        found = []
        for restaged in (False, True):
            engine = engine_of(comm, 3, FRAGMENTS, 2)
            train(comm, engine, range(3))
            if restaged:
                engine[1].restage(0)
            train(comm, engine, range(3, 9))
            found.append(both(engine[1]))
        return found

    for (global_weights, local), (global_weights_then, local_then) in run_threads(rank_main, 4):
        assert same_bits(global_weights, global_weights_then)
        assert same_bits(local, local_then)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, 2])
def test_whole_tensors_and_parameters_that_are_trained_later(stage):
    def rank_main(comm):
        net = Net()
        net.blocks.requires_grad_(False)
        zero = Zero(
            net, stage, comm=comm, shard_size=2, local_steps=LocalSteps(every=2, outer_lr=1.0, outer_momentum=0.0)
        )
        optim = zero.optimizer(torch.optim.Adafactor, lr=0.1)
        for step in range(4):
            if step == 2:
                assert zero.memory_bytes()["outer"] < 8 * sum(p.numel() for p in net.parameters())
                net.blocks.requires_grad_(True)
            loss_of(net, step, comm.rank, comm.world_size).backward()
            optim.step()
            optim.zero_grad()
            zero.local_steps.step()
        return zero.state_dict()

    first, *others = run_threads(rank_main, 4)
    assert all(same_bits(first, other) for other in others)
    assert not same_bits({"w": first["blocks.0.weight"]}, {"w": Net().blocks[0].weight.detach()})


def test_loaded_weights_are_the_global_weights_on_every_replica_also_what_each_had_alone():
    def rank_main(comm):
        _, zero, _ = engine = engine_of(comm, 2, DILOCO)
        train(comm, engine, range(2))
        mine = zero.state_dict()
        zero.load_state_dict(mine)
        after = mine, *both(zero)
        with zero.full_params(write_back=True):
            engine[0].last.bias.data.zero_()
        return after, both(zero)[0]

    by_rank = run_threads(rank_main, 2)
    first = by_rank[0][0][0]
    assert not same_bits(first, by_rank[1][0][0])
    for (_, global_weights, local), written in by_rank:
        assert same_bits(first, global_weights)
        assert same_bits(first, local)
        assert not written.pop("last.bias").any()
        assert same_bits(dict(written), {name: first[name] for name in written})


# -- what is refused --------------------------------------------------------------------------------------------------


class _Lookahead(torch.optim.SGD):
    """Goes half way back to weights that it keeps for itself."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self._slow = [param.detach().clone() for group in self.param_groups for param in group["params"]]
        self._count = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self._count += 1
        if self._count % 5 == 0:
            params = [param for group in self.param_groups for param in group["params"]]
            for param, slow in zip(params, self._slow, strict=True):
                param.copy_(slow.lerp_(param, 0.5))


def test_an_optimizer_that_keeps_weights_in_its_state_or_for_itself_is_refused():
    for cls, words in (
        (torch.optim.ASGD, "keeps weights in its state"),
        (_Lookahead, "goes back to weights that it has"),
    ):
        zero = Zero(Net(), 2, comm=LocalCommunicator(), shard_size=1, local_steps=DILOCO)
        with pytest.raises(ValueError, match=f"{cls.__name__} {words}"):
            zero.optimizer(cls)


def test_who_never_calls_step_of_the_replicas_is_told():
    net, _zero, optim = engine_of(LocalCommunicator(), 2, DILOCO)
    for refused in (False, True):
        loss_of(net, 0, 0, 1).backward()
        if refused:
            with pytest.raises(RuntimeError, match=r"stepped twice without zero.local_steps.step\(\)"):
                optim.step()
        else:
            optim.step()
            optim.zero_grad()


def test_a_step_that_replicas_do_not_know_of_is_not_saved():
    net, zero, optim = engine_of(LocalCommunicator(), 2, DILOCO)
    loss_of(net, 0, 0, 1).backward()
    optim.step()
    with pytest.raises(RuntimeError, match=r"named_shards: the optimizer has stepped, and zero.local_steps.step\(\)"):
        list(zero.named_shards())
    zero.local_steps.step()
    assert list(zero.named_shards())


def test_ranks_with_other_settings_are_told_apart_before_they_miss_each_other():
    def rank_main(comm):
        with pytest.raises(ValueError, match=r"local_steps: rank 0 has LocalSteps\(every=3.* rank 1 has .*every=4"):
            engine_of(comm, 2, LocalSteps(every=3 + comm.rank))

    run_threads(rank_main, 2)


def test_what_would_change_global_weights_for_weights_is_refused():
    net, zero, optim = engine = engine_of(LocalCommunicator(), 2, DILOCO)
    train(zero.comm, engine, range(1))
    loss_of(net, 0, 0, 1).backward()
    with zero.local_steps.global_weights():
        for act in (optim.step, zero.local_steps.step, zero.local_steps.outer_step, lambda: list(zero.named_shards())):
            with pytest.raises(RuntimeError, match=r"leave local_steps.global_weights\(\) first"):
                act()
    with pytest.raises(RuntimeError, match="each replica has weights of its own between outer steps"):
        zero.full_params(write_back=True).__enter__()
    with pytest.raises(ValueError, match="ema: replicas with local steps have no weights in common"):
        zero.ema()


def test_a_replica_that_has_diverged_is_told_of_on_every_rank():
    def rank_main(comm):
        net, _zero, _ = engine = engine_of(comm, 2, DILOCO)
        train(comm, engine, range(2))
        if comm.rank == 1:
            with torch.no_grad():
                net.last.bias.fill_(math.inf)
        with pytest.raises(RuntimeError, match="after step 3 the difference of fragment 0 has norm"):
            train(comm, engine, range(2, 3))

    run_threads(rank_main, 2)
