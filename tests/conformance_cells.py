"""Does every strategy train as one process does? Small cells, each a run of a few steps held against one process.

A cell is a strategy x an optimizer x a world size x a feature, trained through `zeroshard.parallel`, the interface
that the trainer uses. The reference, `one_process`, has whole tensors and torch's own optimizer, and takes the turn of
each rank in its order: it runs that rank's rows through the same forward and backward, adds the gradients, and divides
by the number of ranks.

[Note: Exact means exact]
    Ranks add their gradients in orders that differ between backends, and by position in a ring; some divide before
    the sum and some after it. Each is right, and in floating point each gives other last bits, so that on ordinary
    gradients not even two right programs are equal. Here therefore each use of a weight rounds the gradient that it
    passes on to a multiple of 3/128 of at most 255/128 in size. Such numbers, and halves and thirds of their sums,
    need so few bits that every order and every place of the division give the same result. What then still differs
    from the reference, a strategy has changed: a weight, a gradient that was lost or counted twice, the optimizer's
    arithmetic. Eight bits are enough for a gradient, so the cells in bfloat16 are held to the same.

    Where such a cell is not equal, the grid enlarges what made it so: a gradient that lies between two steps jumps to
    the other one. So the cell is trained again on ordinary gradients and the difference measured at the end; and on
    the grid once more, where it is measured at the first step that shows one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import conformance_remedies as remedies
from conformance_remedies import COPY, LOCAL, MEETINGS, WIRE, WORLDS
from zeroshard.comm import Communicator
from zeroshard.parallel import STRATEGIES, Ddp, Setup, Strategy
from zeroshard.zero import ShardedOptimizer

WIDTH, INNER, NUM_ROWS = 7, 11, 4  # sizes that neither 2 nor 3 ranks divide; rows of a rank's micro-batch
NUM_STEPS = 6  # RAdam's rectification begins with the sixth
MAX_NORM = 0.5  # below every norm that occurs
GRID, MOST = 3 / 128, 85  # the step, and how many of them a gradient may have

O = torch.optim  # noqa: E741 -- a table reads better with it
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (O.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (O.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "AdamW": (O.AdamW, {"lr": 0.01}),
    "AdamW fused": (O.AdamW, {"lr": 0.01, "fused": True}),
    "Adadelta": (O.Adadelta, {"lr": 1.0}),
    "Adafactor": (O.Adafactor, {"lr": 0.01}),
    "Adagrad": (O.Adagrad, {"lr": 0.05}),
    "Adamax": (O.Adamax, {"lr": 0.01}),
    "ASGD": (O.ASGD, {"lr": 0.05, "t0": 2}),
    "LBFGS": (O.LBFGS, {"lr": 0.05, "max_iter": 2}),
    "Muon": (O.Muon, {"lr": 0.01}),
    "NAdam": (O.NAdam, {"lr": 0.01}),
    "RAdam": (O.RAdam, {"lr": 0.01}),
    "RMSprop": (O.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Rprop": (O.Rprop, {"lr": 0.01}),
    "SparseAdam": (O.SparseAdam, {"lr": 0.01}),
}
MATRICES_ALONE = frozenset({"Muon"})  # its cells freeze all other parameters
WITH_CLOSURE = frozenset({"LBFGS"})
WORLD_SIZES = (2, 3)

State = dict[str, Tensor]  # a model's weights, by name


@dataclass(frozen=True)
class Feature:
    """What a cell does beside training; ``about`` says it in words."""

    about: str
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    one_rank: bool = False
    num_micro: int = 1
    clip: bool = False
    groups: bool = False
    compute_dtype: torch.dtype = torch.float32


FEATURES: dict[str, Feature] = {
    "plain": Feature("one micro-batch a step, one group, fp32"),
    "tied": Feature("the first and the last layer share their matrix", tied=True),
    "frozen": Feature("a matrix inside a block and a vector outside do not require gradients", frozen=True),
    "unused": Feature("a layer inside a block and one outside take part in no forward, on no rank", unused=True),
    "one rank": Feature("a layer takes part in rank 0's forward and in nobody else's", one_rank=True),
    "accumulation": Feature("two micro-batches a step, under `Strategy.micro_batch`", num_micro=2),
    "clipping": Feature(f"clipped to a global norm of {MAX_NORM} in each step", clip=True),
    "groups": Feature("two param groups with their own settings, and a scheduler that changes them", groups=True),
    "bf16": Feature("forward and backward in bfloat16, as the strategy has it", compute_dtype=torch.bfloat16),
}


def _ddp_with_sharded_optimizer(setup: Setup) -> Strategy:
    strategy = Ddp(replace(setup, optimizer_cls=torch.optim.SGD, optimizer_kwargs={}))  # whose own is not used
    groups = setup.param_groups(setup.model)
    strategy.optimizer = ShardedOptimizer(groups, setup.optimizer_cls, comm=strategy.comm, **setup.optimizer_kwargs)
    return strategy


SHARDED_OPTIMIZER = "ddp + ShardedOptimizer"
CONTESTANTS: dict[str, Callable[[Setup], Strategy]] = {
    **{name: STRATEGIES[name] for name in ("zero0", "zero1", "zero2", "zero3")},
    WIRE: remedies.with_wire,
    COPY: remedies.with_copy,
    LOCAL: remedies.with_local_steps,
    SHARDED_OPTIMIZER: _ddp_with_sharded_optimizer,
    **{name: STRATEGIES[name] for name in ("ddp", "zero1-torch", "fsdp2")},
}
OURS = ("zero0", "zero1", "zero2", "zero3", WIRE, COPY, LOCAL, SHARDED_OPTIMIZER)
# Those compute under torch.autocast, with fp32 weights; the others cast weights and inputs.
AUTOCAST = frozenset({SHARDED_OPTIMIZER, "ddp", "zero1-torch"})


@dataclass(frozen=True)
class Cell:
    """One run: keys of `CONTESTANTS`, `OPTIMIZERS` and `FEATURES`, and how many ranks."""

    strategy: str
    optimizer: str
    world_size: int
    feature: str


def cells() -> list[Cell]:
    """All of them, those of one world size together."""
    return [
        Cell(strategy, optimizer, world_size, feature)
        for world_size in sorted({*WORLD_SIZES, *(size for sizes in WORLDS.values() for size in sizes)})
        for feature in FEATURES
        for optimizer in OPTIMIZERS
        for strategy in CONTESTANTS
        if world_size in WORLDS.get(strategy, WORLD_SIZES)
    ]


class BuildError(Exception):
    """A strategy refused what it was given before it trained; the cause is what it raised."""


def train(comm: Communicator, cell: Cell, *, on_grid: bool, each_step: bool = False) -> list[State]:
    """Train one cell on this rank: the whole model's weights at the end, or after each step, on the CPU. Collective.

    Of replicas that take local steps: after each meeting.

    Raises:
        BuildError: the strategy refuses the cell.
        Exception: whatever it raises while it trains.
    """
    feature = FEATURES[cell.feature]
    optimizer_cls, kwargs = OPTIMIZERS[cell.optimizer]
    net = Net(cell, on_grid=on_grid)
    try:
        strategy = CONTESTANTS[cell.strategy](
            Setup(
                model=net,
                units=list(net.blocks),
                comm=comm,
                optimizer_cls=optimizer_cls,
                param_groups=lambda model: _groups(cell, model),
                optimizer_kwargs=kwargs,
                compute_dtype=feature.compute_dtype,
                find_unused_parameters=feature.unused or feature.one_rank,
            )
        )
    except Exception as error:
        raise BuildError(str(error)) from error

    def weights() -> State:
        return compared(cell, net, strategy.state_dict())

    def backward(step: int) -> Tensor:
        for micro in range(feature.num_micro):
            with strategy.micro_batch(last=micro == feature.num_micro - 1):
                loss = strategy.model(rows(comm.rank, step, micro), comm.rank == 0) / feature.num_micro
                loss.backward()
        if feature.clip:
            strategy.clip_grad_norm_(MAX_NORM)
        return loss.detach()

    return _steps(cell, [strategy.optimizer], [backward], weights, each_step, lambda _: remedies.meet(strategy))


def one_process(cell: Cell, *, on_grid: bool, each_step: bool = False) -> list[State]:
    """The weights that ``cell`` should come to: torch's own optimizer on whole tensors, gradients rank after rank.

    In bfloat16 it casts what the strategy casts: inputs of operations (autocast), or all weights and what enters.

    Raises:
        Exception: whatever the optimizer raises.
    """
    feature = FEATURES[cell.feature]
    optimizer_cls, kwargs = OPTIMIZERS[cell.optimizer]
    alone = [(rank,) for rank in range(cell.world_size)]
    turns = alone if cell.strategy == LOCAL else [tuple(range(cell.world_size))]  # the ranks of each replica
    nets = [Net(cell, on_grid=on_grid) for _ in turns]
    net, replicas = nets[0], remedies.Replicas(nets) if cell.strategy == LOCAL else None
    optimizers = [optimizer_cls(_groups(cell, each), **kwargs) for each in nets]

    def backward(net: Net, ranks: tuple[int, ...], step: int) -> Tensor:
        for rank in ranks:
            for micro in range(feature.num_micro):
                loss = _loss(cell, net, rows(rank, step, micro), rank == 0) / feature.num_micro
                loss.backward()
        grads = [param.grad for param in net.parameters() if param.grad is not None]
        for grad in grads:
            grad /= len(ranks)
        if feature.clip:
            norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
            for grad in grads:
                grad *= float(MAX_NORM / (norm + 1e-6))
        return loss.detach()

    def weights() -> State:
        return {name: value.clone() for name, value in compared(cell, net, net.state_dict()).items()}

    def over(step: int) -> None:
        if replicas is not None and (step + 1) % MEETINGS.every == 0:
            replicas.meet()

    backwards = [partial(backward, each, ranks) for each, ranks in zip(nets, turns, strict=True)]
    return _steps(cell, optimizers, backwards, weights, each_step, over)


def compared(cell: Cell, net: nn.Module, state: Mapping[str, Tensor]) -> State:
    """What is compared of a model's weights: in bfloat16 not the frozen ones, which strategies keep in either dtype."""
    if FEATURES[cell.feature].compute_dtype == torch.float32:
        return dict(state)
    frozen = {name for name, param in net.named_parameters() if not param.requires_grad}
    return {name: value for name, value in state.items() if name not in frozen}


def difference(found: Sequence[State], expected: Sequence[State]) -> float:
    """The largest absolute difference of any weight, at the first point where one differs; 0.0 where all are equal."""
    for here, there in zip(found, expected, strict=True):
        assert here.keys() == there.keys()
        unequal = [(here[name], value) for name, value in there.items() if not torch.equal(here[name], value)]
        if unequal:
            apart = max(float((one.double() - other.double()).abs().max()) for one, other in unequal)
            return math.inf if math.isnan(apart) else apart
    return 0.0


# -- what is trained -----------------------------------------------------------------------------------------------


class _OnGrid(torch.autograd.Function):
    """The identity, with a gradient that is rounded: [Note: Exact means exact]."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """A view of ``weight``."""
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient as the nearest multiple of `GRID`, at most `MOST` of them in size, in its dtype."""
        (grad,) = grads
        return (grad.float() / GRID).round().clamp(-MOST, MOST).mul(GRID).to(grad.dtype)


class _Dense(nn.Module):
    """A linear layer."""

    def __init__(self, fan_in: int, fan_out: int, *, on_grid: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in))
        self.bias = nn.Parameter(torch.empty(fan_out))
        self._on_grid = on_grid

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, fan_in] -> [rows, fan_out]."""
        weight, bias = self.weight, self.bias
        if self._on_grid:
            weight, bias = cast("Any", _OnGrid.apply(weight)), cast("Any", _OnGrid.apply(bias))
        return nn.functional.linear(x, weight, bias)


class _Block(nn.Module):
    """A residual block of two layers, with a third that no forward uses where ``unused``."""

    def __init__(self, *, unused: bool, on_grid: bool) -> None:
        super().__init__()
        self.up = _Dense(WIDTH, INNER, on_grid=on_grid)
        self.down = _Dense(INNER, WIDTH, on_grid=on_grid)
        if unused:
            self.spare = _Dense(WIDTH, 3, on_grid=on_grid)

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, WIDTH] -> the same."""
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks between two layers, all with biases; built for the feature and the optimizer of a cell.

    Weights come from a generator of their own, so every process makes the same.
    """

    def __init__(self, cell: Cell, *, on_grid: bool) -> None:
        super().__init__()
        feature = FEATURES[cell.feature]
        self.first = _Dense(WIDTH, WIDTH, on_grid=on_grid)
        blocks = [_Block(unused=feature.unused, on_grid=on_grid) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.last = _Dense(WIDTH, WIDTH, on_grid=on_grid)
        if feature.tied:
            self.last.weight = self.first.weight
        if feature.unused:
            self.spare = _Dense(WIDTH, 5, on_grid=on_grid)
        self.sometimes = _Dense(WIDTH, WIDTH, on_grid=on_grid) if feature.one_rank else None
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
        if feature.frozen:
            blocks[0].up.weight.requires_grad_(False)
            self.last.bias.requires_grad_(False)
        if cell.optimizer in MATRICES_ALONE:
            for param in self.parameters():
                if param.dim() != 2:
                    param.requires_grad_(False)

    def forward(self, x: Tensor, all_of_it: bool = True) -> Tensor:
        """The loss on ``x`` [rows, WIDTH]; ``all_of_it``: with the layer that only some ranks use, if there is one."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.sometimes is not None and all_of_it:
            x = x + self.sometimes(x)
        return (self.last(x) - 1).square().mean()


def rows(rank: int, step: int, micro: int) -> Tensor:
    """What a rank computes on: [NUM_ROWS, WIDTH]."""
    generator = torch.Generator().manual_seed((step * 10 + micro) * 10 + rank)
    return torch.randn(NUM_ROWS, WIDTH, generator=generator)


def _groups(cell: Cell, model: nn.Module) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    if not FEATURES[cell.feature].groups:
        return [{"params": params}]
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]


def _loss(cell: Cell, net: Net, x: Tensor, all_of_it: bool) -> Tensor:
    dtype = FEATURES[cell.feature].compute_dtype
    if dtype == torch.float32 and cell.strategy == WIRE and cell.world_size > 1:
        arrived = {
            name: remedies.Rounded.apply(param) if param.dim() > 1 else param for name, param in net.named_parameters()
        }
        return torch.func.functional_call(net, cast("Any", arrived), (x, all_of_it))
    if dtype == torch.float32:
        return net(x, all_of_it)
    if cell.strategy in AUTOCAST:
        with torch.autocast("cpu", dtype=dtype):
            return net(x, all_of_it)
    weights = {name: param.to(dtype) for name, param in net.named_parameters()}
    return torch.func.functional_call(net, weights, (x.to(dtype), all_of_it))


def _steps(
    cell: Cell,
    optimizers: Sequence[Optimizer],
    backwards: Sequence[Callable[[int], Tensor]],
    weights: Callable[[], State],
    each_step: bool,
    over: Callable[[int], None],
) -> list[State]:
    """Each optimizer takes its steps by its own backward; ``over``: called with a step's number when all have."""
    schedules = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in optimizers if FEATURES[cell.feature].groups]
    every = MEETINGS.every if cell.strategy == LOCAL else 1
    states: list[State] = []
    for step in range(NUM_STEPS):
        for optimizer, backward in zip(optimizers, backwards, strict=True):
            if cell.optimizer in WITH_CLOSURE:

                def closure(step: int = step, optimizer: Optimizer = optimizer, backward: Any = backward) -> Tensor:
                    optimizer.zero_grad()
                    return backward(step)

                cast("Any", optimizer).step(closure)
            else:
                backward(step)
                cast("Any", optimizer).step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        over(step)
        if (each_step and (step + 1) % every == 0) or step == NUM_STEPS - 1:
            states.append(weights())
    return states
