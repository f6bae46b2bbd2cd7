"""Which optimizers may be sharded, and how much sharding changes their results: classified and measured per class.

`zeroshard.zero.whole_tensors.requirements` says whether a class may get slices of tensors. The measurement then trains
a small model at every stage, with threads as ranks, and an unsharded twin of it: the twin's optimizer is the same class
over unsharded parameters, and it gets the very gradients that the ranks have averaged. Any difference after `NUM_STEPS`
is therefore caused by sharding the optimizer, and by nothing else.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm import Communicator, run_threads
from zeroshard.errors import UserError
from zeroshard.zero import STAGES, OptimizerKind, Reach, Zero, classify

NUM_STEPS = 5
WORLD_SIZES = (2, 3)
LAYOUTS = {Reach.ELEMENT_WISE: "slices", Reach.PER_TENSOR: "whole tensors"}


@dataclass(frozen=True)
class OptimizerRow:
    """A line of the table.

    Attributes:
        name: name of the class, with its module unless that is `torch.optim`.
        kind: which tensors the class may be given, or why it is refused.
        differences: for each stage the largest absolute difference of any weight from the unsharded twin's, over
            `WORLD_SIZES`; {} if the class is refused.
    """

    name: str
    kind: OptimizerKind
    differences: dict[int, float] = field(default_factory=dict)


def torch_optimizers() -> list[type[Optimizer]]:
    """Every optimizer class that `torch.optim` ships, by name."""
    found = [value for _, value in sorted(vars(torch.optim).items()) if isinstance(value, type)]
    return [cls for cls in found if issubclass(cls, Optimizer) and cls is not Optimizer]


def load_class(spec: str) -> type[Optimizer]:
    """Import the class that ``module:Class`` names; modules in the current folder are found too.

    Raises:
        UserError: the name has another form, or there is no such optimizer class.
    """
    module_name, colon, class_name = spec.partition(":")
    if not (module_name and colon and class_name):
        what = f"{spec!r} is not of the form module:Class"
        raise UserError("--optimizers", what, "write for example torch.optim:Muon")
    try:
        with _current_folder_first():
            module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 -- a module's code may raise anything
        what = f"{module_name} cannot be imported ({type(error).__name__}: {error})"
        raise UserError("--optimizers", what, "check the name, or install it in this environment") from None
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        what = f"{module_name} has no optimizer class {class_name!r}"
        raise UserError("--optimizers", what, "name a subclass of torch.optim.Optimizer")
    return found


def measure(optimizer_cls: type[Optimizer]) -> OptimizerRow:
    """Classify a class with its default settings and, unless it is refused, train with it at every stage."""
    name = optimizer_cls.__name__
    if not optimizer_cls.__module__.startswith("torch.optim"):
        name = f"{optimizer_cls.__module__}:{name}"
    try:
        kind = classify(optimizer_cls)
        cast("Any", optimizer_cls)([nn.Parameter(torch.zeros((2,) * max(kind.ndims, default=2)))])
    except Exception as error:  # noqa: BLE001 -- a class's code may raise anything
        reason = f"it cannot be built without settings: {type(error).__name__}: {error}"
        return OptimizerRow(name, OptimizerKind(Reach.UNUSABLE, reason))
    if kind.refused:
        return OptimizerRow(name, kind)
    start = _Model()
    differences = dict.fromkeys(STAGES, 0.0)
    with _one_thread():
        for world_size in WORLD_SIZES:
            for stage in STAGES:
                by_rank = run_threads(
                    lambda comm, stage=stage: _difference(comm, copy.deepcopy(start), stage, optimizer_cls, kind),
                    world_size,
                )
                differences[stage] = max(differences[stage], *by_rank)
    return OptimizerRow(name, kind, differences)


def table(rows: Iterable[OptimizerRow]) -> str:
    """A table as plain text: a line for each class, with its differences (``exact`` for 0.0) or why it is refused."""
    lines = [["optimizer", "kind", "layout", *(f"stage {stage}" for stage in STAGES)]]
    for row in rows:
        if row.kind.refused:
            lines.append([row.name, "refused", row.kind.reach.value, row.kind.reason])
            continue
        layout = LAYOUTS[row.kind.reach]
        if row.kind.ndims == (2,):
            layout += ", matrices only"
        cells = ["exact" if value == 0.0 else f"{value:.1e}" for value in row.differences.values()]
        lines.append([row.name, row.kind.reach.value, layout, *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(3)] + [7] * len(STAGES)
    text = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]
    worlds = " and ".join(str(world_size) for world_size in WORLD_SIZES)
    text.append(
        f"\nBy stage: the largest difference of any weight after {NUM_STEPS} steps, on {worlds} ranks, from the same\n"
        "optimizer in one process with the same gradients. Settings are the classes' defaults."
    )
    return "\n".join(text)


class _Model(nn.Module):
    """A model of matrices, vectors and a scalar; no size is a multiple of one of `WORLD_SIZES`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(11, 13), nn.LayerNorm(13), nn.Linear(13, 11)) for _ in range(2)
        )
        self.head = nn.Linear(11, 23)
        self.scale = nn.Parameter(torch.ones(()))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)

    def forward(self, x: Tensor) -> Tensor:  # [rows, 11] -> [rows, 23]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x) * self.scale


def _difference(
    comm: Communicator, model: nn.Module, stage: int, optimizer_cls: type[Optimizer], kind: OptimizerKind
) -> float:
    twin = copy.deepcopy(model)
    zero = Zero(model, stage, comm=comm)
    ours = [zero.optimizer(cls, params) for cls, params in _share_out(model, optimizer_cls, kind)]
    theirs = [cast("Any", cls)(params) for cls, params in _share_out(twin, optimizer_cls, kind)]
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step * comm.world_size + comm.rank)
        model(torch.randn(4, 11, generator=generator)).square().mean().backward()
        averaged = zero.full_grads()
        for name, param in twin.named_parameters():
            grad = averaged[name]
            param.grad = None if grad is None else grad.clone()
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    found, expected = zero.state_dict(), twin.state_dict()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def _share_out(
    model: nn.Module, optimizer_cls: type[Optimizer], kind: OptimizerKind
) -> list[tuple[type[Optimizer], list[nn.Parameter]]]:
    """The class with the parameters that it takes, and AdamW with the rest."""
    taken = [param for param in model.parameters() if param.dim() in kind.ndims]
    rest = [param for param in model.parameters() if param.dim() not in kind.ndims]
    pairs: list[tuple[type[Optimizer], list[nn.Parameter]]] = [(torch.optim.AdamW, rest), (optimizer_cls, taken)]
    return [(cls, params) for cls, params in pairs if params]


@contextmanager
def _current_folder_first() -> Generator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _one_thread() -> Generator[None]:
    """Limit torch to one thread: ranks are threads, and the threads of torch's kernels would compete with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
