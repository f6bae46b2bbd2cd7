"""ZeRO by `zero/core` alone: what it needs, and that it trains.

`test_pull_out.py` runs this folder in a package that has nothing else of `zero/`.
"""

import ast
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard.zero
from exactness import same_bits
from zero.core.core_states import load_unsharded_states, unsharded_states
from zero.core.plain import PlainOptimizer, plain_engine
from zeroshard.comm import CONTROL, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.zero.core.precision import Precision
from zeroshard.zero.core.strategy import STAGES

ENGINE = Path(zeroshard.zero.__file__).parent
MOST_LINES, MOST_FILES = 3220, 17

NUM_STEPS = 3


def _imported(path):
    """The modules of `zeroshard.zero` that a file imports, for types alone too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            first, _, rest = name.partition("zeroshard.zero.")
            found = ENGINE.joinpath(*rest.split(".")).with_suffix(".py") if rest and not first else None
            if found is not None and found.is_file():
                yield found


def _closure(path):
    found, left = {path}, [path]
    while left:
        new = set(_imported(left.pop())) - found
        found |= new
        left += new
    return found


def test_a_reader_of_zero_reads_few_files_of_few_lines():
    core = ENGINE / "core"
    files = _closure(core / "engine.py") | _closure(core / "optimizer.py") | {core / "__init__.py"}
    assert {file.parent for file in files} == {ENGINE / "core"}
    assert files == set((ENGINE / "core").glob("*.py")), "a file that the engine does not need"
    counts = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert len(counts) <= MOST_FILES, counts
    assert sum(counts.values()) <= MOST_LINES, f"{counts}: what is not ZeRO itself belongs beside zero/core"


class Net(nn.Module):
    """Tied weights, a frozen one, an unused one, a saved buffer, biases, and more units than are gathered at once."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[0][0].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.tensor(2.0))
        for index, param in enumerate(self.parameters()):  # thread ranks share torch's own generator
            param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.4)

    def forward(self, tokens, order=range(4)):
        x = self.tokens(tokens) * self.scale
        for place in order:
            x = x + self.blocks[place](x)
        return self.head(x)


def _loss(net, rank, step, **kwargs):
    tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(net(tokens, **kwargs).flatten(0, 1).float(), tokens.flatten())


def _groups(net):
    """Matrices, and what is none, with a rate of its own."""
    params = list(net.parameters())
    return [{"params": [p for p in params if p.dim() < 2], "lr": 0.02}, {"params": [p for p in params if p.dim() > 1]}]


def _train(comm, stage, *, precision=None, num_micro=1, state=None, alike=False):
    """``state``: of a training that this one goes on from; ``alike``: each rank has the rows of rank 0."""
    net, rank, first = Net(), 0 if alike else comm.rank, 0 if state is None else NUM_STEPS
    engine = plain_engine(net, stage, net.blocks, comm, precision)
    optim = PlainOptimizer(engine, torch.optim.AdamW, _groups(net), lr=0.05)
    if state is not None:
        engine.load_state_dict(state[0])
        load_unsharded_states(optim, state[1])
    losses, norms = [], []
    for step in range(first, first + NUM_STEPS):
        for micro in range(num_micro - 1):
            engine.passes.sync = False
            _loss(net, rank, 10 + step * num_micro + micro).backward()
        engine.passes.sync = True
        loss = _loss(net, rank, step)
        loss.backward()
        norms.append(engine.clip_grad_norm_(0.5).item())
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(_loss(net, 0, 99).item())  # an evaluation
    return losses, norms, engine.state_dict(), unsharded_states(optim)


def _ranks(num_ranks, stage, **settings):
    return run_threads(partial(_train, stage=stage, **settings), num_ranks)


@pytest.mark.redundant
@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("precision", [None, Precision(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
def test_every_stage_trains_with_the_same_bits(precision, num_micro):
    runs = [_ranks(2, stage, precision=precision, num_micro=num_micro) for stage in STAGES]
    for ours, theirs in pairwise(runs):
        assert all(same_bits(mine, other) for mine, other in zip(ours, theirs, strict=True))
    ranks = runs[0]
    assert ranks[0][1:3:2] == ranks[1][1:3:2]  # norms
    assert ranks[0][0][-1] < ranks[0][0][0]


def _alone(num_ranks, num_steps=NUM_STEPS):
    """Norms, weights and states of `_train`, by plain PyTorch in one process that sees the rows of all ranks."""
    net, norms = Net(), []
    optim = torch.optim.AdamW(_groups(net), lr=0.05)
    for step in range(num_steps):
        sum(_loss(net, rank, step) / num_ranks for rank in range(num_ranks)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optim.step()
        optim.zero_grad()
    return norms, net.state_dict(), {name: optim.state[p] for name, p in net.named_parameters() if p in optim.state}


def _assert_computed(found, expected):
    _, norms, weights, states = found
    assert norms == pytest.approx(expected[0][-NUM_STEPS:], rel=1e-4)
    torch.testing.assert_close(dict(weights), dict(expected[1]), rtol=1e-4, atol=1e-5)
    assert {name for name, state in states.items() if state} == expected[2].keys()
    for name, state in expected[2].items():
        flat = {kind: value if kind == "step" else value.view(-1) for kind, value in state.items()}
        torch.testing.assert_close(states[name], flat, rtol=1e-4, atol=1e-7)


@pytest.mark.redundant(but=["1"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_compute_what_one_process_does(num_ranks):
    _assert_computed(_ranks(num_ranks, 3)[0], _alone(num_ranks))


@pytest.mark.redundant
def test_what_one_stage_and_world_saves_another_loads():
    saved = _ranks(3, 3, alike=True)[0][2:]
    loaded = [_ranks(2, stage, state=saved, alike=True)[0] for stage in STAGES]
    assert all(same_bits(*pair) for pair in pairwise(loaded))
    for found in (loaded[0], _ranks(4, 3, state=saved, alike=True)[3]):
        _assert_computed(found, _alone(1, 2 * NUM_STEPS))


def skips(net, rank, step):
    _loss(net, rank, step, order=range(rank, 4)).backward()


def calls_again(net, rank, step):
    """A unit twice, and all of them in an evaluation before the backward."""
    loss = _loss(net, rank, step, order=(0, 1, 0, 2, 3))
    with torch.no_grad():
        _loss(net, rank, step)
    loss.backward()


@pytest.mark.redundant
@pytest.mark.parametrize("take_turn", [skips, calls_again])
def test_a_rank_may_skip_a_unit_or_call_it_again(take_turn):
    def go(comm, stage):
        net = Net()
        engine = plain_engine(net, stage, net.blocks, comm)
        optim = PlainOptimizer(engine, torch.optim.SGD, lr=0.1)
        for step in range(NUM_STEPS):
            take_turn(net, comm.rank, step)
            assert all(param.grad is None for param in net.parameters())
            optim.step()
            optim.zero_grad()
        return engine.state_dict()

    first, *others = [state for stage in STAGES for state in run_threads(partial(go, stage=stage), 2)]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    net = Net()
    for step in range(NUM_STEPS):
        for rank in range(2):
            take_turn(net, rank, step)
        torch.optim.SGD(net.parameters(), lr=0.05).step()  # half the rate for the sum of two
        net.zero_grad()
    torch.testing.assert_close(dict(first), dict(net.state_dict()), rtol=0, atol=1e-5)


def _at_rest(stage):
    observed = ObservedCommunicator(NullCommunicator(2))
    net = Net()
    engine = plain_engine(net, stage, net.blocks, observed)
    return observed, net, engine, PlainOptimizer(engine, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_backwards_that_do_not_reduce_send_no_gradients_and_are_no_step(stage):
    observed, net, engine, optim = _at_rest(stage)
    engine.passes.sync = False
    _loss(net, 0, 0).backward()
    observed.drain()
    _loss(net, 0, 1).backward()
    sent = {record.op for record in observed.drain() if record.label != CONTROL}
    assert sent == ({"all_gather"} if stage == 3 else set())
    with pytest.raises(RuntimeError, match="never reduced"):
        optim.step()
    optim.zero_grad()
    optim.step()  # nothing waits any more


def test_a_step_leaves_weights_stale_and_graphs_from_before_it_useless():
    _, net, engine, optim = _at_rest(2)
    loss, version = net.head.weight.square().sum(), net.unused._version
    _loss(net, 0, 0).backward()
    optim.step()
    optim.zero_grad()
    assert not engine.passes.root.groups[0].params.state.readable
    assert not any(any(group.grads.used) for group in engine.passes.groups())
    assert all(piece.grad is None for group in engine.passes.groups() for piece in group.shards)
    assert net.unused._version == version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("number", "wrong"), [(0, "empty list"), (1, "no parameter of the engine")])
def test_an_optimizer_has_parameters_of_the_engine(number, wrong):
    _, _, engine, _ = _at_rest(3)
    with pytest.raises(ValueError, match=wrong):
        PlainOptimizer(engine, torch.optim.SGD, [nn.Parameter(torch.ones(2)) for _ in range(number)], lr=0.1)
