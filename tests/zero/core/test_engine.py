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
from zeroshard.comm import run_threads
from zeroshard.zero.core.engine import Engine
from zeroshard.zero.core.precision import Precision
from zeroshard.zero.core.strategy import STAGES, ShardingStrategy

ENGINE = Path(zeroshard.zero.__file__).parent
MOST_LINES, MOST_FILES = 1800, 14

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


def test_a_reader_of_zero_reads_fourteen_files_of_eighteen_hundred_lines():
    files = _closure(ENGINE / "core" / "engine.py") | {ENGINE / "core" / "__init__.py"}
    assert {file.parent for file in files} == {ENGINE / "core"}
    assert files == set((ENGINE / "core").glob("*.py")), "a file that the engine does not need"
    counts = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert len(counts) <= MOST_FILES, counts
    assert sum(counts.values()) <= MOST_LINES, f"{counts}: what is not ZeRO itself belongs beside zero/core"


class Net(nn.Module):
    """Tied weights, a frozen one, a saved buffer, biases and norms, and more units than are gathered at once."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[0][0].bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))
        for index, param in enumerate(self.parameters()):  # thread ranks share torch's own generator
            param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.4)

    def forward(self, tokens):
        x = self.tokens(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _loss(net, rank, step):
    tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(net(tokens).flatten(0, 1).float(), tokens.flatten())


def _train(comm, stage, *, precision=None, num_micro=1, state=None, max_norm=0.5):
    net = Net()
    engine = Engine.of(net, stage, net.blocks, comm, precision)
    optim = engine.piece_optimizer(torch.optim.AdamW, lr=0.05)
    if state is not None:
        engine.load_state_dict(state[0])
        optim.load_unsharded_states(state[1])
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for micro in range(num_micro - 1):
            engine.passes.sync = False
            _loss(net, comm.rank, 10 + step * num_micro + micro).backward()
        engine.passes.sync = True
        loss = _loss(net, comm.rank, step)
        loss.backward()
        norms.append(engine.clip_grad_norm_(max_norm).item())
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(_loss(net, 0, 99).item())  # an evaluation
    return losses, norms, engine.state_dict(), optim.unsharded_states()


def _ranks(num_ranks, stage, **settings):
    return run_threads(partial(_train, stage=stage, **settings), num_ranks)


def _same(ours, theirs):
    """Whether two trainings have the same bits, their losses, norms, weights and optimizer states."""
    (losses, norms, weights, states), (other_losses, other_norms, other_weights, other_states) = ours, theirs
    same = losses == other_losses and norms == other_norms and weights.keys() == other_weights.keys()
    same = same and all(torch.equal(weights[name], other_weights[name]) for name in weights)
    kinds = [(name, kind) for name, state in states.items() for kind in state]
    same = same and kinds == [(name, kind) for name, state in other_states.items() for kind in state]
    return same and all(torch.equal(states[name][kind], other_states[name][kind]) for name, kind in kinds)


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("precision", [None, Precision(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
def test_every_stage_trains_with_the_same_bits(precision, num_micro):
    runs = [_ranks(2, stage, precision=precision, num_micro=num_micro) for stage in STAGES]
    for ours, theirs in pairwise(runs):
        assert all(_same(mine, other) for mine, other in zip(ours, theirs, strict=True))
    ranks = runs[0]
    assert ranks[0][1:3:2] == ranks[1][1:3:2]  # norms
    assert ranks[0][0][-1] < ranks[0][0][0]


def _alone(num_ranks):
    """What `_train` computes, by plain PyTorch in one process that sees the rows of all ranks."""
    net, norms = Net(), []
    optim = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        sum(_loss(net, rank, step) / num_ranks for rank in range(num_ranks)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optim.step()
        optim.zero_grad()
    return norms, net.state_dict()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_compute_what_one_process_does(num_ranks):
    expected, weights = _alone(num_ranks)
    _, norms, found, _ = _ranks(num_ranks, 3)[0]
    assert norms == pytest.approx(expected, rel=1e-5)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_what_one_stage_and_world_saves_another_loads():
    saved = _ranks(2, 3)[0][2:]
    loaded = [_ranks(2, stage, state=saved)[0] for stage in (0, 2)]
    assert _same(*loaded)
    more = _ranks(4, 3, state=saved)[0]
    torch.testing.assert_close(more[2]["head.weight"], loaded[0][2]["head.weight"], rtol=0.2, atol=0.2)  # other rows


def test_a_unit_that_one_rank_skips_is_gathered_and_reduced_on_every_rank():
    def go(comm, stage):
        net = Net()
        engine = Engine.of(net, stage, net.blocks, comm)
        optim = engine.piece_optimizer(torch.optim.SGD, lr=0.1)
        for step in range(NUM_STEPS):
            blocks = net.blocks
            net.blocks = blocks[1:] if comm.rank else blocks
            _loss(net, comm.rank, step).backward()
            net.blocks = blocks
            optim.step()
            optim.zero_grad()
        return engine.state_dict()

    first, *others = [state for stage in STAGES for state in run_threads(partial(go, stage=stage), 2)]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_what_needs_more_than_the_core_is_refused():
    net = Net()
    with pytest.raises(ValueError, match="second copy"):
        Engine.of(net, ShardingStrategy("shard", "shard", "shard", secondary_shard_size=2))
    with pytest.raises(ValueError, match="not its submodule"):
        Engine.of(net, 3, [nn.Linear(2, 2)])
    engine = Engine.of(net, 3, net.blocks)
    with pytest.raises(ValueError, match="an engine already"):
        Engine.of(net, 3, net.blocks)
    for params, wrong in (([], "empty list"), ([nn.Parameter(torch.ones(2))], "no parameter of the engine")):
        with pytest.raises(ValueError, match=wrong):
            engine.piece_optimizer(torch.optim.SGD, params, lr=0.1)
