"""The same bits on any number of ranks, `Zero(..., reproducible=)`: what else may be done then, and what is refused."""

import copy
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch import nn

import zeroshard
from soak import soaking
from zeroshard import MixedPrecision, Zero
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.optim import MuonAdamW, muon_groups
from zeroshard.zero.transport.exact_sum import ExactGradientSum

MICRO_BATCHES = 8
STEPS = 3
LARGE = 8 if soaking() else 4  # a world


class Model(nn.Module):
    """A tied matrix, a block that is called twice, and parts that some micro-batches, or all of them, leave out."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 24, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 31, dtype=dtype), nn.Tanh(), nn.Linear(31, 24, dtype=dtype)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))
        self.odd = nn.Parameter(torch.ones(3, dtype=dtype))
        self.never = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, tokens, number):
        x = self.embed(tokens)
        x = x + self.blocks[0](x + self.blocks[0](x))
        if number % 2:
            x = x + self.blocks[1](x) * self.odd.sum()
        if number < 5:
            x = x + self.blocks[2](x)
        return nn.functional.cross_entropy(
            (x @ self.embed.weight.T * self.scale)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )


def contiguous(rank, world_size, step):
    each = MICRO_BATCHES // world_size
    return range(rank * each, (rank + 1) * each)


def strided(rank, world_size, step):
    return range(rank, MICRO_BATCHES, world_size)


def shuffled(rank, world_size, step):
    order = torch.randperm(MICRO_BATCHES, generator=torch.Generator().manual_seed(step)).tolist()
    return order[rank::world_size]


TOLD = {
    "micro_batch": lambda zero, last: zero.micro_batch(last=last),
    "no_sync": lambda zero, last: nullcontext() if last else zero.no_sync(),
    "nothing": lambda zero, last: nullcontext(),
}


def updated(model, optimizer_cls):
    """What an optimizer is given of a model: matrices, groups, or None for all parameters."""
    if optimizer_cls is torch.optim.Muon:
        return [param for param in model.parameters() if param.ndim == 2]
    if issubclass(optimizer_cls, MuonAdamW):
        return muon_groups(model.named_parameters(), 0.1, ["blocks"])
    return None


def train(
    world_size,
    stage,
    optimizer_cls=torch.optim.AdamW,
    *,
    steps=STEPS,
    dealt=contiguous,
    told="micro_batch",
    clip="ours",
    precision=None,
    dtype=torch.float32,
    inside=None,
    between=None,
    path="",
    resumed="",
):
    """Losses by micro-batch, norms, weights, averages and the optimizer's whole state.

    Hooks of a test are given (zero, number of the micro-batch) after a backward, and (zero, step) after a step. Where
    it ends it is saved to ``path``, and it goes on from ``resumed``.
    """
    tokens = torch.randint(13, (STEPS, MICRO_BATCHES, 2, 9), generator=torch.Generator().manual_seed(7))
    start = Model(dtype)

    def on_rank(comm):
        model = copy.deepcopy(start)  # threads share one generator
        zero = Zero(model, stage, model.blocks, comm, precision, reproducible=MICRO_BATCHES)
        optimizer = zero.optimizer(optimizer_cls, updated(model, optimizer_cls), lr=0.05)
        ema = zero.ema(0.9)
        first = zeroshard.load(resumed, zero)["step"] if resumed else 0
        losses, norms = {}, {}
        for step in range(first, first + steps):
            mine = list(dealt(comm.rank, comm.world_size, step))
            for place, number in enumerate(mine):
                with TOLD[told](zero, place == len(mine) - 1):
                    loss = model(tokens[step, number], number)
                    (loss / len(mine)).backward()
                losses[step, number] = loss.item()
                if inside:
                    inside(zero, number)
            if clip == "ours":
                norms[step] = float(zero.clip_grad_norm_(0.5))
            else:
                norms[step] = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            ema.update()
            if between:
                between(zero, step)
        if path:
            zeroshard.save(path, zero, step=first + steps)
        with ema.weights():
            average = zero.state_dict()
        return losses, norms, zero.state_dict(), average, zero.optim_state_dict()

    results = run_threads(on_rank, world_size)
    losses = {key: value for result in results for key, value in result[0].items()}
    assert all(result[1] == results[0][1] for result in results)
    return losses, *results[0][1:]


def assert_same(ours, other):
    """``ours`` may be the last steps of ``other``."""
    for found, expected in zip(ours[:2], other[:2], strict=True):
        assert found == {key: value for key, value in expected.items() if key in found}
    for found, expected in zip(ours[2:4], other[2:4], strict=True):
        for name, weight in found.items():
            assert torch.equal(weight, expected[name]), name
    assert ours[4]["param_groups"] == other[4]["param_groups"]
    assert ours[4]["state"].keys() == other[4]["state"].keys()
    for index, kinds in ours[4]["state"].items():
        for kind, value in kinds.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[4]["state"][index][kind])), (index, kind)


@pytest.fixture(scope="module")
def one_rank():
    return train(1, 0)


@pytest.mark.redundant(but=["1-2-contiguous-nothing", "2-0-contiguous-no_sync", "2-1-shuffled-micro_batch"])
@pytest.mark.parametrize(
    ("world_size", "stage", "dealt", "told"),
    [
        (1, 3, shuffled, "micro_batch"),
        (1, 2, contiguous, "nothing"),
        (2, 0, contiguous, "no_sync"),
        (2, 1, shuffled, "micro_batch"),
        (2, 3, strided, "nothing"),
        (4, 0, strided, "nothing"),
        (4, 1, contiguous, "no_sync"),
        (4, 2, shuffled, "micro_batch"),
        (4, 3, shuffled, "no_sync"),
        (8, 0, contiguous, "micro_batch"),
        (8, 2, strided, "no_sync"),
        (8, 3, contiguous, "micro_batch"),
    ],
)
def test_the_bits_are_those_of_one_rank_whoever_computes_which_micro_batch(world_size, stage, dealt, told, one_rank):
    found = train(world_size, stage, dealt=dealt, told=told)
    assert_same(found, one_rank)
    assert torch.equal(found[2]["never"], torch.ones(2))


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("optimizer_cls", "stage"),
    [(torch.optim.SGD, 1), (torch.optim.Muon, 3), (torch.optim.Muon, 0), (torch.optim.Adafactor, 2)],
)
def test_other_optimizers(optimizer_cls, stage):
    one = train(1, stage, optimizer_cls)
    for world_size in (2, LARGE):
        assert_same(train(world_size, stage, optimizer_cls), one)


@pytest.mark.redundant
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": MixedPrecision(torch.bfloat16)},
        {"precision": MixedPrecision(torch.bfloat16, torch.bfloat16)},
        {"dtype": torch.float64},
        {"clip": "torch"},
    ],
    ids=["bf16", "bf16-reduced", "float64", "torch's clipping"],
)
def test_other_dtypes_and_clipping(settings):
    one = train(1, 0, **settings)
    for world_size, stage in ((2, 3), (LARGE, 1)):
        assert_same(train(world_size, stage, **settings), one)


@pytest.mark.redundant
def test_stages_may_change_in_mid_run_and_gradients_be_read_between_micro_batches(one_rank):
    def moves(zero, step):
        zero.zero_grad()
        zero.restage((3, 1, 2)[step])

    def reads(zero, number):
        zero.full_grads()
        nn.utils.get_total_norm([p.grad for p in zero.model.parameters() if p.grad is not None])

    assert_same(train(2, 0, told="nothing", between=moves, inside=reads), one_rank)


@pytest.mark.redundant
@pytest.mark.parametrize(("worlds", "stages"), [((4, 1), (3, 0)), ((2, 4), (0, 3))])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(worlds, stages, one_rank, tmp_path):
    train(worlds[0], stages[0], steps=1, path=tmp_path / "saved")
    assert_same(train(worlds[1], stages[1], steps=2, resumed=tmp_path / "saved"), one_rank)


def test_what_is_written_between_micro_batches_counts():
    model = nn.Linear(2, 1, bias=False)
    zero = Zero(model, 1, (), LocalCommunicator(), reproducible=2)
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


@pytest.mark.parametrize(("world_size", "value"), [(1, float("nan")), (2, float("-inf")), (4, float("inf"))])
def test_what_is_not_finite_stays_so(world_size, value):
    def on_rank(comm):
        model = nn.Linear(2, 2, bias=False)
        zero = Zero(model, 2, (), comm, reproducible=4)
        for number in range(comm.rank, 4, comm.world_size):
            factor = torch.tensor([[value if number == 1 else 1.0, 1.0]])
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
        exact = ExactGradientSum(400, dtype, torch.device("cpu"), 64)
        for part in terms[order].split([5, 1, 10]):
            exact.add_rows(part)
        target = torch.empty(400, dtype=dtype)
        exact.write(target)
        results.append(target)
        assert [Fraction(float(h)) + Fraction(float(x)) for h, x in zip(exact.high, exact.low, strict=True)] == wanted
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_another_number_of_micro_batches_is_refused():
    def on_rank(comm):
        model = nn.Linear(2, 2)
        optimizer = Zero(model, 1, (), comm, reproducible=8).optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"step: 3 backwards on each of 2 ranks .* reproducible=8; have 4, or"):
            optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    run_threads(on_rank, 2)


@pytest.mark.parametrize(("stage", "reproducible"), [(0, 4), (3, None)])
def test_ranks_that_step_after_different_numbers_of_micro_batches_are_refused(stage, reproducible):
    def on_rank(comm):
        model = nn.Linear(2, 2)
        optimizer = Zero(model, stage, (), comm, reproducible=reproducible).optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        if comm.rank:
            optimizer.step()
            optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        with pytest.raises(RuntimeError, match="backward: ranks ran a different number of backwards before a step"):
            loss.backward()

    run_threads(on_rank, 3 if reproducible is None else 2)


def test_a_closure_of_too_few_micro_batches_is_refused():
    model = nn.Linear(2, 2)
    optimizer = Zero(model, 1, (), LocalCommunicator(), reproducible=4).optimizer(torch.optim.SGD, lr=0.1)

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
    Zero(model, 1, (), LocalCommunicator(), reproducible=2, buffers="keep")
    with pytest.raises(RuntimeError, match="buffers: forward updates those of a BatchNorm1d from each rank's rows"):
        model(torch.randn(4, 2)).sum().backward()


class _WithoutExchange(NullCommunicator):
    """A communicator of before there was an exchange."""

    def __getattribute__(self, name):
        if name == "all_to_all":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_a_communicator_that_cannot_exchange_is_refused():
    with pytest.raises(ValueError, match=r"^comm: reproducible sums exchange gradients, and a _WithoutExchange has no"):
        Zero(nn.Linear(2, 2), 1, (), _WithoutExchange(2), reproducible=2)
