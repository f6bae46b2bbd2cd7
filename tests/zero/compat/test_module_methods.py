"""What users do to a model under an engine as if it were an ordinary one: made right, or refused in one line."""

import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nets import Net, rows
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero import STAGES, Zero


def engine(stage=2, world_size=2):
    net = Net()
    net.register_buffer("count", torch.zeros(2))
    comm = NullCommunicator(world_size) if world_size > 1 else LocalCommunicator()
    zero = Zero(net, stage=stage, comm=comm)
    return net, zero, zero.optimizer(torch.optim.SGD, lr=0.1)


def step(net, optim):
    net(rows(0)).sum().backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_moves_to_where_it_is_are_taken(stage):
    net, _, optim = engine(stage)
    for move in (
        lambda: net.to(torch.device("cpu", 0)),
        lambda: net.to("cpu"),
        lambda: net.cpu(),
        lambda: net.float(),
        lambda: nn.Sequential(net).to(torch.device("cpu", 0), torch.float32),
        lambda: net.blocks[1].to(torch.device("cpu", 0)),
    ):
        move()
        step(net, optim)
    assert net(rows(0)).device == torch.device("cpu")


MOVES = {
    "dtype": (lambda net: net.double(), "to torch.float64: their dtype is torch.float32"),
    "dtype of a part": (lambda net: net.last.half(), "to torch.float16: their dtype is torch.float32"),
    "device": (lambda net: net.to("meta"), "to meta: they are on cpu"),
    "nothing": (lambda net: net.to_empty(device="cpu"), r"to empty ones \(to_empty\(\)\)"),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_to_elsewhere_are_refused_and_say_what_differs(name):
    move, what = MOVES[name]
    net, _, _ = engine()
    with pytest.raises(RuntimeError, match=rf"^model: the engine's buffers hold .* can be moved {what}"):
        move(net)


def test_another_memory_format_is_refused():
    net = nn.Conv2d(3, 4, 3)
    Zero(net, comm=NullCommunicator(2))
    with pytest.raises(RuntimeError, match="to another memory format"):
        net.to(memory_format=torch.channels_last)


def test_a_pickle_is_refused_and_says_what_to_save():
    net, zero, _ = engine()
    for module in (net, net.blocks[1], nn.Sequential(net)):
        with pytest.raises(RuntimeError, match=r"^torch.save\(model\), pickle: .*zero.state_dict\(\)"):
            pickle.dumps(module)
    zero.remove()
    pickle.dumps(net)


def reset(module):
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.25)


@pytest.mark.parametrize("stage", STAGES)
def test_apply_is_refused_where_it_would_be_lost_and_works_in_full_params(stage):
    net, _, _ = engine(stage)
    for module in (net, nn.Sequential(net)):
        with pytest.raises(RuntimeError, match=r"^model.apply\(\): .*full_params\(write_back=True\)"):
            module.apply(reset)

    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        with zero.full_params(write_back=True):
            net.apply(reset)
        return net(rows(comm.rank)).sum().item()

    plain = Net().apply(reset)
    assert run_threads(go, 2) == [pytest.approx(plain(rows(rank)).sum().item(), rel=1e-5) for rank in range(2)]


def test_apply_is_ordinary_where_nothing_is_sharded():
    net, zero, _ = engine(3, world_size=1)
    net.apply(reset)
    assert (zero.state_dict()["first.weight"] == 0.25).all()


def test_other_wrappers_are_refused_around_and_inside(process_group):
    net, _, _ = engine(0, world_size=1)
    with pytest.raises(RuntimeError, match=r"^DistributedDataParallel: the model is under Zero\(\)"):
        DistributedDataParallel(net)
    around = DistributedDataParallel(nn.Sequential(net))
    with pytest.raises(RuntimeError, match=r"^DistributedDataParallel: the model is under Zero\(\)"):
        around(rows(0))
    with pytest.raises(ValueError, match=r"^model: a DistributedDataParallel averages gradients itself"):
        Zero(DistributedDataParallel(Net()), comm=LocalCommunicator())
    with pytest.raises(ValueError, match=r"^model: a DataParallel averages"):
        Zero(nn.Sequential(nn.DataParallel(Net())), comm=LocalCommunicator())


def test_an_engine_inside_of_another_models_ddp_forward_is_left_alone(process_group):
    teacher, _, _ = engine(0, world_size=1)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(6, 6)

        def forward(self, x):
            with torch.no_grad():
                return (self.own(x) - teacher(x)).square().mean()

    assert DistributedDataParallel(Student())(rows(0)).isfinite()


@pytest.mark.redundant
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_from_before_the_step_is_refused_by_autograd_as_in_one_process(stage, precision):
    from zeroshard.zero import MixedPrecision

    def losses(net):
        return [net(rows(0, micro)).square().mean() for micro in range(2)]

    def take(net, optim):
        first, second = losses(net)
        first.backward()
        optim.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
        optim.zero_grad()
        losses(net)[1].backward()  # a new graph is good

    plain = Net()
    take(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    net = Net()
    mixed = MixedPrecision(param_dtype=torch.bfloat16) if precision else None
    zero = Zero(net, stage=stage, comm=NullCommunicator(2), precision=mixed)
    take(net, zero.optimizer(torch.optim.SGD, lr=0.1))


def test_a_graph_through_parameters_that_no_step_moved_is_good():
    """Autograd raises otherwise, as the test above asserts."""

    def take(net, optim):
        last = net.last(rows(0)).sum()
        net(rows(0)).square().mean().backward()
        optim.step()
        last.backward()

    for world_size in (1, 2):
        net = Net()
        zero = Zero(net, stage=1, comm=NullCommunicator(world_size) if world_size > 1 else LocalCommunicator())
        take(net, zero.optimizer(torch.optim.SGD, net.first.parameters(), lr=0.1))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_is_asked_in_silence_for_parameters_to_freeze_or_to_train(stage):
    net, _, optim = engine(stage)
    step(net, optim)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for param in net.last.parameters():
            param.requires_grad = False
    assert not told


class Writer(Net):
    """It generates as transformers' models do, and tells what it was asked."""

    def generate(self, prompt, *, synced_gpus=None):
        return synced_gpus, prompt


def test_generate_is_refused_where_ranks_of_sharded_weights_cannot_wait_for_each_other():
    def go(comm):
        net = Writer()
        zero = Zero(net, stage=3, comm=comm)
        with pytest.raises(RuntimeError, match=r"^model\.generate\(\): .*call it inside zero\.full_params\(\)"):
            net.generate("once")
        with zero.full_params():
            inside = net.generate("once")
        zero.restage(2)
        return inside, net.generate("once")

    assert run_threads(go, 2) == [((None, "once"), (None, "once"))] * 2


def test_generate_on_sharded_weights_has_ranks_wait_for_each_other(gloo_ranks):
    assert gloo_ranks(2).run(asked_to_wait) == [(True, None)] * 2


def asked_to_wait(comm):
    net = Writer()
    zero = Zero(net, stage=3, comm=comm)
    asked, _ = net.generate("once")
    zero.remove()
    return asked, net.generate("once")[0]
