"""What users write into weights under an engine is the same on every rank, or every rank says so before a step."""

import pytest
import torch
from torch import nn

import zeroshard
from nets import Net, rows
from zeroshard.comm import PeerError, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero

WORLD_SIZE = 2
UNSHARDED = [stage for stage in STAGES if stage < 3]


def load_a_block(net, rank):
    if rank == 0:
        net.blocks[1].load_state_dict({name: value / 2 for name, value in net.blocks[1].state_dict().items()})


def draw_a_block(net, rank):
    generator = torch.Generator().manual_seed(rank)
    net.blocks[1].apply(lambda module: nn.init.normal_(module.weight, generator=generator))


def write_into_the_root(net, rank):
    with torch.no_grad():
        net.first.bias.add_(rank)


def assign_a_vector(net, rank):
    if rank == 0:
        params = list(net.blocks[2].parameters())
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() * 0.5, params)


WRITES = {
    "blocks.1": load_a_block,
    "blocks.1, drawn": draw_a_block,
    "the root": write_into_the_root,
}


def errors_of(stage, write, *, in_full_params=False):
    """Each rank's error of a backward after the write, or of the block in which it is made; and the first weights."""

    def go(comm):
        net = Net()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        zero = Zero(net, stage, comm=comm)

        def train():
            write(net, comm.rank)
            net(rows(comm.rank)).sum().backward()

        def train_in_full_params():
            with zero.full_params(write_back=True):
                write(net, comm.rank)

        with pytest.raises(ValueError, match=r"^weights: rank 0 has values of ") as error:
            (train_in_full_params if in_full_params else train)()
        if in_full_params and stage == 3:  # what was written is dropped
            after = zero.state_dict()
            assert all(torch.equal(after[name], before[name]) for name in before)
        elif in_full_params:  # the weights are the master: it cannot be, and no step is taken
            with pytest.raises(ValueError, match=r"^weights: "):
                net(rows(comm.rank)).sum().backward()
        return str(error.value)

    return run_threads(go, WORLD_SIZE)


@pytest.mark.redundant(but=["load_a_block-2"])
@pytest.mark.parametrize("stage", UNSHARDED)
@pytest.mark.parametrize("write", [*WRITES.values(), assign_a_vector])
def test_what_one_rank_alone_writes_is_refused_on_every_rank_before_the_step(write, stage):
    one, other = errors_of(stage, write)
    assert one == other
    assert one.endswith("write the same values on every rank, or have rank 0 broadcast them")


@pytest.mark.redundant(but=["blocks.1-2"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", WRITES)
def test_so_it_is_in_full_params_and_no_step_begins_at_such_weights(name, stage):
    one, other = errors_of(stage, WRITES[name], in_full_params=True)
    assert one == other


@pytest.mark.redundant
@pytest.mark.parametrize("stage", UNSHARDED)
def test_what_every_rank_writes_alike_counts(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        net.blocks[1].load_state_dict({name: value / 2 for name, value in net.blocks[1].state_dict().items()})
        net.last.apply(lambda module: nn.init.constant_(module.bias, 0.5))
        net(rows(0)).sum().backward()
        optim.step()
        return zero.state_dict()

    net = Net()
    net.blocks[1].load_state_dict({name: value / 2 for name, value in net.blocks[1].state_dict().items()})
    nn.init.constant_(net.last.bias, 0.5)
    net(rows(0)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for trained in run_threads(go, WORLD_SIZE):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(trained[name], value)


def halve(net):
    with torch.no_grad():
        net.last.weight.mul_(0.5)


def halve_data(net):
    net.last.weight.data.mul_(0.5)


def assign_half(net):
    net.last.weight.data = net.last.weight.data * 0.5


LATE = [  # what ranks cannot compare before the step
    ("before forward", halve_data),
    ("before backward", halve_data),
    ("before step", halve),
    ("before step", halve_data),
    ("before step", assign_half),
]


def late(stage, when, write, ranks, comm=None):
    """Three steps, with the write in the second on these ranks (None: on the only one); the weights."""
    net = Net()
    rank = 0 if comm is None else comm.rank
    if comm is not None:
        zero = Zero(net, stage, comm=comm)
    optim = torch.optim.SGD(net.parameters(), lr=0.1) if comm is None else zero.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(3):

        def at(moment, step=step):
            if step == 1 and moment == when and rank in ranks:
                write(net)

        at("before forward")
        loss = net(rows(0)).sum()
        at("before backward")
        loss.backward()
        at("before step")
        optim.step()
        optim.zero_grad()
    return net.state_dict() if comm is None else zero.state_dict()


@pytest.mark.redundant(but=["before forward-halve_data-2"])
@pytest.mark.parametrize("stage", UNSHARDED)
@pytest.mark.parametrize(("when", "write"), LATE)
def test_what_one_rank_alone_writes_before_its_step_is_named_at_the_next_backward(stage, when, write):
    def go(comm):
        with pytest.raises(PeerError) as error:
            late(stage, when, write, {1}, comm)
        return str(error.value)

    one, other = run_threads(go, WORLD_SIZE)
    assert one == other
    assert "rank 0 made nothing more, rank 1 made a write to values of root with the digest " in one


@pytest.mark.redundant
@pytest.mark.parametrize("stage", UNSHARDED)
@pytest.mark.parametrize(("when", "write"), LATE)
def test_what_every_rank_writes_then_counts(stage, when, write):
    expected = late(stage, when, write, {0})
    for trained in run_threads(lambda comm: late(stage, when, write, {0, 1}, comm), WORLD_SIZE):
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value)


@pytest.mark.parametrize("norms", [(0.01, None), (None, 0.01), (0.01, 0.02)])
def test_at_stage_0_a_rank_that_clips_otherwise_is_named_at_the_next_backward_and_by_a_save(norms, tmp_path):
    def go(comm):
        net = Net()
        zero = Zero(net, 0, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        net(rows(comm.rank)).sum().backward()
        if norms[comm.rank] is not None:
            zero.clip_grad_norm_(norms[comm.rank])
        optim.step()
        with pytest.raises(ValueError, match=r"^save: rank 0 has .*Zero.clip_grad_norm_"):
            zeroshard.save(tmp_path / "save", zero, step=1)
        with pytest.raises(PeerError, match=r"rank 0 made .*Zero.clip_grad_norm_\(0.0.*; do the same on every rank"):
            net(rows(comm.rank)).sum().backward()
        return True

    assert run_threads(go, WORLD_SIZE) == [True, True]
    assert not list(tmp_path.iterdir())


@pytest.mark.redundant
@pytest.mark.parametrize("stage", UNSHARDED)
def test_what_one_rank_writes_and_takes_back_is_no_fault(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        if comm.rank == 0:
            with torch.no_grad():
                before = net.last.bias.clone()
                net.last.bias.zero_()
                net.last.bias.copy_(before)
        for _ in range(2):
            net(rows(comm.rank)).sum().backward()
            optim.step()
            optim.zero_grad()
        return zero.state_dict()["last.bias"]

    first, *others = run_threads(go, WORLD_SIZE)
    assert all(torch.equal(bias, first) for bias in others)


def test_a_load_that_would_round_the_master_weights_is_refused():
    def go(comm):
        net = Net()
        Zero(net, 2, comm=comm, precision=MixedPrecision(param_dtype=torch.bfloat16))
        for part in (net, net.blocks[1], net.last):
            with pytest.raises(RuntimeError, match=r"use zero.load_state_dict\(\)"):
                part.load_state_dict(part.state_dict())

    run_threads(go, WORLD_SIZE)


def own_means(net, rank):
    params = list(net.parameters())
    grads = torch.autograd.grad(net(rows(rank)).square().mean(), params)
    return list(zip(params, grads, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_assigned_are_the_same_on_every_rank_or_refused(stage):
    """`backward` averages; what is assigned is taken as it is: a rank's own mean would count in its part alone."""

    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        with zero.full_params():
            means = own_means(net, comm.rank)
        for param, grad in means:
            param.grad = grad
        what = r"^param.grad: rank 0 has first.weight.grad assigned .*; backward\(\) averages .* by torch.distributed"
        with pytest.raises(ValueError, match=what):
            optim.step()
        for param, grad in means:
            comm.all_reduce(grad).wait()
            param.grad = grad / WORLD_SIZE
        optim.step()
        return zero.state_dict()

    net = Net()
    for rank in range(WORLD_SIZE):
        for param, grad in own_means(net, rank):
            param.grad = grad / WORLD_SIZE + (0 if param.grad is None else param.grad)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for trained in run_threads(go, WORLD_SIZE):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(trained[name], value)


GRAD_WRITES = {
    "a rank's own factor": lambda net, rank: [p.grad.mul_(rank + 1) for p in net.parameters()],
    "a list": lambda net, rank: torch._foreach_mul_([p.grad for p in net.parameters()], rank + 1.0),
    "a row": lambda net, rank: net.first.weight.grad[0].fill_(rank),
    "one rank": lambda net, rank: net.first.bias.grad.zero_().add_(1) if rank else None,
}


def scaled(comm, write):
    net = Net()
    zero = Zero(net, 0, comm=comm)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(3):
        net(rows(comm.rank)).sum().backward()
        if step == 0:
            write(net, comm.rank)
        optim.step()
        optim.zero_grad()
    return zero.state_dict()


@pytest.mark.parametrize("write", GRAD_WRITES.values(), ids=GRAD_WRITES)
def test_other_gradients_written_in_place_on_each_rank_are_named_where_each_rank_steps_by_all_of_them(write):
    def go(comm):
        with pytest.raises(PeerError, match="made a change in place of gradients of root") as error:
            scaled(comm, write)
        return str(error.value)

    one, other = run_threads(go, WORLD_SIZE)
    assert one == other
    same = run_threads(lambda comm: scaled(comm, lambda net, rank: write(net, 1)), WORLD_SIZE)
    assert all(torch.equal(value, same[1][name]) for name, value in same[0].items())
