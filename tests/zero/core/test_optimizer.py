"""The core's optimizer alone, over groups without an engine: on pieces it does what the class does on everything."""

import pytest
import torch
from torch import nn

from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero.core.optimizer import PieceOptimizer
from zeroshard.zero.core.precision import Precision
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import STAGES
from zeroshard.zero.core.units import Group

SHAPES = {"weight": (3, 5), "bias": (5,), "scale": (), "unused": (2,)}


def values(shape, start):
    return (torch.arange(torch.Size(shape).numel()).view(shape) + start) / 3


def params_of():
    return {name: nn.Parameter(values(shape, 0)) for name, shape in SHAPES.items()}


def param_groups(params):
    return [{"params": [params["bias"], params["scale"]], "lr": 0.3}, {"params": [params["weight"], params["unused"]]}]


def grads(step):
    return {name: values(SHAPES[name], step - 3) for name in ("weight", "bias", "scale")}


def built(stage, comm):
    params = params_of()
    rank_groups = RankGroups(comm, comm, LocalCommunicator())
    group = Group.of("u", list(params.items()), STAGES[stage], rank_groups, Precision())
    homes = {param: (group, slot) for slot, param in enumerate(group.params.params)}
    return params, group, PieceOptimizer(torch.optim.AdamW, param_groups(params), homes, lr=0.1)


def take_step(group, optimizer, step):
    for slot, place in enumerate(group.params.layout.slots):
        if place.name in grads(step):
            group.grads.accumulate(slot, grads(step)[place.name])
    group.grads.reduce()
    group.grads.wait_for_reduce()
    group.expose_grads()
    optimizer.step()
    optimizer.zero_grad()


def in_one_process(num_steps):
    params = params_of()
    optimizer = torch.optim.AdamW(param_groups(params), lr=0.1)
    for step in range(num_steps):
        for name, grad in grads(step).items():
            params[name].grad = grad
        optimizer.step()
    return params, {name: optimizer.state[param] for name, param in params.items() if param in optimizer.state}


@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_states_are_those_of_one_process_also_after_a_load_into_another_world(stage):
    def go(comm, start=None, steps=range(2)):
        _, group, optimizer = built(stage, comm)
        if start is not None:
            for piece, view in zip(group.params.pieces, group.shards, strict=True):
                values = start[0][group.params.layout.slots[piece.slot].name]
                view.data.copy_(values.reshape(-1)[slice(*piece.interval)])
            optimizer.load_unsharded_states(start[1])
        for step in steps:
            take_step(group, optimizer, step)
        layout, master = group.params.layout, group.params.gather_master()
        weights = {slot.name: view for slot, view in zip(layout.slots, layout.views(master), strict=True)}
        return weights, optimizer.unsharded_states()

    after_two = run_threads(go, 3)
    after_four = run_threads(lambda comm: go(comm, after_two[0], range(2, 4)), 2)
    for num_steps, found in ((2, after_two), (4, after_four)):
        params, states = in_one_process(num_steps)
        for weights, kept in found:
            torch.testing.assert_close(weights, {name: param.detach() for name, param in params.items()})
            assert not kept.pop("unused", None)
            for name, state in states.items():
                flat = {kind: value if kind == "step" else value.view(-1) for kind, value in state.items()}
                torch.testing.assert_close(kept[name], flat)


def test_a_step_leaves_weights_stale_and_graphs_from_before_it_useless():
    params, group, optimizer = built(2, NullCommunicator(2))
    loss = params["weight"].square().sum()
    version = params["unused"]._version
    take_step(group, optimizer, 0)
    assert not group.params.readable
    assert not any(group.grads.used)
    assert all(piece.grad is None for piece in group.shards)
    assert params["unused"]._version == version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_that_were_not_reduced_are_no_step():
    _, group, optimizer = built(1, NullCommunicator(2))
    group.grads.accumulate(0, torch.ones(3, 5))
    group.unreduced = True  # as a backward without communication leaves it
    with pytest.raises(RuntimeError, match="never reduced"):
        optimizer.step()
    optimizer.zero_grad()
    assert not group.grads.pending
    optimizer.before_step()  # nothing waits any more
