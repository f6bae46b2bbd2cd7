"""With leaves the engine means what it means without, on any number of ranks; what cannot is refused."""

from __future__ import annotations

import copy
from fractions import Fraction

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import MixedPrecision, Zero
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero import LocalSteps
from zeroshard.zero.buffers.leaves import ExactSum

LEAVES, WIDTH = 4, 6


class Net(nn.Module):
    """Some blocks take part in some micro-batches alone, and one is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.odd = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x, leaf):
        x = torch.tanh(self.blocks[0](x))
        if leaf % 2:
            x = torch.tanh(self.blocks[1](x)) * self.odd.sum()
        if leaf < 5:
            x = torch.tanh(self.blocks[2](x))
        return self.blocks[3](torch.tanh(self.blocks[3](x))).square().mean()


def rows(step, leaf):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + leaf))


def trained(world_size, stage, *, steps=3, between=None, inside=None, make=None, finish=None, path="", resumed=""):
    """Weights, averages and states after some steps; hooks of a test are given (zero, optimizer, step)."""
    torch.manual_seed(3)
    start = Net()

    def on_rank(comm):
        model = copy.deepcopy(start)
        zero = Zero(model, stage, model.blocks, comm, leaves=LEAVES)
        optimizer = make(zero) if make else zero.optimizer(torch.optim.AdamW, lr=0.03)
        ema = zero.ema(0.9)
        first = zeroshard.load(resumed, zero)["step"] if resumed else 0
        for step in range(first, first + steps):
            mine = range(comm.rank, LEAVES, comm.world_size)
            for leaf in mine:
                (model(rows(step, leaf), leaf) / len(mine)).backward()
                if inside:
                    inside(zero, optimizer, leaf)
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            ema.update()
            if between:
                between(zero, optimizer, step)
        if path:
            zeroshard.save(path, zero, step=first + steps)
        with ema.weights():
            average = zero.state_dict()
        return zero.state_dict(), average, zero.optim_state_dict(optimizer)["state"]

    return run_threads(on_rank, world_size)[0]


def assert_same(one, other):
    for ours, theirs in zip(one[:2], other[:2], strict=True):
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name
    assert one[2].keys() == other[2].keys()
    for index, kinds in one[2].items():
        for kind, value in kinds.items():
            assert torch.equal(value, other[2][index][kind]), (index, kind)


@pytest.fixture(scope="module")
def one_rank():
    return trained(1, 1)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 3), (4, 1)])
def test_blocks_that_some_micro_batches_skip_have_the_same_bits(world_size, stage, one_rank):
    found = trained(world_size, stage)
    assert_same(found, one_rank)
    assert torch.equal(found[0]["never"], torch.ones(2))


def test_stages_may_change_in_mid_run_and_gradients_be_read_between_micro_batches(one_rank):
    def moves(zero, optimizer, step):
        zero.zero_grad()
        zero.restage((3, 1, 2)[step])

    def reads(zero, optimizer, leaf):
        zero.full_grads()
        nn.utils.get_total_norm([p.grad for p in zero.model.parameters() if p.grad is not None])

    assert_same(trained(2, 0, between=moves, inside=reads), one_rank)


@pytest.mark.parametrize(("worlds", "stages"), [((4, 1), (3, 0)), ((2, 4), (0, 3))])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(worlds, stages, one_rank, tmp_path):
    trained(worlds[0], stages[0], steps=1, path=tmp_path / "saved")
    assert_same(trained(worlds[1], stages[1], steps=2, resumed=tmp_path / "saved"), one_rank)


def test_what_is_written_into_gradients_counts(one_rank):
    def halves(zero, optimizer, leaf):
        for param in zero.model.parameters():
            if param.grad is not None and leaf == LEAVES - 1:
                param.grad.mul_(0.5)

    one = trained(1, 1, inside=halves)
    assert_same(trained(1, 3, inside=halves), one)
    assert not torch.equal(one[0]["odd"], one_rank[0]["odd"])


def test_what_is_written_between_micro_batches_counts():
    model = nn.Linear(2, 1, bias=False)
    zero = Zero(model, 1, (), LocalCommunicator(), leaves=2)
    model(torch.ones(1, 2)).sum().backward()
    model.weight.grad.mul_(3.0)
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(zero.full_grads()["weight"], torch.full((1, 2), 4.0))
    model.weight.grad = torch.full((1, 2), 5.0)
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(zero.full_grads()["weight"], torch.full((1, 2), 6.0))
    zero.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(zero.full_grads()["weight"], torch.ones(1, 2))


def test_no_sync_adds_up_as_ever():
    torch.manual_seed(3)
    start = Net()

    def stepped(comm, stage):
        model = copy.deepcopy(start)
        zero = Zero(model, stage, model.blocks, comm, leaves=LEAVES)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
        mine = range(comm.rank, LEAVES, comm.world_size)
        with zero.no_sync():
            for leaf in mine[:-1]:
                (model(rows(0, leaf), leaf) / len(mine)).backward()
        (model(rows(0, mine[-1]), mine[-1]) / len(mine)).backward()
        optimizer.step()
        return zero.state_dict()

    one = stepped(LocalCommunicator(), 0)
    for world_size, stage in ((2, 0), (2, 3), (4, 1)):
        found = run_threads(lambda comm, stage=stage: stepped(comm, stage), world_size)[0]
        assert all(torch.equal(value, one[name]) for name, value in found.items())


@pytest.mark.parametrize(("world_size", "value"), [(1, float("nan")), (2, float("-inf")), (4, float("inf"))])
def test_what_is_not_finite_stays_so(world_size, value):
    def on_rank(comm):
        model = nn.Linear(2, 2, bias=False)
        zero = Zero(model, 2, (), comm, leaves=LEAVES)
        for leaf in range(comm.rank, LEAVES, comm.world_size):
            factor = torch.tensor([[value if leaf == 1 else 1.0, 1.0]])
            (model(torch.ones(1, 2)) * factor).sum().backward()
        return zero.full_grads()["weight"], zero.clip_grad_norm_(1e9)

    grad, norm = run_threads(on_rank, world_size)[0]
    assert torch.equal(grad[0].isnan(), torch.full((2,), value != value))
    assert value != value or bool((grad[0] == value).all())
    assert bool(grad[1].isfinite().all())
    assert not bool(norm.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_is_rounded_once_whatever_the_order(dtype):
    generator = torch.Generator().manual_seed(11)
    exponents = torch.randint(-20, 5, (16, 400), generator=generator).to(torch.float64)
    terms = torch.randn(16, 400, generator=generator, dtype=torch.float64).mul(exponents.exp2()).to(dtype)
    terms[3], terms[9] = -terms[1], -terms[2] * 2  # cancels
    wanted = [sum((Fraction(float(x)) for x in column), Fraction(0)) for column in terms.T.to(torch.float64)]
    results = []
    for order in (torch.arange(16), torch.arange(16).flip(0), torch.randperm(16, generator=generator)):
        exact = ExactSum(400, dtype, torch.device("cpu"), 64)
        for part in terms[order].split([5, 1, 10]):
            exact.add(part)
        target = torch.empty(400, dtype=dtype)
        exact.write(target)
        results.append(target)
        assert [Fraction(float(h)) + Fraction(float(x)) for h, x in zip(exact.high, exact.low, strict=True)] == wanted
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_another_number_of_micro_batches_is_refused():
    def on_rank(comm):
        model = nn.Linear(2, 2)
        optimizer = Zero(model, 1, (), comm, leaves=8).optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"step: 3 backwards on each of 2 ranks .* leaves=8; have 4, or a mult"):
            optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    run_threads(on_rank, 2)


@pytest.mark.parametrize(("stage", "leaves"), [(0, 4), (3, None)])
def test_ranks_that_step_after_different_numbers_of_micro_batches_are_refused(stage, leaves):
    def on_rank(comm):
        model = nn.Linear(2, 2)
        optimizer = Zero(model, stage, (), comm, leaves=leaves).optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        if comm.rank:
            optimizer.step()
            optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        with pytest.raises(RuntimeError, match="backward: ranks ran a different number of backwards before a step"):
            loss.backward()

    run_threads(on_rank, 3 if leaves is None else 2)


def test_a_closure_of_too_few_micro_batches_is_refused():
    model = nn.Linear(2, 2)
    optimizer = Zero(model, 1, (), LocalCommunicator(), leaves=4).optimizer(torch.optim.SGD, lr=0.1)

    def closure(num_backwards):
        optimizer.zero_grad()
        for _ in range(num_backwards):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="step: 1 backwards on each of 1 ranks"):
        optimizer.step(lambda: closure(1))
    optimizer.step(lambda: closure(4))


def test_running_statistics_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    Zero(model, 1, (), LocalCommunicator(), leaves=2, buffers="keep")
    with pytest.raises(RuntimeError, match="buffers: forward updates those of a BatchNorm1d from each rank's rows"):
        model(torch.randn(4, 2)).sum().backward()


class _WithoutExchange(NullCommunicator):
    """A communicator of before there was an exchange."""

    def __getattribute__(self, name):
        if name == "all_to_all":
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"leaves": 3}, "leaves: 3 is no power of two"),
        ({"leaves": True}, "leaves: True is no power of two"),
        ({"leaves": "8"}, "leaves: '8' is no power of two"),
        ({"leaves": 2, "accumulate": "local"}, "leaves: 2 is given, and accumulate adds up on each rank"),
        ({"leaves": 2, "shard_size": 1}, "leaves: 2 is given, and shard_size adds up over two levels"),
        ({"leaves": 2, "precision": MixedPrecision(reduce="int8")}, "leaves: 2 is given, and precision.reduce rounds"),
        ({"leaves": 2, "shard_size": 1, "replicas": LocalSteps(every=2)}, "leaves: 2 is given, and replicas take"),
        ({"leaves": 2, "comm": _WithoutExchange(2)}, "comm: leaves are exchanged, and a _WithoutExchange has no all_"),
    ],
)
def test_what_rounds_in_between_is_refused(given, said):
    with pytest.raises(ValueError, match="^" + said.replace("(", r"\(")):
        Zero(nn.Linear(2, 2), 1, (), **{"comm": LocalCommunicator(), **given})


def test_a_number_of_ranks_that_cannot_share_is_refused():
    def on_rank(comm):
        with pytest.raises(ValueError, match=r"leaves: 4 micro-batches cannot be shared .* to 3 ranks; use 1, 2, 4 "):
            Zero(nn.Linear(2, 2), 1, (), comm, leaves=4)

    run_threads(on_rank, 3)
