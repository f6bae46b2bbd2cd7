"""Ranks that train with different stages, optimizers or settings of optimizers are told so before weights differ."""

import pytest
import torch
from torch import nn

from zeroshard import ShardedOptimizer, Zero
from zeroshard.comm import CONTROL, ObservedCommunicator, run_threads

WORLD_SIZE = 2


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _errors(rank_main, world_size=WORLD_SIZE):
    """What ``rank_main`` raises, on each rank."""

    def caught(comm):
        try:
            rank_main(comm)
        except Exception as error:  # noqa: BLE001 -- it is what is tested
            return error
        return None

    return run_threads(caught, world_size)


def _backward(model):
    model(torch.ones(3, 4)).square().mean().backward()


def _engine(comm, stage, kind=torch.optim.SGD, *, shard_size=None, lr=0.1, **settings):
    model = _model()
    zero = Zero(model, stage=stage, comm=comm, shard_size=shard_size)
    return model, zero, zero.optimizer(kind, lr=lr, **settings)


def _steps(model, optim, num=1):
    for _ in range(num):
        _backward(model)
        optim.step()
        optim.zero_grad()


def _all_say(errors, *parts, kind=ValueError):
    for error in errors:
        assert type(error) is kind, error
        for part in parts:
            assert part in str(error)


def _frozen(model):
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([{"stage": 0}, {"stage": 1}], "rank 0 has stage 0, rank 1 has stage 1"),
        ([{"prefetch": 1}, {"prefetch": 2}], "prefetch=2"),
        ([{"stage": 2}, {"stage": 2, "accumulate": "local"}], "accumulate='local'"),
        ([{}, {"buffers": "keep"}], "buffers='keep'"),
        ([{}, {"stage": 5}], "5 is not a ZeRO stage"),
        ([{"units": ["0", "2"]}, {"units": ["0"]}], "rank 0 has unit 2, rank 1 has nothing more"),
        ([{}, {"frozen": True}], "0.weight of torch.float32 [4, 4], frozen"),
    ],
)
def test_different_arguments_and_models_are_refused_on_every_rank(arguments, part):
    """`_all_say` asserts it."""

    def rank_main(comm):
        given = {"stage": 3, **arguments[comm.rank]}
        model = _frozen(_model()) if given.pop("frozen", False) else _model()
        Zero(model, comm=comm, **given)

    _all_say(_errors(rank_main), part)


@pytest.mark.redundant(but=["optimizers1-parts1-0"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("optimizers", "parts"),
    [
        ([(torch.optim.AdamW, {"lr": 1e-2}), (torch.optim.AdamW, {"lr": 2e-2})], ("lr = 0.01", "lr = 0.02")),
        ([(torch.optim.AdamW, {"lr": 1e-2}), (torch.optim.SGD, {"lr": 1e-2})], ("adamw.AdamW", "sgd.SGD")),
        (
            [(torch.optim.AdamW, {"betas": (0.9, 0.9)}), (torch.optim.AdamW, {"betas": (0.9, 0.95)})],
            ("betas = (0.9, 0.9)", "betas = (0.9, 0.95)"),
        ),
    ],
)
def test_different_optimizers_are_refused_before_the_first_step(stage, optimizers, parts):
    """`_all_say` asserts it."""

    def rank_main(comm):
        kind, settings = optimizers[comm.rank]
        model, _, optim = _engine(comm, stage, kind, **settings)
        _steps(model, optim)
        pytest.fail("it stepped")

    _all_say(_errors(rank_main), "optimizer: rank 0 has", "rank 1 has", "give every rank the same", *parts)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("during_a_step_alone", [False, True])
def test_a_learning_rate_that_begins_to_differ_is_refused_before_the_next_step(stage, during_a_step_alone):
    """`_all_say` asserts it."""

    def rank_main(comm):
        model, _, optim = _engine(comm, stage)
        if during_a_step_alone:
            _backward(model)
        else:
            _steps(model, optim)
        optim.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)  # as a scheduler does that was given the rank's own loss
        if during_a_step_alone:
            optim.step()
            optim.param_groups[0]["lr"] = 0.1
            optim.zero_grad()
        _backward(model)

    _all_say(_errors(rank_main), "lr = 0.1", "lr = 0.2")


def test_optimizers_that_the_user_made_are_compared_too():
    """`_all_say` asserts it."""

    def rank_main(comm):
        model = _model()
        optim = (torch.optim.SGD if comm.rank else torch.optim.AdamW)(model.parameters(), lr=0.1)
        Zero(model, stage=0, comm=comm)
        _steps(model, optim, 2)

    _all_say(_errors(rank_main), "adamw.AdamW", "sgd.SGD")


def test_replicas_of_different_settings_are_refused():
    """`_all_say` asserts it."""

    def rank_main(comm):
        model, _, _ = _engine(comm, 3, shard_size=2, lr=0.1 if comm.rank < 2 else 0.2)
        _backward(model)

    _all_say(_errors(rank_main, 4), "rank 0 has", "rank 2 has", "lr = 0.1", "lr = 0.2")


def test_a_replica_that_leaves_a_step_out_is_refused():
    """`_all_say` asserts it."""

    def rank_main(comm):
        model, _, optim = _engine(comm, 1, shard_size=2)
        _backward(model)
        if comm.rank < 2:
            optim.step()
        _backward(model)

    _all_say(_errors(rank_main, 4), "ranks ran a different number of backwards before a step", kind=RuntimeError)


def test_ranks_that_change_to_different_stages_are_refused():
    """`_all_say` asserts it."""

    def rank_main(comm):
        _engine(comm, 0)[1].restage(0 if comm.rank else 1)

    _all_say(_errors(rank_main), "restage: rank 0 has stage 1, rank 1 has stage 0")


def test_how_an_update_is_computed_may_differ():
    def rank_main(comm):
        model, _, optim = _engine(comm, 0, torch.optim.AdamW, foreach=bool(comm.rank))
        _steps(model, optim, 2)

    assert _errors(rank_main) == [None, None]


def test_comparing_adds_no_collective_to_a_step():
    def rank_main(comm):
        observed = ObservedCommunicator(comm)
        model, _, optim = _engine(observed, 2)
        for _ in range(2):
            observed.drain()
            _steps(model, optim)
        return [record.op for record in observed.drain() if record.label == CONTROL]

    assert run_threads(rank_main, WORLD_SIZE) == [["all_reduce"]] * WORLD_SIZE


@pytest.mark.parametrize(
    ("kinds", "rates", "parts"),
    [
        ((torch.optim.AdamW, torch.optim.SGD), (0.1, 0.1), ("adamw.AdamW", "sgd.SGD")),
        ((torch.optim.SGD, torch.optim.SGD), (0.1, 0.2), ("lr = 0.1", "lr = 0.2")),
    ],
)
def test_sharded_optimizers_that_differ_are_refused_when_they_are_made(kinds, rates, parts):
    """`_all_say` asserts it."""

    def rank_main(comm):
        ShardedOptimizer(_model().parameters(), kinds[comm.rank], comm=comm, lr=rates[comm.rank])

    _all_say(_errors(rank_main), *parts)


def test_a_sharded_optimizer_whose_rate_differs_changes_no_weight():
    def rank_main(comm):
        model = _model()
        optim = ShardedOptimizer(model.parameters(), torch.optim.SGD, comm=comm, lr=0.1)
        before = [param.detach().clone() for param in model.parameters()]
        _backward(model)
        optim.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
        try:
            optim.step()
        finally:
            assert all(map(torch.equal, before, model.parameters()))

    _all_say(_errors(rank_main), "lr = 0.1", "lr = 0.2")
