"""8-bit optimizers of bitsandbytes and torchao: whole tensors, so their blocks are those of one process; or a line."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zeroshard
from zeroshard.comm import run_threads
from zeroshard.zero import Zero

NUM_STEPS, BLOCK = 4, 256
NET = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64), nn.Linear(64, 4))


class Momentum8bit(Optimizer):
    """State as of bitsandbytes' classes: codes, a map, a scale for each block; small tensors have none."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"], state["qmap1"] = 0, torch.linspace(-1, 1, 256)
                    state["state1"] = torch.full_like(p, 128, dtype=torch.uint8)
                    state["absmax1"] = torch.zeros(-(-p.numel() // BLOCK))
                    if p.numel() < 4096:
                        state["state1"] = torch.zeros_like(p)
                state["step"] += 1
                if p.numel() < 4096:
                    p -= group["lr"] * state["state1"].mul_(0.9).add_(p.grad)
                    continue
                scales = state["absmax1"].repeat_interleave(BLOCK)[: p.numel()].view_as(p)
                m = state["qmap1"][state["state1"].long()] * scales * 0.9 + p.grad
                blocks = nn.functional.pad(m.reshape(-1), (0, -p.numel() % BLOCK)).view(-1, BLOCK)
                state["absmax1"].copy_(blocks.abs().amax(1))
                codes = (blocks / state["absmax1"].clamp_min(1e-30)[:, None] * 127.5 + 127.5).round()
                state["state1"].copy_(codes.view(-1)[: p.numel()].view_as(p))
                p -= group["lr"] * m


def backward(net, step, rank):
    (net(torch.full((4, 64), 0.1) * (step + 1) + 0.1 * rank) - 1).square().mean().backward()


def one_process(cls):
    net = copy.deepcopy(NET)
    optimizer = cls(net.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        for rank in range(2):
            backward(net, step, rank)
        for param in net.parameters():
            param.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def engine(comm, stage, cls):
    net = copy.deepcopy(NET)
    zero = Zero(net, stage, [net[0], net[2]], comm)
    return zero, zero.optimizer(cls, lr=0.01)


def train(zero, optimizer, steps):
    for step in steps:
        backward(zero.model, step, zero.comm.rank)
        optimizer.step()
        optimizer.zero_grad()


def check(cls, folder):
    expected = one_process(cls)

    def go(comm, stage):
        zero, optimizer = engine(comm, stage, cls)
        train(zero, optimizer, range(NUM_STEPS))
        return zero.state_dict()

    for stage in range(4):
        (found, _) = run_threads(lambda comm, stage=stage: go(comm, stage), 2)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), stage

    def saved_and_resumed(comm):
        zero, optimizer = engine(comm, 3, cls)
        train(zero, optimizer, range(2))
        zeroshard.save(folder, zero, step=2)
        zero, optimizer = engine(comm, 1, cls)
        zeroshard.load(folder, zero)
        train(zero, optimizer, range(2, NUM_STEPS))
        return zero.state_dict()

    def restaged_and_from_a_state_dict(comm):
        zero, optimizer = engine(comm, 2, cls)
        train(zero, optimizer, range(1))
        zero.restage(0)
        train(zero, optimizer, range(1, 2))
        states, weights = zero.optim_state_dict(), zero.state_dict()
        zero, optimizer = engine(comm, 3, cls)
        zero.load_state_dict(weights)
        optimizer.load_state_dict(states)
        train(zero, optimizer, range(2, NUM_STEPS))
        return zero.state_dict()

    for go in (saved_and_resumed, restaged_and_from_a_state_dict):
        found = run_threads(go, 2)[0]
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_blocks_are_those_of_whole_tensors_at_each_stage_and_after_a_checkpoint(tmp_path):
    """`check` asserts it."""
    check(Momentum8bit, tmp_path / "saved")


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "PagedAdamW8bit", "AdamW"])
def test_bitsandbytes(name, tmp_path):
    """`check` asserts it."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    check(getattr(bitsandbytes.optim, name), tmp_path / "saved")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["AdamW8bit", *(pytest.param(name, marks=pytest.mark.soak) for name in ("AdamW4bit", "AdamWFp8"))]
)
def test_torchao(name, tmp_path):
    """`check` asserts it."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    with torch.compiler.set_stance("force_eager"):  # it compiles its step, for each shape
        check(getattr(optim, name), tmp_path / "saved")
