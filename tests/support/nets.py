"""Small networks, and one comparison: every stage on thread ranks against one process that sees all ranks' rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from zeroshard.comm import Communicator, run_threads
from zeroshard.zero.core.strategy import STAGES

if TYPE_CHECKING:
    from zeroshard.zero import Zero

WIDTH, NUM_ROWS = 6, 4
NUM_STEPS = 2  # the first makes states and learns the order of units, the second uses both; later ones are alike
Path = Callable[..., Tensor]
# For `checkpoint`: torch can deadlock where two threads set the state of one generator, as it does to recompute.
NOTHING_RANDOM = {"preserve_rng_state": False}


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def in_order(net: Net, x: Tensor, order: Sequence[int] | None = None, skip: Collection[int] = ()) -> Tensor:
    """Through the blocks as they were registered, or as ``order`` says; not through those of ``skip``."""
    for place in range(len(net.blocks)) if order is None else order:
        if place not in skip:
            x = torch.tanh(net.blocks[place](x))
    return x


def recomputed(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = torch.tanh(cast("Any", checkpoint(block, x, use_reentrant=False, **NOTHING_RANDOM)))
    return x


class Net(nn.Module):
    """Two linear layers in the root unit, blocks between them, and a path through the blocks."""

    def __init__(
        self, num_blocks: int = 3, block: Callable[[], nn.Module] = linear, path: Path = in_order, seed: int = 0
    ) -> None:
        super().__init__()
        self.first = linear()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.last = linear()
        self.path = path
        set_values(self, seed)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.last(self.path(self, self.first(x), **kwargs))


def odd_net() -> Net:
    """Tied, with buffers, a scalar and an empty parameter."""
    net = Net(block=lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)))
    net.last.weight = net.first.weight
    net.register_buffer("table", torch.arange(6).view(2, 3))
    net.register_buffer("scratch", torch.ones(2), persistent=False)
    net.scale = nn.Parameter(torch.tensor(1.5))
    net.empty = nn.Parameter(torch.empty(0, 3))
    net.path = lambda net, x: in_order(net, x) * net.scale
    return net


class TiedHead(nn.Module):
    """An embedding whose matrix the head has too, around two blocks of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class LiveWeights(nn.Module):
    """A block that calls ``look`` while it runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.look: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.look())
        return y


def units_with_weights(net: nn.Module, zero: Zero) -> list[int]:
    """Count, while each of the net's `LiveWeights` runs, the units but the root that hold unsharded weights."""
    seen: list[int] = []
    for block in net.blocks:
        block.look = lambda: seen.append(
            sum(group.params.full_bytes > 0 for unit in zero.units[1:] for group in unit.groups)
        )
    return seen


def set_values(module: nn.Module, seed: int = 0) -> None:
    """Parameters from their place alone: thread ranks share torch's generator."""
    with torch.no_grad():
        for index, param in enumerate(module.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed + index)) * 0.4)


def matrices(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.dim() == 2]


def others(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.dim() != 2]


def muon_and_adamw(zero: Zero) -> list[Optimizer]:
    """Muon for the matrices of a model, another for the rest."""
    model = zero.model
    return [
        zero.optimizer(torch.optim.Muon, matrices(model), lr=1e-2),
        zero.optimizer(torch.optim.AdamW, others(model), lr=1e-2),
    ]


def rows(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """[NUM_ROWS, WIDTH]"""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(NUM_ROWS, WIDTH, generator=generator).to(dtype)


@dataclass
class Turn:
    """What a rank has in hand in one step; without sharding, one process takes each rank's turn."""

    model: Any
    rank: int
    step: int
    zero: Zero | None = None
    optim: Optimizer | None = None

    def loss(self, **kwargs: Any) -> Tensor:
        return self.model(rows(self.rank, self.step), **kwargs).square().mean()


def backward(turn: Turn) -> None:
    turn.loss().backward()


def one_process(
    build: Callable[[], nn.Module],
    take_turn: Callable[[Turn], Any] = backward,
    *,
    world_size: int = 2,
    num_steps: int = NUM_STEPS,
    optimizer: type[Optimizer] = torch.optim.AdamW,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Weights after training on every rank's rows, with gradients averaged."""
    model = build()
    optim = optimizer(model.parameters(), **({"lr": 1e-2} | kwargs))
    for step in range(num_steps):
        for rank in range(world_size):
            take_turn(Turn(model, rank, step))
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= world_size
        optim.step()
        optim.zero_grad()
    return dict(model.state_dict())


def train(
    comm: Communicator,
    build: Callable[[], nn.Module],
    take_turn: Callable[[Turn], Any],
    zero_kwargs: dict[str, Any],
    num_steps: int = NUM_STEPS,
    optimizer: type[Optimizer] = torch.optim.AdamW,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Weights after training this rank's rows with an engine; ``zero_kwargs["units"]`` is a function of the model."""
    model = build()
    if "units" in zero_kwargs:
        zero_kwargs = zero_kwargs | {"units": zero_kwargs["units"](model)}
    from zeroshard.zero import Zero  # found late: tests of the core use these networks without it

    zero = Zero(model, comm=comm, **zero_kwargs)
    optim = zero.optimizer(optimizer, **({"lr": 1e-2} | kwargs))
    for step in range(num_steps):
        take_turn(Turn(model, comm.rank, step, zero, optim))
        optim.step()
        optim.zero_grad()
    return dict(zero.state_dict())


def assert_every_stage_equals_one_process(
    build: Callable[[], nn.Module],
    take_turn: Callable[[Turn], Any] = backward,
    *,
    plain_turn: Callable[[Turn], Any] | None = None,
    world_size: int = 2,
    num_steps: int = NUM_STEPS,
    atol: float = 1e-6,
    zero_kwargs: dict[str, Any] | None = None,
    **optimizer_kwargs: Any,
) -> None:
    """One process's numbers, and one another's bits. ``plain_turn``: what one process does, if it is something else."""
    expected = one_process(
        build, plain_turn or take_turn, world_size=world_size, num_steps=num_steps, **optimizer_kwargs
    )
    first: dict[str, Tensor] = {}
    given = zero_kwargs or {}
    for stage in [given["stage"]] if "stage" in given else STAGES:
        kwargs = given | {"stage": stage}
        by_rank = run_threads(
            lambda comm, kwargs=kwargs: train(comm, build, take_turn, kwargs, num_steps, **optimizer_kwargs),
            world_size,
            timeout_s=300,
        )
        for weights in by_rank:
            first = first or weights
            for name, whole in expected.items():
                torch.testing.assert_close(weights[name], whole, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
                assert torch.equal(weights[name], first[name]), f"stage {stage}: {name} has other bits than stage 0"
