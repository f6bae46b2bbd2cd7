"""What the engine promises at every stage: the result is what one process would have computed.

Each case trains a small module on thread ranks, and the same module in one process on all the ranks' data, and
compares the weights.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero import STAGES, ShardingStrategy, Zero

WIDTH = 6
STEPS = 4
Loss = Callable[[nn.Module, int, int], Tensor]  # (model, rank, step) -> this rank's loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 5)
        self.outer = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


_GENERATOR = threading.Lock()  # thread ranks share torch's


def made(cls: Callable[..., nn.Module] = Net, *args: Any) -> nn.Module:
    with _GENERATOR, torch.random.fork_rng():
        torch.manual_seed(7)
        return cls(*args)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * step + rank))


def plain_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step)).square().mean()


def one_process(model: nn.Module, loss: Loss, world: int, make_optim: Callable[[Any], torch.optim.Optimizer]) -> dict:
    optim = make_optim(model.parameters())
    for step in range(STEPS):
        for rank in range(world):
            value = loss(model, rank, step) / world
            if value.requires_grad:
                value.backward()
        optim.step()
        optim.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def sharded(
    cls: Callable[..., nn.Module],
    loss: Loss,
    world: int,
    stage: int | ShardingStrategy,
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    **zero_kwargs: Any,
) -> dict:
    def rank_main(comm: Any) -> dict:
        model = made(cls)
        zero = Zero(model, stage, comm=comm, **zero_kwargs)
        optim = zero.optimizer(optimizer[0], **optimizer[1])
        for step in range(STEPS):
            value = loss(model, comm.rank, step)
            value.backward()
            optim.step()
            optim.zero_grad()
        return zero.state_dict()

    results = run_threads(rank_main, world, timeout_s=120)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)
    return results[0]


ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1})
MOMENTUM = (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1})
stages = pytest.mark.parametrize("stage", range(4))


def check(cls: Callable[..., nn.Module], loss: Loss, stage: Any, world: int = 3, **zero_kwargs: Any) -> None:
    for optimizer in (ADAMW, MOMENTUM):
        want = one_process(made(cls), loss, world, lambda params, o=optimizer: o[0](params, **o[1]))
        got = sharded(cls, loss, world, stage, optimizer, **zero_kwargs)
        assert list(got) == list(want)
        for name in want:
            torch.testing.assert_close(got[name], want[name], atol=2e-6, rtol=1e-4)


@stages
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_any_module_trains_as_in_one_process(stage, prefetch):
    check(Net, plain_loss, stage, prefetch=prefetch)


class Branches(Net):
    """Parameters that no step uses, or one rank only, in a unit and in the root; and a unit that one rank skips."""

    def __init__(self) -> None:
        super().__init__(4)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].never = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(x)
        x = self.blocks[0](x)
        x = self.blocks[1](x)
        if rank != 1:
            x = self.blocks[2](x)
        x = self.blocks[3](x)
        return self.head(x + self.sometimes(x) if rank == 1 else x)


def branch_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step), rank).square().mean()


@stages
def test_unused_parameters_are_skipped_and_those_of_one_rank_get_the_mean_with_zeros(stage):
    check(Branches, branch_loss, stage)


class SomeRankOnly(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: bool = False) -> Tensor:
        x = super().forward(x)
        return x + self.extra(x) if use else x


class InsideUnit(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SomeRankOnly() for _ in range(3))

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            x = block(x, use=rank == i)
        return self.head(x)


@stages
def test_a_parameter_inside_a_unit_used_on_one_rank_gets_the_mean_with_zeros(stage):
    check(InsideUnit, branch_loss, stage)


class Tied(Net):
    """One weight shared by two units, one by two modules of the root, and a block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.mirror = nn.Linear(WIDTH, 2)
        self.mirror.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[1], self.blocks[2], self.blocks[0]):
            x = block(x)
        return self.head(x) + self.mirror(x)


@stages
def test_tied_weights_and_modules_called_again(stage):
    check(Tied, plain_loss, stage)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].inner.bias.requires_grad_(False)


@stages
def test_frozen_parameters_never_move(stage):
    check(Frozen, plain_loss, stage)


def thawing_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    model.blocks[1].requires_grad_(step >= 2)
    model.head.requires_grad_(step < 2)
    model.blocks[0].inner.weight.requires_grad_(step != 1)
    return plain_loss(model, rank, step)


@stages
def test_requires_grad_may_change_between_steps(stage):
    check(Frozen, thawing_loss, stage)


@dataclass
class Output:
    hidden: Tensor
    note: str


class Custom:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Structures(Net):
    """Units that take and return dicts, tuples, dataclasses and objects that nobody has heard of."""

    class Wrap(Block):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: Any, *, other: Any = None) -> Any:
            x = x if isinstance(x, Tensor) else getattr(x, "hidden", None) if not isinstance(x, dict | tuple) else x
            x = x["h"] if isinstance(x, dict) else x[1][0] if isinstance(x, tuple) else x
            y = Block.forward(self, x)
            makers = {
                "dict": lambda: {"h": y, "n": 1},
                "tuple": lambda: (None, [y]),
                "data": lambda: Output(y, "x"),
                "object": lambda: Custom(y),
                "hidden": lambda: _Closed(y),
            }
            return makers[self.kind]()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wrap(kind) for kind in ("dict", "tuple", "data", "object", "hidden"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.open())


class _Closed:
    """Shows no tensor to whoever looks through its attributes."""

    __slots__ = ("open",)

    def __init__(self, hidden: Tensor) -> None:
        self.open = lambda: hidden


@stages
def test_units_may_take_and_return_any_structure(stage):
    check(Structures, plain_loss, stage)


def interrupted_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Evaluations, a forward whose graph is dropped, and a failed one, before the loss."""
    with torch.no_grad():
        model.eval()
        plain_loss(model, rank, step)
        model.train()
    plain_loss(model, rank, step)
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 99))
    return plain_loss(model, rank, step)


@stages
def test_forwards_without_backward_leave_no_trace(stage):
    check(Net, interrupted_loss, stage)


def twice_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return plain_loss(model, rank, step) + 0.5 * plain_loss(model, rank, step + 1)


@stages
def test_two_forwards_before_one_backward(stage):
    check(Net, twice_loss, stage)


class Shuffled(Net):
    """Runs its units in another order than they were registered, and in another one from the third step on."""

    def __init__(self) -> None:
        super().__init__(4)
        self.calls = 0

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.embed(x)
        for i in (2, 0, 3, 1) if step < 2 else (0, 1, 3, 2):
            x = self.blocks[i](x)
        return self.head(x)


def shuffled_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step), step).square().mean()


@stages
def test_the_order_of_execution_may_differ_and_change(stage):
    check(Shuffled, shuffled_loss, stage)


class Recomputed(Net):
    def __init__(self, reentrant: bool = False, early_stop: bool = True) -> None:
        super().__init__()
        self.reentrant, self.early_stop = reentrant, early_stop

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.reentrant:
                x = checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)
            else:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, early_stop=self.early_stop)
        return self.head(x)


@stages
@pytest.mark.parametrize("mode", [(True, True), (False, True), (False, False)])
def test_activation_checkpointing_finds_its_weights(stage, mode):
    check(lambda: Recomputed(*mode), plain_loss, stage)


@pytest.mark.parametrize("stage", [ShardingStrategy("shard", "shard", "shard", reshard_after_forward=False)])
def test_a_row_of_ones_own(stage):
    check(Net, plain_loss, stage)
    check(Tied, plain_loss, stage)


class Scalars(nn.Module):
    """A parameter of no dimension, one of one element, an empty one, on more ranks than elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Part()])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) * self.scale + self.nothing.sum()


@stages
def test_parameters_of_any_size(stage):
    check(Scalars, plain_loss, stage, world=4)


@stages
def test_float64_stays_and_means_are_means(stage):
    def rank_main(comm: Any) -> tuple:
        model = made().double()
        zero = Zero(model, stage, comm=comm)
        model(data(comm.rank, 0).double()).square().mean().backward()
        return zero.full_grads(), zero.state_dict()

    (grads, state), *_ = run_threads(rank_main, 3)
    model = made().double()
    for rank in range(3):
        (model(data(rank, 0).double()).square().mean() / 3).backward()
    for name, param in model.named_parameters():
        assert state[name].dtype == torch.float64
        assert grads[name].dtype == torch.float64
        torch.testing.assert_close(grads[name], param.grad, atol=1e-14, rtol=1e-12)


@stages
def test_training_starts_from_rank_zeros_parameters_and_buffers(stage):
    def rank_main(comm: Any) -> dict:
        torch.manual_seed(comm.rank)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].running_mean.fill_(comm.rank)
        model[0].weight.data.fill_(comm.rank + 1.0)
        return Zero(model, stage, comm=comm).state_dict()

    for state in run_threads(rank_main, 3):
        assert torch.equal(state["0.weight"], torch.ones(3, 3))
        assert torch.equal(state["1.running_mean"], torch.zeros(3))


@stages
def test_gradients_accumulate_until_they_are_zeroed(stage):
    """Backwards with and without no_sync, a step without zero_grad, gradients thrown away: as torch does."""

    def train(model: nn.Module, optim: Any, no_sync: Any, rank: int, zero_grad: Any) -> None:
        plain_loss(model, rank, 0).backward()
        with no_sync():
            plain_loss(model, rank, 1).backward()
        plain_loss(model, rank, 2).backward()
        optim.step()  # and the gradients stay
        plain_loss(model, rank, 3).backward()
        optim.step()
        zero_grad()
        plain_loss(model, rank, 4).backward()
        optim.zero_grad()  # thrown away
        loss = plain_loss(model, rank, 5)
        loss.backward(retain_graph=True)
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=False)
        optim.step()  # zeros, and momentum goes on

    def rank_main(comm: Any) -> dict:
        model = made()
        zero = Zero(model, stage, comm=comm)
        optim = zero.optimizer(*MOMENTUM[:1], **MOMENTUM[1])
        train(model, optim, zero.no_sync, comm.rank, model.zero_grad)
        return zero.state_dict()

    world = 1  # one rank: what torch does itself can be held beside it line by line
    (got,) = run_threads(rank_main, world)
    model = made()
    optim = torch.optim.SGD(model.parameters(), **MOMENTUM[1])
    train(model, optim, nullcontext, 0, model.zero_grad)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1e-5)
    per_stage = run_threads(rank_main, 3)
    assert all(torch.equal(per_stage[0][name], per_stage[2][name]) for name in got)


@stages
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_the_norm_is_that_of_the_whole_gradient(stage, norm_type):
    def rank_main(comm: Any) -> tuple[float, float, dict]:
        model = made(Tied)
        model.blocks[1].requires_grad_(False)
        zero = Zero(model, stage, comm=comm)
        zero.optimizer(torch.optim.SGD, lr=0.1)
        empty = zero.clip_grad_norm_(1.0, norm_type)
        plain_loss(model, comm.rank, 0).backward()
        norm = zero.clip_grad_norm_(0.01, norm_type)
        return float(empty), float(norm), zero.full_grads()

    model = made(Tied)
    model.blocks[1].requires_grad_(False)
    for rank in range(3):
        (plain_loss(model, rank, 0) / 3).backward()
    want = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    for empty, norm, grads in run_threads(rank_main, 3):
        assert empty == 0.0
        assert norm == pytest.approx(float(want), rel=1e-5)
        for name, param in model.named_parameters():
            if param.grad is None:
                assert grads[name] is None
            else:
                torch.testing.assert_close(grads[name], param.grad, atol=1e-7, rtol=1e-4)


@stages
def test_a_forgotten_last_backward_raises_instead_of_dropping_gradients(stage):
    model = made()
    zero = Zero(model, stage, comm=LocalCommunicator())
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    with zero.no_sync():
        plain_loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="outside no_sync"):
        optim.step()
    optim.zero_grad()
    optim.step()


@stages
def test_nothing_stays_behind_after_del(stage):
    def rank_main(comm: Any) -> list[bool]:
        model = made()
        zero = Zero(model, stage, comm=comm)
        optim = zero.optimizer(torch.optim.AdamW, lr=0.1)
        plain_loss(model, comm.rank, 0).backward()
        optim.step()
        left = [weakref.ref(model), weakref.ref(zero), weakref.ref(optim), weakref.ref(model.embed.weight)]
        del model, zero, optim
        comm.barrier()
        gc.collect()
        return [ref() is None for ref in left]

    assert run_threads(rank_main, 2) == [[True] * 4] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_modules_own_state_dict_is_refused_where_it_would_be_wrong(stage):
    def rank_main(comm: Any) -> None:
        model = made()
        zero = Zero(model, stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        plain_loss(model, comm.rank, 0).backward()
        optim.step()
        with pytest.raises(RuntimeError, match=r"zero.state_dict"):
            model.state_dict()
        with zero.full_params():
            inside = {name: value.clone() for name, value in model.state_dict().items()}
        whole = zero.state_dict()
        assert all(torch.equal(inside[name], whole[name]) for name in whole)

    run_threads(rank_main, 2)


@stages
def test_remove_gives_back_an_ordinary_module(stage):
    def rank_main(comm: Any) -> None:
        model = made()
        zero = Zero(model, stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        plain_loss(model, comm.rank, 0).backward()
        optim.step()
        want = zero.state_dict()
        zero.remove()
        assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
        plain_loss(model, comm.rank, 1).backward()
        assert all(param.grad is not None for param in model.parameters())
        Zero(model, stage, comm=comm)

    run_threads(rank_main, 2)


def test_a_stage_is_a_row_of_four():
    assert list(STAGES) == [0, 1, 2, 3]
