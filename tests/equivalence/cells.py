"""Does every strategy train as one process does? One table of cells, each a short run held against one process.

A cell is a strategy x an optimizer x a world size x a feature, trained through `zeroshard.parallel`, the interface
that the trainer uses. `test_cells.py` runs those of our engine, `benchmarks/claims/conformance.py` those that
docs/conformance.md shows. The reference, `one_process`, has whole tensors and torch's own optimizer, and takes the
turn of each rank in its order: it runs that rank's rows through the same forward and backward, adds the gradients, and
divides by the number of ranks.

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

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from equivalence import remedies
from equivalence.remedies import COPY, EVERY_SECOND, LOCAL, WIRE
from zeroshard.comm import Communicator, RingCommunicator, SharedMemoryCommunicator
from zeroshard.parallel import STRATEGIES, Ddp, Setup, Strategy
from zeroshard.zero import ShardedOptimizer

WIDTH, INNER, NUM_ROWS = 7, 11, 4  # sizes that neither 2 nor 3 ranks divide; rows of a rank's micro-batch
NUM_EXPERTS = 5  # the last gets no rows; the others are as many as ranks, or more
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
TRANSPORTS = {"ring": RingCommunicator, "shm": SharedMemoryCommunicator}
ELEMENT_WISE = ("AdamW", "SGD")  # with which the forms of a model are trained

State = dict[str, Tensor]  # a model's weights, by name


@dataclass(frozen=True)
class Feature:
    """What a cell does beside training; ``about`` says it in words.

    Attributes:
        form: something of the model or of its loop that the engine alone is asked for, with `ELEMENT_WISE`.
    """

    about: str
    form: bool = False
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    one_rank: bool = False
    experts: bool = False
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
    "experts": Feature(
        "blocks have a mixture of experts, each of them a unit: a rank uses its own one, and in every second step "
        "that of the next rank too; one expert gets no rows",
        experts=True,
    ),
    "accumulation": Feature("two micro-batches a step, under `Strategy.micro_batch`", num_micro=2),
    "clipping": Feature(f"clipped to a global norm of {MAX_NORM} in each step", clip=True),
    "groups": Feature("two param groups with their own settings, and a scheduler that changes them", groups=True),
    "bf16": Feature("forward and backward in bfloat16, as the strategy has it", compute_dtype=torch.bfloat16),
    "float64": Feature("all in float64, also the optimizer", form=True),
    "recomputed": Feature("activation checkpointing of one block, reentrant of the other", form=True),
    "called again": Feature("blocks share a weight, and both run a second time", form=True),
    "skipped": Feature("rank 1 skips a block; only rank 0 uses a layer inside the other one", form=True),
    "recomputed apart": Feature("rank 0 recomputes one block and skips the other, which other ranks run", form=True),
    "reordered": Feature(
        "blocks run in another order than they were registered, and from step 3 in this one", form=True
    ),
    "structures": Feature("blocks return a list in a dict, and an object that shows no tensor", form=True),
    "any size": Feature("parameters of no dimension, of one element, and of none", form=True),
    "two forwards": Feature("two forwards before one backward", form=True),
    "interrupted": Feature("an evaluation, a forward without backward and a failed one before each loss", form=True),
    "thawing": Feature("what is frozen changes between steps and inside one", num_micro=2, form=True),
    "joining": Feature("groups' settings change, and the last layer joins with a group of its own", form=True),
}


def _ddp_with_sharded_optimizer(setup: Setup) -> Strategy:
    strategy = Ddp(replace(setup, optimizer_cls=torch.optim.SGD, optimizer_kwargs={}))  # whose own is not used
    groups = setup.param_groups(setup.model)
    strategy.optimizer = ShardedOptimizer(groups, setup.optimizer_cls, comm=strategy.comm, **setup.optimizer_kwargs)
    return strategy


def _setting(strategy: str, **settings: Any) -> Callable[[Setup], Strategy]:
    return lambda setup: STRATEGIES[strategy](replace(setup, **settings))


SHARDED_OPTIMIZER = "ddp + ShardedOptimizer"
STAGES = ("zero0", "zero1", "zero2", "zero3")
CONTESTANTS: dict[str, Callable[[Setup], Strategy]] = {
    **{name: STRATEGIES[name] for name in STAGES},
    WIRE: remedies.with_wire,
    COPY: remedies.with_copy,
    LOCAL: remedies.with_local_steps,
    "zero3, groups": _setting("zero3", shard_size=2, prefetch=0),
    "zero2, sharded sums": _setting("zero2", accumulate="sharded", prefetch=3),
    "zero3, kept weights": _setting("zero3", reshard_after_forward=False),
    SHARDED_OPTIMIZER: _ddp_with_sharded_optimizer,
    **{name: STRATEGIES[name] for name in ("ddp", "zero1-torch", "fsdp2")},
    "fsdp2, kept weights": _setting("fsdp2", reshard_after_forward=False),
}
# World sizes of those that need nodes or groups; of the others: `WORLD_SIZES`.
WORLDS: dict[str, tuple[int, ...]] = dict.fromkeys((COPY, "zero3, groups"), (4,))
THEIRS = ("ddp", "zero1-torch", "fsdp2", "fsdp2, kept weights")
ENGINE = tuple(name for name in CONTESTANTS if name not in (SHARDED_OPTIMIZER, *THEIRS))
OURS = (*ENGINE, SHARDED_OPTIMIZER)
PUBLISHED = (
    *STAGES,
    WIRE,
    COPY,
    LOCAL,
    SHARDED_OPTIMIZER,
    "ddp",
    "zero1-torch",
    "fsdp2",
)  # columns of docs/conformance.md
# Those compute under torch.autocast, with fp32 weights; the others cast weights and inputs.
AUTOCAST = frozenset({SHARDED_OPTIMIZER, "ddp", "zero1-torch"})


@dataclass(frozen=True)
class Cell:
    """One run: keys of `CONTESTANTS`, `OPTIMIZERS` and `FEATURES`, and how many ranks."""

    strategy: str
    optimizer: str
    world_size: int
    feature: str
    num_steps: ClassVar[int] = NUM_STEPS


@dataclass(frozen=True)
class Brief(Cell):
    """A cell in which nothing begins late: the first step makes states, the second uses them, others are alike."""

    num_steps = 3


def cells(strategies: Sequence[str] = tuple(CONTESTANTS)) -> list[Cell]:
    """All of them, those of one world size together."""
    return [
        Cell(strategy, optimizer, world_size, feature)
        for world_size in (*WORLD_SIZES, 4)
        for feature in FEATURES
        for optimizer in OPTIMIZERS
        for strategy in strategies
        if world_size in WORLDS.get(strategy, WORLD_SIZES) and _has_form(strategy, optimizer, feature)
    ]


def _has_form(strategy: str, optimizer: str, feature: str) -> bool:
    if not FEATURES[feature].form:
        return True
    # The references of these two have weights that stay the same ones, and rounded weights, which are not recomputed.
    # Local steps are compared on ordinary gradients, which diverge under SGD where blocks are called again.
    beyond = {LOCAL: ("thawing", "joining", "called again"), WIRE: ("recomputed", "recomputed apart")}
    return optimizer in ELEMENT_WISE and strategy in ENGINE and feature not in beyond.get(strategy, ())


class BuildError(Exception):
    """A strategy refused what it was given before it trained; the cause is what it raised."""


def train(comm: Communicator, cell: Cell, *, on_grid: bool, each_step: bool = False) -> list[State]:
    """Train one cell on this rank: the whole model's weights at the end, or after each step, on the CPU. Collective.

    Of replicas that take local steps: after each outer step.

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
                units=net.units,
                comm=comm,
                optimizer_cls=optimizer_cls,
                param_groups=lambda model: _groups(cell, model),
                optimizer_kwargs=kwargs,
                compute_dtype=feature.compute_dtype,
                find_unused_parameters=feature.unused or feature.one_rank or feature.experts,
            )
        )
    except Exception as error:
        raise BuildError(str(error)) from error

    def weights() -> State:
        return compared(cell, net, strategy.state_dict())

    def backward(step: int) -> Tensor:
        for micro in range(feature.num_micro):
            between(cell, net, strategy.optimizer, step, micro)
            with strategy.micro_batch(last=micro == feature.num_micro - 1):
                loss = _loss(cell, strategy.model, comm.rank, step, micro)
                loss.backward()
        if feature.clip:
            strategy.clip_grad_norm_(MAX_NORM)
        return loss.detach()

    return _steps(cell, [strategy.optimizer], [backward], weights, each_step, lambda _: remedies.count_step(strategy))


def trained(comm: Any, cell: Cell, on_grid: bool, transport: str = "gloo") -> list[State] | str:
    """What `train` has over ``transport``, a key of `TRANSPORTS` or ``comm`` itself; or the words of what it raised."""
    own = TRANSPORTS[transport](comm.group) if transport in TRANSPORTS else comm
    try:
        return train(own, cell, on_grid=on_grid)
    except Exception as error:  # noqa: BLE001 -- told to the test, on whose word the ranks live on
        return f"{type(error).__name__}: {error}"
    finally:
        if own is not comm:
            own.close()


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

    def backward(net: Net, optimizer: Optimizer, ranks: tuple[int, ...], step: int) -> Tensor:
        for micro in range(feature.num_micro):
            between(cell, net, optimizer, step, micro)
            for rank in ranks:
                loss = _loss(cell, _as_computed(cell, net), rank, step, micro)
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
        if replicas is not None:
            replicas.step()

    backwards = [partial(backward, *each) for each in zip(nets, optimizers, turns, strict=True)]
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


class Hidden:
    """Shows no tensor to whoever looks through its attributes."""

    __slots__ = ("open",)

    def __init__(self, x: Tensor) -> None:
        self.open = lambda: x


class _Block(nn.Module):
    """A residual block of two layers, with a third that no forward uses where ``unused``."""

    def __init__(self, *, spare: bool, on_grid: bool, num_experts: int = 0) -> None:
        super().__init__()
        self.up = _Dense(WIDTH, INNER, on_grid=on_grid)
        self.down = _Dense(INNER, WIDTH, on_grid=on_grid)
        if spare:
            self.spare = _Dense(WIDTH, WIDTH, on_grid=on_grid)
        self.experts = nn.ModuleList(_Dense(WIDTH, WIDTH, on_grid=on_grid) for _ in range(num_experts))

    def forward(
        self,
        x: Tensor,
        with_spare: bool = False,
        wrap: Callable[[Tensor], Any] = lambda x: x,
        chosen: Sequence[int] = (),
    ) -> Any:
        """x [rows, WIDTH] -> the same; ``chosen``: the experts of these rows."""
        x = x + self.down(torch.tanh(self.up(x)))
        if chosen:
            x = x + sum(torch.tanh(self.experts[number](x)) for number in chosen) / len(chosen)
        return wrap(x + self.spare(x) if with_spare else x)


class _Odd(nn.Module):
    """Parameters of no dimension, of one element, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor, on_grid: bool) -> Tensor:
        """x [rows, WIDTH] -> the same."""
        scale, one = (cast("Any", _OnGrid.apply(p)) if on_grid else p for p in (self.scale, self.one))
        return x * scale + one + self.nothing.sum()


class Net(nn.Module):
    """Two blocks between two layers, all with biases; built for the feature and the optimizer of a cell.

    Weights come from a generator of their own, so every process makes the same.
    """

    def __init__(self, cell: Cell, *, on_grid: bool) -> None:
        super().__init__()
        self.feature, feature = cell.feature, FEATURES[cell.feature]
        self.first = _Dense(WIDTH, WIDTH, on_grid=on_grid)
        spares = (feature.unused or cell.feature == "skipped", feature.unused)
        num_experts = NUM_EXPERTS if feature.experts else 0
        blocks = [_Block(spare=spare, on_grid=on_grid, num_experts=num_experts) for spare in spares]
        self.blocks = nn.ModuleList(blocks)
        self.units: list[nn.Module] = [*blocks, *(expert for block in blocks for expert in block.experts)]
        self.last = _Dense(WIDTH, WIDTH, on_grid=on_grid)
        self.odd = _Odd() if cell.feature == "any size" else None
        if feature.tied:
            self.last.weight = self.first.weight
        if cell.feature == "called again":
            blocks[1].up.weight = blocks[0].up.weight
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
        if cell.feature == "float64":
            self.double()
        self._on_grid = on_grid

    def forward(self, x: Tensor, rank: int = 0, step: int = 0) -> Tensor:
        """The loss on ``x`` [rows, WIDTH] of a rank: only rank 0 uses ``sometimes``, if there is one."""
        x = self.first(x)
        first, second = self.blocks
        if self.feature == "recomputed":
            x = cast("Any", checkpoint(first, x, use_reentrant=False, preserve_rng_state=False))
            x = cast("Any", checkpoint(second, x, use_reentrant=True, preserve_rng_state=False))
        elif self.feature == "recomputed apart":
            here = partial(checkpoint, first, use_reentrant=True, preserve_rng_state=False) if rank == 0 else second
            x = cast("Any", here(x))
        elif self.feature == "structures":
            x = first(x, wrap=lambda y: {"y": [y], "n": 1})["y"][0]
            x = second(x, wrap=Hidden).open()
        elif self.feature == "skipped":
            x = first(x, with_spare=rank == 0)
            x = x if rank == 1 else second(x)
        else:
            again = {"called again": (0, 1, 1, 0), "reordered": (1, 0) if step < 3 else (0, 1)}
            chosen = (rank, (rank + 1) % (NUM_EXPERTS - 1))[: 1 + step % 2] if self.feature == "experts" else ()
            for place in again.get(self.feature, (0, 1)):
                x = self.blocks[place](x, chosen=chosen)
        if self.sometimes is not None and rank == 0:
            x = x + self.sometimes(x)
        if self.odd is not None:
            x = self.odd(x, self._on_grid)
        return (self.last(x) - 1).square().mean()


def between(cell: Cell, net: Net, optimizer: Optimizer, step: int, micro: int) -> None:
    """What a user changes before a micro-batch: what is trained, groups and their settings."""
    if cell.feature == "thawing":
        net.blocks[1].requires_grad_(step not in (1, 2))
        net.blocks[0].requires_grad_((step, micro) < (3, 1) or step == 5)
        net.last.bias.requires_grad_(step < 4)
    elif cell.feature == "joining" and micro == 0:
        net.last.requires_grad_(step >= 2)
        if step == 2:
            optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 0.02})
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        optimizer.param_groups[-1]["weight_decay"] = 0.1 * step


def rows(rank: int, step: int, micro: int) -> Tensor:
    """What a rank computes on: [NUM_ROWS, WIDTH]."""
    generator = torch.Generator().manual_seed((step * 10 + micro) * 10 + rank)
    return torch.randn(NUM_ROWS, WIDTH, generator=generator)


def _groups(cell: Cell, model: nn.Module) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    if cell.feature == "joining":
        return [{"params": [param for name, param in model.named_parameters() if not name.startswith("last")]}]
    if not FEATURES[cell.feature].groups:
        return [{"params": params}]
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]


def _loss(cell: Cell, model: Callable[..., Tensor], rank: int, step: int, micro: int) -> Tensor:
    """A rank's loss of a micro-batch, with what its feature does around it."""
    x = rows(rank, step, micro)
    x = x.double() if cell.feature == "float64" else x
    if cell.feature == "interrupted":
        with torch.no_grad():
            model(x, rank, step)
        model(x, rank, step)  # without a backward
        with contextlib.suppress(RuntimeError):
            model(torch.zeros(1, 99), rank, step)
    loss = model(x, rank, step)
    if cell.feature == "two forwards":
        loss = loss + model(rows(rank, step + 10, micro), rank, step) / 2
    return loss / FEATURES[cell.feature].num_micro


def _as_computed(cell: Cell, net: Net) -> Callable[..., Tensor]:
    """``net`` with its weights as the strategy computes with them."""
    dtype = FEATURES[cell.feature].compute_dtype
    if dtype == torch.float32 and cell.strategy == WIRE and cell.world_size > 1:
        arrived = {
            name: remedies.Rounded.apply(param) if param.dim() > 1 else param for name, param in net.named_parameters()
        }
        return lambda *args: torch.func.functional_call(net, cast("Any", arrived), args)
    if dtype == torch.float32:
        return net
    if cell.strategy in AUTOCAST:
        return torch.autocast("cpu", dtype=dtype)(net)
    weights = {name: param.to(dtype) for name, param in net.named_parameters()}
    return lambda x, *args: torch.func.functional_call(net, weights, (x.to(dtype), *args))


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
    every = EVERY_SECOND.every if cell.strategy == LOCAL else 1
    states: list[State] = []
    for step in range(cell.num_steps):
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
        if (each_step and (step + 1) % every == 0) or step == cell.num_steps - 1:
            states.append(weights())
    return states
