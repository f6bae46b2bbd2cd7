"""What happens between a forward and a step, in every order that a training loop may think of."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nets import (
    NOTHING_RANDOM,
    WIDTH,
    LiveWeights,
    Net,
    Turn,
    assert_every_stage_equals_one_process,
    rows,
    units_with_weights,
)
from zeroshard.comm import NullCommunicator
from zeroshard.zero import STAGES, Zero


@pytest.mark.redundant
def test_a_unit_without_gradients_on_any_rank_is_not_stepped():
    """No decay, no momentum: its weights and the optimizer's state are what one process has."""

    def take_turn(turn: Turn) -> None:
        turn.loss(skip={1} if turn.step > 0 else ()).backward()

    for kwargs in ({"weight_decay": 0.5}, {"optimizer": torch.optim.SGD, "momentum": 0.9, "lr": 0.1}):
        assert_every_stage_equals_one_process(Net, take_turn, **kwargs)


@pytest.mark.redundant
def test_a_frozen_unit_that_one_rank_skips_lets_gradients_through_on_the_other():
    def build() -> Net:
        net = Net()
        net.blocks[1].requires_grad_(False)
        return net

    def take_turn(turn: Turn) -> None:
        with torch.no_grad():
            turn.loss()
        turn.loss(skip={1} if turn.rank == 1 else ()).backward()

    assert_every_stage_equals_one_process(build, take_turn)


@pytest.mark.redundant
@pytest.mark.parametrize("prefetch", [0, 1])
def test_two_forwards_may_share_a_backward_while_a_rank_skips_a_unit(prefetch):
    def take_turn(turn: Turn) -> None:
        first = turn.loss(skip={1} if turn.rank == 0 else ())
        second = turn.model(rows(turn.rank, 50), skip={2} if turn.rank == 1 else ()).sum()
        (first + second).backward()

    kwargs = {"prefetch": prefetch}
    assert_every_stage_equals_one_process(lambda: Net(4), take_turn, zero_kwargs=kwargs)


@pytest.mark.redundant
def test_some_backwards_may_come_without_communication():
    def take_turn(turn: Turn) -> None:
        assert turn.zero is not None
        turn.loss().backward()
        with turn.zero.no_sync():
            turn.loss().backward()
            turn.loss().backward()
        turn.loss().backward()

    def plain_turn(turn: Turn) -> None:
        for _ in range(4):
            turn.loss().backward()

    assert_every_stage_equals_one_process(Net, take_turn, plain_turn=plain_turn)


@pytest.mark.redundant
def test_a_unit_used_only_without_communication_is_reduced_all_the_same():
    def take_turn(turn: Turn) -> None:
        assert turn.zero is not None
        with turn.zero.no_sync():
            turn.loss().backward()
        turn.loss(skip={0, 2}).backward()

    def plain_turn(turn: Turn) -> None:
        turn.loss().backward()
        turn.loss(skip={0, 2}).backward()

    assert_every_stage_equals_one_process(Net, take_turn, plain_turn=plain_turn)


@pytest.mark.redundant
def test_a_graph_may_be_run_backward_twice():
    def take_turn(turn: Turn) -> None:
        loss = turn.loss()
        loss.backward(retain_graph=True)
        loss.backward()

    assert_every_stage_equals_one_process(Net, take_turn)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_backward_may_be_differentiated():
    def penalty(turn: Turn) -> None:
        x = rows(turn.rank, turn.step).requires_grad_()
        loss = turn.model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()

    assert_every_stage_equals_one_process(Net, penalty)

    def keeps_graph(turn: Turn) -> None:
        turn.loss().backward(create_graph=True)
        for param in turn.model.parameters():
            param.grad = None if param.grad is None else param.grad.detach()

    assert_every_stage_equals_one_process(Net, keeps_graph)


@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_last_backward_is_an_error(stage):
    net = Net()
    zero = Zero(net, stage=stage, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    with zero.no_sync():
        net(rows(0)).sum().backward()
    for refused in (optim.step, lambda: zero.clip_grad_norm_(1.0), zero.full_grads):
        with pytest.raises(RuntimeError, match=r"gradients accumulated under no_sync\(\) were never reduced"):
            refused()
    optim.zero_grad()
    optim.step()


def checkpointed(reentrant, **kwargs):
    def path(net, x):
        for block in net.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant, **NOTHING_RANDOM, **kwargs))
        return x

    return path


CHECKPOINTED = {
    "reentrant": checkpointed(True),
    "not reentrant": checkpointed(False),
    "not reentrant, to the end": checkpointed(False, early_stop=False),
}


@pytest.mark.redundant(but=["plain-3"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("path", ["plain", "reentrant", "not reentrant", "not reentrant, to the end"])
def test_stage_three_holds_the_root_and_as_many_units_as_it_looks_ahead(path, prefetch):
    net = Net(8, block=LiveWeights, **({} if path == "plain" else {"path": CHECKPOINTED[path]}))
    zero = Zero(net, stage=3, comm=NullCommunicator(2), prefetch=prefetch)
    seen = units_with_weights(net, zero)
    for _ in range(2):
        net(rows(0)).sum().backward()
    assert max(seen) == prefetch + 1
    assert all(group.params.full_bytes == 0 for unit in zero.units for group in unit.groups)


@pytest.mark.parametrize("returned", ["its input", "its input, changed in place", "its input and more"])
def test_weights_of_layers_that_are_dropped_are_freed_as_others_are(returned):
    class Dropped(LiveWeights):
        def forward(self, x):
            if returned == "its input and more":
                return x, super().forward(x)
            return x if returned == "its input" else x.mul_(2)

    def path(net, x):
        for number, block in enumerate(net.blocks):
            out = block(x)
            x = out[0] + out[1] if isinstance(out, tuple) else out
            x = x if number % 4 else torch.tanh(x) + 0  # whose values no backward reads
        return x

    def make():
        net = Net(8, block=LiveWeights, path=path)
        for number in (1, 2, 3, 5, 6):
            net.blocks[number].__class__ = Dropped
        return net

    assert_every_stage_equals_one_process(make, world_size=2)
    zero = Zero(net := make(), stage=3, comm=NullCommunicator(2))
    seen = units_with_weights(net, zero)
    for _ in range(2):
        net(rows(0)).sum().backward()
    assert max(seen) == 2


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_gradients_are_unsharded_for_a_few_units_at_a_time(stage):
    net = Net(8)
    zero = Zero(net, stage=stage, comm=NullCommunicator(2))
    full = 4 * (6 * 6 + 6)
    seen = []
    for block in net.blocks:
        block.weight.register_hook(lambda grad: seen.append(zero.memory_bytes()["grads"]))
    net(rows(0)).sum().backward()
    settled = zero.memory_bytes()["grads"]
    assert settled == 10 * full // 2
    assert max(seen) <= settled + 2 * full + 4 * full  # the root's two layers, and units on their way


class AddsInPlace(nn.Linear):
    """A residual that is added to what came in, in place."""

    def forward(self, x):
        x += torch.tanh(super().forward(x.clone()))
        return x


class WritesIntoItsInput(nn.Linear):
    """Its output goes into the dict that its input came in."""

    def forward(self, features):
        features["x"] = torch.tanh(super().forward(features["x"]))
        return features


def nothing_between(net, x):
    for block in net.blocks:
        x = block(x)
    return x


def through_a_dict(net, x):
    features = {"x": x}
    for block in net.blocks:
        features = block(features)
    return features["x"]


@pytest.mark.redundant
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_unit_may_change_its_input_in_place(prefetch):
    for build in (
        lambda: Net(block=lambda: AddsInPlace(WIDTH, WIDTH), path=nothing_between),
        lambda: Net(block=lambda: WritesIntoItsInput(WIDTH, WIDTH), path=through_a_dict),
    ):
        assert_every_stage_equals_one_process(build, zero_kwargs={"prefetch": prefetch})


@pytest.mark.redundant
@pytest.mark.parametrize("evaluates", [False, True])
def test_another_forward_may_come_between_a_gradient_of_gradients_and_its_backward(evaluates):
    def take_turn(turn: Turn) -> None:
        x = rows(turn.rank, turn.step).requires_grad_()
        y = turn.model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with torch.set_grad_enabled(not evaluates):
            other = turn.model(rows(turn.rank, turn.step + 100))
        (other.square().mean() + y.square().mean() + slope.square().mean()).backward()

    assert_every_stage_equals_one_process(Net, take_turn)


@pytest.mark.redundant
def test_a_backward_that_raised_takes_nothing_from_the_next_one():
    def take_turn(turn: Turn) -> None:
        x = rows(turn.rank, turn.step).requires_grad_()
        x.register_hook(lambda grad: 1 / 0)
        bad, good = turn.model(x).square().mean(), turn.loss()
        with pytest.raises(ZeroDivisionError):
            bad.backward()
        if turn.zero is None:  # gradients of other ranks have been added up here
            for param, before in kept.items():
                param.grad = before
        else:
            turn.optim.zero_grad()
        good.backward()
        if turn.zero is None:
            kept.update({param: param.grad.clone() for param in turn.model.parameters()})
            if turn.rank == 1:
                kept.update(dict.fromkeys(kept))

    kept: dict[nn.Parameter, torch.Tensor | None] = {}

    def build():
        net = Net()
        kept.update(dict.fromkeys(net.parameters()))
        return net

    assert_every_stage_equals_one_process(build, take_turn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_a_backward_that_raised_is_refused(stage):
    net = Net()
    zero = Zero(net, stage, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    net(rows(0)).sum().backward()
    x = rows(0).requires_grad_()
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"^step: the last backward ended in an exception.*zero_grad"):
        optim.step()
    optim.zero_grad()
    net(rows(0)).sum().backward()
    optim.step()


@pytest.mark.parametrize("stage", STAGES)
def test_unsharded_weights_are_not_changed_while_they_are_shown(stage):
    net = Net()
    zero = Zero(net, stage, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    state = zero.state_dict()
    net(rows(0)).sum().backward()
    with zero.full_params():
        for change, what in ((optim.step, "step"), (lambda: zero.load_state_dict(state), "load_state_dict")):
            with pytest.raises(RuntimeError, match=f"^{what}: .*outside full_params"):
                change()
    optim.step()


class Hidden:
    __slots__ = ("x",)


class Hides(nn.Linear):
    """Its output lies where nobody finds it."""

    def forward(self, x):
        hidden = Hidden()
        hidden.x = super().forward(x)
        return hidden


def hiding(net, x, skip=()):
    for place, block in enumerate(net.blocks):
        if place not in skip:
            x = torch.tanh(block(x).x)
    return x


@pytest.mark.redundant(but=["1-0-3"])
@pytest.mark.pairwise
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_unit_that_hides_its_output_may_be_skipped_on_one_rank(rank, place, prefetch):
    def take_turn(turn: Turn) -> None:
        turn.loss(skip={place} if turn.rank == rank else ()).backward()

    build = lambda: Net(block=lambda: Hides(WIDTH, WIDTH), path=hiding)  # noqa: E731
    assert_every_stage_equals_one_process(build, take_turn, zero_kwargs={"prefetch": prefetch})
