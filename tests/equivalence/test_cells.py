"""Every cell of the table (strategy x optimizer x world size x feature) that is ours: exact, or refused by name.

On thread ranks each strategy takes half of the optimizers and half of the features, other ones than another strategy
of its stage, and each feature comes over some transport between processes; with ``--soak`` all of them. torch's
strategies train every feature with AdamW; `benchmarks/claims/conformance.py` shows what
they make of the other optimizers.
"""

import functools
import itertools
from dataclasses import astuple, replace

import pytest
import torch

from equivalence import cells as table
from equivalence.cells import (
    CONTESTANTS,
    ENGINE,
    FEATURES,
    MAX_NORM,
    NUM_EXPERTS,
    NUM_STEPS,
    OPTIMIZERS,
    SHARDED_OPTIMIZER,
    THEIRS,
    TRANSPORTS,
    WORLD_SIZES,
    Brief,
    BuildError,
    Cell,
    Net,
    cells,
    difference,
    one_process,
    rows,
    train,
    trained,
)
from equivalence.remedies import EVERY_SECOND, LOCAL, WIRE
from soak import soaking
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero import ReplicaDivergedError

REFUSED = {"LBFGS": "calls the closure again", "SparseAdam": "does not support dense gradients"}
BEGINS_LATE = {"RAdam", "ASGD", "reordered", "thawing", "joining", LOCAL}  # what needs all steps of a cell
REFUSED_LOCALLY = ("ASGD", "SparseAdam")  # keeps weights in its state, cannot be tried with dense gradients


def cell_of(strategy, optimizer, world_size, feature):
    late = soaking() or not BEGINS_LATE.isdisjoint((strategy, optimizer, feature))
    return (Cell if late else Brief)(strategy, optimizer, world_size, feature)


@functools.cache
def expected(cell, on_grid):
    return one_process(cell, on_grid=on_grid)


def check(cell, run):
    """``run(cell, on_grid)``: what each rank has, or the words of what it raised."""
    on_grid = not rounds_otherwise(cell)
    by_rank = run(cell, on_grid)
    if cell.strategy == LOCAL and cell.optimizer in REFUSED_LOCALLY:
        assert all(text.startswith(f"BuildError: optimizer_cls: {cell.optimizer} ") for text in by_rank), by_rank
        return
    if cell.optimizer in REFUSED:
        assert all(REFUSED[cell.optimizer] in text for text in by_rank), by_rank
        # What has no gradients yet may be going to have sparse ones
        built = cell.optimizer == "SparseAdam" and cell.strategy == SHARDED_OPTIMIZER
        kind = "RuntimeError: " if built else f"BuildError: optimizer_cls: {cell.optimizer} "
        assert all(text.startswith(kind) for text in by_rank), by_rank
        return
    assert not any(isinstance(states, str) for states in by_rank), by_rank
    found = [difference(states, expected(replace(cell, strategy=by_cast(cell)), on_grid)) for states in by_rank]
    rounding = 1e-3 if cell.strategy == LOCAL and cell.optimizer == "Muon" else 1e-6  # it orthogonalises in bfloat16
    assert max(found) <= (0.0 if on_grid else rounding), found


def rounds_otherwise(cell):
    """Where bits are not asked for: norms are sums too; and a fused kernel rounds the last elements of a piece, which
    do not fill a vector, otherwise than those in the middle of a tensor."""
    fused_on_pieces = OPTIMIZERS[cell.optimizer][1].get("fused") and cell.strategy != SHARDED_OPTIMIZER
    return FEATURES[cell.feature].clip or fused_on_pieces or cell.strategy == LOCAL  # whose mean no order rounds alike


def by_cast(cell):
    """One strategy for all that have the same reference."""
    autocasts = FEATURES[cell.feature].compute_dtype != torch.float32 and cell.strategy in table.AUTOCAST
    own = cell.strategy in (WIRE, LOCAL)
    return "ddp" if autocasts else cell.strategy if own else "zero0"


ODD = {"zero0", "zero1", "zero2", "zero3, groups", "zero3, kept weights"}  # others of each stage are not among them


def _on_threads():
    """The cells of the engine; with ``--soak`` alone those whose values are not all odd, or all even, in their lists.

    A form of a model has two optimizers alone, so of these cells the optimizer's place does not count.
    """
    for cell in cells(ENGINE):
        places = {int(cell.strategy in ODD), list(FEATURES).index(cell.feature) % 2}
        if not FEATURES[cell.feature].form:
            places.add(list(OPTIMIZERS).index(cell.optimizer) % 2)
        yield pytest.param(*astuple(cell), marks=[pytest.mark.soak] if len(places) > 1 else [])


@pytest.mark.pairwise
@pytest.mark.parametrize(("strategy", "optimizer", "world_size", "feature"), list(_on_threads()))
def test_the_engine_is_exact_or_refuses(strategy, optimizer, world_size, feature):
    """`check` asserts it."""
    cell = cell_of(strategy, optimizer, world_size, feature)
    check(cell, lambda *args: run_threads(lambda comm: trained(comm, *args), world_size))


def _among_processes():
    """Each feature over a transport at some strategy, the others with ``--soak``; the sharded optimizer; theirs."""
    strategies, with_adamw = itertools.cycle(ENGINE), [cell for cell in cells(ENGINE) if cell.optimizer == "AdamW"]
    for feature, its_transport in zip(FEATURES, itertools.cycle(("gloo", *TRANSPORTS)), strict=False):
        named = next(strategies)
        for transport, cell in itertools.product(("gloo", *TRANSPORTS), with_adamw):
            if cell.feature == feature:
                at = (cell.strategy, cell.world_size % 2, transport)
                soak = [] if at == (named, 0, its_transport) else [pytest.mark.soak]
                yield pytest.param(transport, *astuple(cell), marks=soak)
    features, sharded = itertools.cycle(FEATURES), cells([SHARDED_OPTIMIZER])
    for optimizer in OPTIMIZERS:
        named = next(features)
        for cell in sharded:
            if cell.optimizer == optimizer:
                soak = [] if (cell.feature, cell.world_size) == (named, 3) else [pytest.mark.soak]
                yield pytest.param("gloo", *astuple(cell), marks=soak)
    for cell in cells(THEIRS):
        needs_all_ranks = cell.strategy.startswith("fsdp2") and cell.feature in ("one rank", "experts")
        if cell.optimizer == "AdamW" and not needs_all_ranks:
            place = list(FEATURES).index(cell.feature)
            named = (WORLD_SIZES[place // 2 % len(WORLD_SIZES)], place % 2)
            soak = [] if (cell.world_size, THEIRS.index(cell.strategy) % 2) == named else [pytest.mark.soak]
            yield pytest.param("gloo", *astuple(cell), marks=soak)


@pytest.mark.redundant(but=["gloo-zero1-torch-AdamW-2-bf16"])
@pytest.mark.parametrize(("transport", "strategy", "optimizer", "world_size", "feature"), list(_among_processes()))
def test_processes_are_exact_or_refuse(transport, strategy, optimizer, world_size, feature, gloo_ranks):
    """`check` asserts it."""
    ranks = gloo_ranks(world_size)
    check(cell_of(strategy, optimizer, world_size, feature), lambda *args: ranks.run(trained, *args, transport))


# -- is it a proof? --------------------------------------------------------------------------------------------------


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("optimizer", "feature"),
    [("AdamW", feature) for feature in FEATURES] + [(name, "plain") for name in OPTIMIZERS if name not in REFUSED],
)
def test_the_reference_moves_all_that_it_should(optimizer, feature):
    cell = Cell("zero0", optimizer, 3, feature)
    net = Net(cell, on_grid=True)
    (end,) = one_process(cell, on_grid=True)
    still = {name for name, param in net.named_parameters() if name not in end or torch.equal(param, end[name])}
    frozen = {name for name, param in net.named_parameters() if not param.requires_grad}
    idle = {"unused": "spare", "experts": f"experts.{NUM_EXPERTS - 1}"}.get(feature)
    unused = {name for name in end if idle is not None and idle in name}
    assert still == frozen | unused | {name for name in end if "nothing" in name}
    assert all(tensor.isfinite().all() for tensor in end.values())
    if FEATURES[feature].form:  # and otherwise than without the feature, which so has been there
        plain = one_process(replace(cell, feature="plain"), on_grid=True)[0]
        same = all(torch.equal(end[name], value) for name, value in plain.items() if name in end)
        assert same == (feature in ("recomputed", "structures", "interrupted"))


def test_clipping_is_of_every_norm():
    for step in range(NUM_STEPS):
        model = Net(Cell("zero0", "AdamW", 2, "clipping"), on_grid=True)
        model(rows(1, step, 0)).backward()
        assert torch.nn.utils.get_total_norm(p.grad for p in model.parameters()) > MAX_NORM


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
    for a, b, c in itertools.permutations(by_rank):
        assert torch.equal(((a + b) + c) / 3, mean)
        assert torch.equal((a / 3 + b / 3) + c / 3, mean)
        assert torch.equal((a * (1 / 3) + b * (1 / 3)) + c * (1 / 3), mean)
    ordinary = [grad * 1.1 for grad in by_rank]  # and others do not
    assert not all(torch.equal((a + b) + c, sum(ordinary)) for a, b, c in itertools.permutations(ordinary))


@pytest.mark.redundant
@pytest.mark.parametrize("strategy", ["zero0", "zero3", LOCAL, SHARDED_OPTIMIZER, "ddp"])
@pytest.mark.parametrize("slip", [1e-6, float("nan")])
def test_a_slip_is_seen(strategy, slip, monkeypatch):
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
    by_step = [
        difference([one], [other])
        for one, other in zip(
            train(LocalCommunicator(), cell, on_grid=True, each_step=True),
            one_process(cell, on_grid=True, each_step=True),
            strict=True,
        )
    ]
    assert len(by_step) == NUM_STEPS // (EVERY_SECOND.every if strategy == LOCAL else 1)
    assert by_step[-1] > 1e-7
    assert by_step[0] > max(1e-8, rounding)


def test_the_first_difference_is_what_counts():
    same, near, far = ({"a": torch.tensor([1.0, value])} for value in (2.0, 2.5, 9.0))
    assert difference([same, same], [same, same]) == 0.0
    assert difference([same, near, far], [same, same, same]) == 0.5
    assert difference([{"a": torch.tensor([1.0, float("nan")])}], [same]) == float("inf")


def test_a_refusal_says_why_and_the_table_has_every_optimizer_of_torch():
    with pytest.raises(BuildError, match="LBFGS cannot be sharded: it calls the closure again"):
        train(LocalCommunicator(), Cell("zero2", "LBFGS", 1, "plain"), on_grid=True)
    shipped = {cls for cls in vars(torch.optim).values() if isinstance(cls, type)} - {torch.optim.Optimizer}
    assert {cls for cls, _ in OPTIMIZERS.values()} == {cls for cls in shipped if issubclass(cls, torch.optim.Optimizer)}
