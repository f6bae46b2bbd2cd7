"""Cells of the conformance matrix that must hold for ours: exact, or refused by name.

`benchmarks/claims/conformance.py` runs all of them, for every strategy; here every two of an optimizer, a strategy of
ours, a world size and a feature meet, and with ``--soak`` all of ours run.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import permutations

import pytest
import torch

import conformance_cells as conformance
from conformance_cells import (
    CONTESTANTS,
    FEATURES,
    MAX_NORM,
    OPTIMIZERS,
    OURS,
    SHARDED_OPTIMIZER,
    WORLD_SIZES,
    BuildError,
    Cell,
    Net,
    cells,
    difference,
    one_process,
    rows,
    train,
)
from conformance_remedies import COPY, LOCAL, MEETINGS, WIRE, WORLDS
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero import ReplicaDivergedError

REFUSED = {"LBFGS": "calls the closure again", "SparseAdam": "does not support dense gradients"}
REFUSED_LOCALLY = ("ASGD", "SparseAdam")  # keeps weights in its state, cannot be tried with dense gradients


@functools.cache
def expected(cell, on_grid):
    return one_process(cell, on_grid=on_grid)


def trained(comm, cell, on_grid):
    try:
        return train(comm, cell, on_grid=on_grid)
    except Exception as error:  # noqa: BLE001 -- told to the test, on whose word the ranks live on
        return f"{type(error).__name__}: {error}"


@pytest.mark.pairwise
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", OURS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ours_are_exact_or_refuse(strategy, optimizer, world_size, feature, gloo_ranks):
    cell = Cell(strategy, optimizer, WORLDS.get(strategy, (world_size,))[0], feature)
    on_grid = not rounds_otherwise(cell)
    if strategy == COPY:  # four ranks, for which no processes are started
        by_rank = run_threads(lambda comm: trained(comm, cell, on_grid), cell.world_size)
    else:
        by_rank = gloo_ranks(cell.world_size).run(trained, cell, on_grid)
    if cell.strategy == LOCAL and cell.optimizer in REFUSED_LOCALLY:
        assert all(text.startswith(f"BuildError: optimizer_cls: {optimizer} ") for text in by_rank), by_rank
        return
    if cell.optimizer in REFUSED:
        assert all(REFUSED[cell.optimizer] in text for text in by_rank), by_rank
        # What has no gradients yet may be going to have sparse ones
        built = cell.optimizer == "SparseAdam" and cell.strategy == SHARDED_OPTIMIZER
        kind = "RuntimeError: " if built else "BuildError: optimizer_cls: "
        assert all(text.startswith(kind) for text in by_rank), by_rank
        return
    assert not any(isinstance(states, str) for states in by_rank), by_rank
    found = [difference(states, expected(replace(cell, strategy=by_cast(cell)), on_grid)) for states in by_rank]
    rounding = 1e-3 if strategy == LOCAL and optimizer == "Muon" else 1e-6  # it orthogonalises in bfloat16
    assert max(found) <= (0.0 if on_grid else rounding), found


def rounds_otherwise(cell):
    """Where bits are not asked for: norms are sums too; and a fused kernel rounds the last elements of a piece, which
    do not fill a vector, otherwise than those in the middle of a tensor."""
    fused_on_pieces = OPTIMIZERS[cell.optimizer][1].get("fused") and cell.strategy != SHARDED_OPTIMIZER
    return FEATURES[cell.feature].clip or fused_on_pieces or cell.strategy == LOCAL  # whose mean no order rounds alike


def by_cast(cell):
    """One strategy for all that have the same reference."""
    autocasts = FEATURES[cell.feature].compute_dtype != torch.float32 and cell.strategy in conformance.AUTOCAST
    own = cell.strategy in (WIRE, LOCAL)
    return "ddp" if autocasts else cell.strategy if own else "zero0"


# -- is it a proof? --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in REFUSED])
def test_the_reference_moves_all_that_it_should(optimizer, feature):
    cell = Cell("zero0", optimizer, 3, feature)
    net = Net(cell, on_grid=True)
    (end,) = one_process(cell, on_grid=True)
    still = {name for name, param in net.named_parameters() if name not in end or torch.equal(param, end[name])}
    frozen = {name for name, param in net.named_parameters() if not param.requires_grad}
    assert still == frozen | {name for name in end if "spare" in name}
    assert all(tensor.isfinite().all() for tensor in end.values())


def test_features_are_what_they_say():
    def net(feature):
        return Net(Cell("zero0", "AdamW", 2, feature), on_grid=True)

    tied = net("tied")
    assert tied.first.weight is tied.last.weight
    model = net("one rank")
    model(rows(1, 0, 0), False).backward()
    assert model.sometimes.weight.grad is None
    norms = []
    for step in range(conformance.NUM_STEPS):
        model = net("clipping")
        model(rows(0, step, 0)).backward()
        norms.append(float(torch.nn.utils.get_total_norm(p.grad for p in model.parameters())))
    assert min(norms) > MAX_NORM


def test_gradients_on_the_grid_add_up_alike_in_every_order():
    net = Net(Cell("zero0", "SGD", 3, "plain"), on_grid=True)
    by_rank = []
    for rank in range(3):
        net.zero_grad()
        (10 * net(rows(rank, 0, 0))).backward()  # some reach the end of the grid
        by_rank.append(torch.cat([param.grad.view(-1) for param in net.parameters()]))
    assert all(torch.equal(grad.bfloat16().float(), grad) for grad in by_rank)
    assert max(grad.abs().max() for grad in by_rank) == 255 / 128
    mean = (by_rank[0] + by_rank[1] + by_rank[2]) / 3
    for a, b, c in permutations(by_rank):
        assert torch.equal(((a + b) + c) / 3, mean)
        assert torch.equal((a / 3 + b / 3) + c / 3, mean)
        assert torch.equal((a * (1 / 3) + b * (1 / 3)) + c * (1 / 3), mean)
    ordinary = [grad * 1.1 for grad in by_rank]  # and others do not
    assert not all(torch.equal((a + b) + c, sum(ordinary)) for a, b, c in permutations(ordinary))


@pytest.mark.parametrize("strategy", CONTESTANTS)
@pytest.mark.parametrize("slip", [1e-6, float("nan")])
def test_a_slip_is_seen(strategy, slip, monkeypatch):
    if strategy in ("zero1-torch", "fsdp2"):
        pytest.skip("needs a process group")
    honest = CONTESTANTS[strategy]

    def careless(setup):
        built = honest(setup)

        def after(optimizer, args, kwargs):
            with torch.no_grad():
                optimizer.param_groups[0]["params"][3].mul_(1 + slip)

        built.optimizer.register_step_post_hook(after)
        return built

    cell = Cell(strategy, "AdamW", 1, "plain")
    rounding = 1e-7 if strategy == LOCAL else 0.0  # of the outer optimizer, which torch's SGD adds up otherwise
    assert difference(train(LocalCommunicator(), cell, on_grid=True), one_process(cell, on_grid=True)) <= rounding
    monkeypatch.setitem(CONTESTANTS, strategy, careless)
    if strategy == LOCAL and slip != slip:
        with pytest.raises(ReplicaDivergedError):
            train(LocalCommunicator(), cell, on_grid=True)
        return
    found = difference(train(LocalCommunicator(), cell, on_grid=True), one_process(cell, on_grid=True))
    assert found > 1e-7
    by_step = [
        difference([one], [other])
        for one, other in zip(
            train(LocalCommunicator(), cell, on_grid=True, each_step=True),
            one_process(cell, on_grid=True, each_step=True),
            strict=True,
        )
    ]
    assert len(by_step) == conformance.NUM_STEPS // (MEETINGS.every if strategy == LOCAL else 1)
    assert by_step[0] > max(1e-8, rounding)


def test_the_first_difference_is_what_counts():
    same, near, far = ({"a": torch.tensor([1.0, value])} for value in (2.0, 2.5, 9.0))
    assert difference([same, same], [same, same]) == 0.0
    assert difference([same, near, far], [same, same, same]) == 0.5
    assert difference([{"a": torch.tensor([1.0, float("nan")])}], [same]) == float("inf")


def test_a_refusal_says_why():
    with pytest.raises(BuildError, match="LBFGS cannot be sharded: it calls the closure again"):
        train(LocalCommunicator(), Cell("zero2", "LBFGS", 1, "plain"), on_grid=True)


def test_the_table_is_complete():
    found = cells()
    num_worlds = sum(len(WORLDS.get(strategy, WORLD_SIZES)) for strategy in CONTESTANTS)
    assert len(found) == len(set(found)) == num_worlds * len(OPTIMIZERS) * len(FEATURES)
    shipped = {cls for cls in vars(torch.optim).values() if isinstance(cls, type)} - {torch.optim.Optimizer}
    assert {cls for cls, _ in OPTIMIZERS.values()} == {cls for cls in shipped if issubclass(cls, torch.optim.Optimizer)}
