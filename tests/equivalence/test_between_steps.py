"""What users change between steps: learning rates, groups, what is frozen. Every stage, against one process.

A script of changes runs on a plain model with a plain optimizer that sees all ranks' rows, and with the engine at each
stage. Weights agree within rounding, and among the stages to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nets import Net, rows
from zeroshard.comm import Communicator, NullCommunicator, run_threads
from zeroshard.zero import STAGES, ShardingStrategy, Zero

WORLD_SIZE, NUM_STEPS, NUM_MICRO = 3, 6, 2
KEEP_WEIGHTS = ShardingStrategy("shard", "shard", "shard", reshard_after_forward=False)
ROWS = {**{str(stage): row for stage, row in STAGES.items()}, "keep": KEEP_WEIGHTS}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.2}),
    "momentum": (torch.optim.SGD, {"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.1}),
}

# A script: before which micro-batch of which step something is done to the model and the optimizer.
Change = Callable[[nn.Module, torch.optim.Optimizer], object]
Script = Mapping[tuple[int, int], Change]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors; the last layer joins later, if it does."""
    joined = [p for name, p in model.named_parameters() if not name.startswith("last")]
    matrices, vectors = ([p for p in joined if p.dim() == dim] for dim in (2, 1))
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _one_process(optimizer: str, script: Script) -> dict[str, Tensor]:
    optimizer_cls, kwargs = OPTIMIZERS[optimizer]
    model = Net()
    optim = optimizer_cls(_groups(model), **kwargs)
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            script.get((step, micro), _nothing)(model, optim)
            for rank in range(WORLD_SIZE):
                (_loss(model, rank, step, micro) / WORLD_SIZE).backward()
        optim.step()
        model.zero_grad()
    return dict(model.state_dict())


def _sharded(comm: Communicator, row: ShardingStrategy, optimizer: str, script: Script) -> dict[str, Tensor]:
    optimizer_cls, kwargs = OPTIMIZERS[optimizer]
    model = Net()
    zero = Zero(model, row, comm=comm, accumulate="local")
    optim = zero.optimizer(optimizer_cls, _groups(model), **kwargs)
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            script.get((step, micro), _nothing)(model, optim)
            with zero.micro_batch(last=micro == NUM_MICRO - 1):
                _loss(model, comm.rank, step, micro).backward()
        optim.step()
        zero.zero_grad()
    return dict(zero.state_dict())


def _loss(model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    return model(rows(rank, 10 * step + micro)).square().mean() / NUM_MICRO


def _nothing(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Most micro-batches change nothing."""


def _set(group: int, **values: Any) -> Change:
    return lambda model, optim: optim.param_groups[group].update(values)


def _trainable(name: str, trainable: bool) -> Change:
    return lambda model, optim: model.get_submodule(name).requires_grad_(trainable)


def _join(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.add_param_group({"params": list(model.last.parameters()), "lr": 2e-2})


def _all_of(*changes: Change) -> Change:
    return lambda model, optim: [change(model, optim) for change in changes]


SCRIPTS: dict[str, Script] = {
    "learning rates": {(1, 0): _set(0, lr=5e-2), (2, 0): _set(1, lr=0.0), (4, 0): _set(1, lr=3e-2)},
    "decay": {(1, 0): _set(0, weight_decay=0.0), (3, 0): _set(1, weight_decay=0.5)},
    "a group that joins": {(2, 0): _join, (3, 0): _set(2, lr=1e-3)},
    "a block frozen": {(2, 0): _trainable("blocks.1", False)},
    "a block frozen and back": {(1, 0): _trainable("blocks.1", False), (4, 0): _trainable("blocks.1", True)},
    "frozen from the start": {(0, 0): _trainable("blocks.0", False), (3, 0): _trainable("blocks.0", True)},
    "a part of a unit": {(1, 0): _trainable("first", False), (3, 0): _trainable("first", True)},
    "layer by layer": {(step, 0): _trainable(f"blocks.{step}", False) for step in range(3)},
    "inside a step": {(1, 1): _trainable("blocks.1", False), (3, 1): _trainable("blocks.1", True)},
    "all at once": {
        (1, 0): _all_of(_trainable("blocks.2", False), _set(0, lr=3e-2)),
        (2, 0): _all_of(_join, _trainable("last", False)),
        (4, 0): _all_of(_trainable("blocks.2", True), _trainable("last", True), _set(2, lr=5e-3)),
    },
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=[name.replace(" ", "-") for name in SCRIPTS])
def test_changes_between_steps_are_what_one_process_would_have_made(script, optimizer):
    expected, first = _one_process(optimizer, script), None
    for name, row in ROWS.items():
        for weights in run_threads(lambda comm, row=row: _sharded(comm, row, optimizer, script), WORLD_SIZE):
            first = first or weights
            for key, whole in expected.items():
                torch.testing.assert_close(weights[key], whole, rtol=0, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")
                assert torch.equal(weights[key], first[key]), f"stage {name}: {key} has other bits than stage 0"


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_frozen_unit_reduces_nothing(row):
    """Neither its gradients, nor, once the others' are reduced, what it never had."""
    net = Net()
    zero = Zero(net, row, comm=NullCommunicator(2))
    net.blocks[1].requires_grad_(False)
    net(rows(0)).sum().backward()
    reduced = {unit.name: [group.grads.reduced is not None for group in unit.groups] for unit in zero.units}
    assert reduced == {"root": [True], "blocks.0": [True], "blocks.1": [False], "blocks.2": [True]}


def test_weights_that_are_kept_are_whole_from_forward_to_backward():
    for row, whole_between in ((STAGES[3], [False, False, True]), (KEEP_WEIGHTS, [True] * 3)):
        net = Net()
        zero = Zero(net, row, comm=NullCommunicator(2))
        blocks = [unit for unit in zero.units if unit.name != "root"]

        def all_whole(blocks=blocks):
            return [group.params.whole for unit in blocks for group in unit.groups]

        loss = net(rows(0)).sum()
        assert all_whole() == whole_between  # what ran last is needed first
        loss.backward()
        assert all_whole() == [False] * 3
        with torch.no_grad():
            net(rows(0))  # an evaluation keeps nothing
        assert all_whole() == [False] * 3
