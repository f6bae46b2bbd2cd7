"""Replicas that take local steps, against the paper's algorithm in one process, and stages against each other."""

import pytest
import torch
from torch import Tensor

from equivalence.remedies import Replicas
from exactness import same_bits
from late import late
from local_steps_runs import (
    ALL_KINDS,
    AVERAGING,
    DILOCO,
    FRAGMENTS,
    SOAK,
    STAGES,
    Net,
    engine_of,
    loss_of,
    near,
    train,
)
from zeroshard.comm import ObservedCommunicator, run_threads
from zeroshard.zero import LocalSteps, MixedPrecision, Zero


def _by_hand(settings: LocalSteps, num_replicas: int, num_steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The global weights and the first replica's weights, in one process."""
    models = [Net() for _ in range(num_replicas)]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.03) for model in models]
    fragments = {1: [("",)], 2: [("first", "last", "blocks.1"), ("blocks.0",)]}[settings.fragments]
    replicas = Replicas(models, settings, fragments)
    for step in range(num_steps):
        for rank, (model, optim) in enumerate(zip(models, inner, strict=True)):
            loss_of(model, step, rank, num_replicas).backward()
            optim.step()
            optim.zero_grad()
        replicas.step()
    return replicas.global_weights, dict(models[0].named_parameters())


@pytest.mark.parametrize("settings", [AVERAGING, DILOCO, FRAGMENTS], ids=["averaging", "diloco", "fragments"])
def test_it_is_the_algorithm_of_the_paper(settings):
    def rank_main(comm):
        engine = engine_of(comm, 2, settings)
        outer_steps = train(comm, engine, range(9))
        local = engine[1].state_dict()
        with engine[1].local_steps.global_weights():
            return outer_steps, engine[1].state_dict(), local

    global_weights, local = _by_hand(settings, 2, 9)
    (outer_steps, ours, mine), (_, theirs, _) = run_threads(rank_main, 2)
    near(global_weights, ours)
    near(local, mine)
    assert same_bits(ours, theirs)
    assert [outer_step.num_replicas for outer_step in outer_steps] == [2] * len(outer_steps)
    expected = {
        AVERAGING: [(step, 0) for step in range(1, 10)],
        DILOCO: [(3, 0), (6, 0), (9, 0)],
        FRAGMENTS: [(2, 0), (4, 1), (6, 0), (8, 1)],
    }
    assert [(outer_step.step, outer_step.fragment) for outer_step in outer_steps] == expected[settings]
    assert all(outer_step.difference_norm > 0 for outer_step in outer_steps)


@pytest.mark.redundant
@pytest.mark.parametrize("delivery", ["late", pytest.param("on_time", marks=SOAK)])
@ALL_KINDS
@pytest.mark.parametrize("shard_size", [pytest.param(1, marks=SOAK), 2])
def test_stages_in_a_replica_have_the_same_bits_and_replicas_the_same_global_weights(settings, shard_size, delivery):
    def rank_main(comm):
        comm = late(comm) if delivery == "late" else comm
        found = []
        for stage in STAGES:
            engine = engine_of(comm, stage, settings, shard_size)
            train(comm, engine, range(9))
            with engine[1].local_steps.global_weights():
                global_weights = engine[1].state_dict()
            found.append((global_weights, engine[1].state_dict()))
        return found

    by_rank = run_threads(rank_main, 4)
    for found in by_rank:
        for global_weights, local in found:
            assert same_bits(global_weights, by_rank[0][0][0])
            assert same_bits(local, found[0][1])
            assert settings is not DILOCO or same_bits(global_weights, local)  # the ninth step was an outer step


@pytest.mark.redundant
def test_weights_of_another_dtype_follow_their_masters_through_an_outer_step():
    precision = MixedPrecision(param_dtype=torch.bfloat16)

    def rank_main(comm):
        found = []
        for stage in STAGES:
            net, zero, _ = engine = engine_of(comm, stage, DILOCO, 2, precision=precision)
            train(comm, engine, range(3))
            with zero.full_params():
                shown = {name: param.detach().clone() for name, param in net.named_parameters()}
            full = zero.state_dict()
            assert all(torch.equal(shown[name], full[name].bfloat16()) for name in shown)
            found.append(full)
        return found

    first, *others = [full for found in run_threads(rank_main, 4) for full in found]
    assert all(same_bits(first, other) for other in others)


@pytest.mark.redundant
def test_only_differences_cross_replicas_once_in_so_many_steps():
    def rank_main(comm):
        observed = ObservedCommunicator(comm)
        engine = engine_of(observed, 3, LocalSteps(every=4), 2)
        observed.drain()
        outer_steps = train(observed, engine, range(8))
        crossing = [r for r in observed.records if r.world_size == 3]
        assert not [r for r in observed.records if r.world_size == 6]
        assert {r.op for r in crossing} == {"all_reduce"}
        assert {r.label.rpartition("/")[2] for r in crossing} == {"difference"}
        shard_bytes = sum(4 * g.params.layout.shard_numel for u in engine[1].units for g in u.groups)
        assert [outer_step.num_bytes for outer_step in outer_steps] == [shard_bytes] * 2
        assert engine[1].memory_bytes()["outer"] == 2 * shard_bytes
        return sum(r.num_bytes for r in crossing) == 2 * shard_bytes

    assert all(run_threads(rank_main, 6))


@pytest.mark.redundant
def test_sixty_four_local_steps_send_a_sixtieth_across_replicas_with_all_control_messages():
    def rank_main(comm):
        crossed = []
        for settings in (None, LocalSteps(every=64)):
            observed = ObservedCommunicator(comm)
            net = Net()
            zero = Zero(net, 2, comm=observed, shard_size=1, local_steps=settings)
            optim = zero.optimizer(torch.optim.SGD, lr=0.01)
            observed.drain()
            for step in range(64):
                loss_of(net, step, comm.rank, comm.world_size).backward()
                optim.step()
                optim.zero_grad()
                if zero.local_steps:
                    zero.local_steps.step()
            crossed.append(sum(r.num_bytes for r in observed.records if r.world_size == comm.world_size))
        return crossed

    for each_step, local in run_threads(rank_main, 2):
        assert 0 < local <= each_step / 60


def test_a_narrow_wire_halves_the_bytes_and_keeps_global_weights_alike():
    def rank_main(comm):
        found = {}
        for wire in (None, torch.bfloat16, "int8"):
            engine = engine_of(comm, 2, LocalSteps(every=2, wire=wire))
            (outer_step,) = train(comm, engine, range(2))
            found[wire] = outer_step.num_bytes, engine[1].state_dict()
        return found

    first, second = run_threads(rank_main, 2)
    assert 2 * first[torch.bfloat16][0] == first[None][0]
    assert same_bits(first[torch.bfloat16][1], second[torch.bfloat16][1])
    for name, exact in first[None][1].items():
        torch.testing.assert_close(first[torch.bfloat16][1][name], exact, rtol=0, atol=2e-3)
        torch.testing.assert_close(first["int8"][1][name], exact, rtol=0, atol=2e-3)
    assert same_bits(first["int8"][1], second["int8"][1])
    assert first["int8"][0] < 0.35 * first[None][0]  # of so few elements a scale is a sixteenth
