"""State off the device changes no bit: whatever trains, wherever state is, whenever the thread gets its turn."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from nets import Net, rows
from zeroshard.comm import run_threads
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero
from zeroshard.zero.offload import placement
from zeroshard.zero.offload.executor import Executor

NUM_STEPS = 5


class Late(Executor):
    """Runs an update when somebody waits for it, and no sooner: what does not wait sees the state before the step."""

    def _begin(self, jobs):
        self.left = list(jobs)

    def wait(self, update):
        while update.pending:
            self._run(*self.left.pop(0))


class AtOnce(Executor):
    """Runs all updates before ``step()`` returns."""

    def _begin(self, jobs):
        self._walk(jobs)


EXECUTORS = {"late": Late, "at once": AtOnce, "thread": Executor}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
}


class Own(torch.optim.SGD):
    """A class from elsewhere, which counts its steps: it steps once, and at once."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        self.param_groups[0]["lr"] /= self.num_steps
        return super().step(closure)


def same(a, b):
    """Whether two results are equal to the bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        bits = [x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)]
        return torch.equal(*bits) and (a.dtype, a.shape) == (b.dtype, b.shape)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@dataclass(frozen=True)
class Case:
    """A way to train."""

    world_size: int = 2
    stage: int = 2
    optimizer: str = "AdamW"
    bfloat16: bool = False
    accumulation: tuple = (1, None)
    around: str = ""

    def run(self, offload, **kwargs):
        return run_threads(lambda comm: self.on_rank(comm, offload, **kwargs), self.world_size, timeout_s=120)

    def on_rank(self, comm, offload):
        net = Net(3)
        num_micro, accumulate = self.accumulation
        dtypes = (torch.bfloat16, torch.bfloat16) if self.bfloat16 else ()
        zero = Zero(
            net,
            self.stage,
            units=list(net.blocks),
            comm=comm,
            precision=MixedPrecision(*dtypes),
            accumulate=accumulate,
            offload=offload,
        )
        cls, settings = OPTIMIZERS[self.optimizer]
        optim = zero.optimizer(cls, lr=1e-2, **settings)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.7)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        found = []
        for step in range(NUM_STEPS):
            for micro in range(num_micro):
                with zero.micro_batch(last=micro == num_micro - 1):
                    loss = net(rows(comm.rank, 10 * step + micro)).float().square().mean()
                    if self.around == "overflow" and step == 2:
                        loss = loss * float("inf")
                    (scaler.scale(loss) if self.around == "overflow" else loss).backward()
                found.append(loss.detach())
            if self.around == "overflow":
                scaler.unscale_(optim)
            if self.around == "torch's clips":
                torch.nn.utils.clip_grad_value_(net.parameters(), 0.1)
                found.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05).detach())
            else:
                found.append(zero.clip_grad_norm_(0.05))
            if self.around == "reads":
                found += [zero.full_grads(), zero.clip_grad_norm_(0.04, 1.0), zero.clip_grad_norm_(10.0)]
            if self.around == "overflow":
                scaler.step(optim)
                scaler.update()
            else:
                optim.step()
            schedule.step()
            if self.around == "zeros":
                optim.zero_grad(set_to_none=False)
            elif self.around != "keeps" or step % 2:
                optim.zero_grad()
            if self.around == "looks":
                found += self.look(net, zero, optim, comm, step)
            if self.around == "restage":
                optim.zero_grad()
                zero.restage((self.stage + step) % 4)
        return found, zero.state_dict(), zero.optim_state_dict(optim)

    @staticmethod
    def look(net, zero, optim, comm, step):
        """What a user may read or write between two steps; each finds the step complete."""
        kind = ("evaluation", "writes", "loads", "state", "gradients")[step % 5]
        if kind == "evaluation":
            with torch.no_grad():
                return [net(rows(comm.rank))]
        if kind == "writes":
            with zero.full_params(write_back=True), torch.no_grad():
                for param in net.parameters():
                    param.mul_(0.5)
            return [zero.state_dict()]
        if kind == "loads":
            zero.load_state_dict({name: value * 1.5 for name, value in zero.state_dict().items()})
            optim.load_state_dict(zero.optim_state_dict())
            return []
        if kind == "state":
            states = [optim.state[piece] for piece in zero.pieces(optim) if piece in optim.state]
            states = [{kind: torch.as_tensor(value).clone() for kind, value in state.items()} for state in states]
            return [len(optim.state), states, [piece.detach().clone() for piece in zero.pieces(optim)]]
        return [[(s.name, s.kind, s.tensor.clone()) for s in zero.named_shards()]]


ACCUMULATIONS = [(1, None), (2, "local"), (2, "sharded")]
AROUND = ["", "overflow", "torch's clips", "reads", "zeros", "keeps", "looks", "restage"]
PLACES = {
    "all": Offload(fraction=1.0),
    "half": Offload(fraction=0.5),
    "grads stay": Offload(grads="device"),
    "weights too": Offload(weights="host"),
}
_plain = {}


@pytest.mark.pairwise
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS, ids=str)
@pytest.mark.parametrize("bfloat16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_bits_are_those_without_offloading(
    world_size, stage, optimizer, bfloat16, accumulation, around, place, executor, monkeypatch
):
    case = Case(world_size, stage, optimizer, bfloat16, accumulation, around)
    offload = PLACES[place]
    if offload.weights == "host" and (stage < 3 or around == "restage"):
        offload = PLACES["all"]
    if case not in _plain:
        _plain[case] = case.run(None)
    monkeypatch.setattr(placement, "Executor", EXECUTORS[executor])
    for expected, found in zip(_plain[case], case.run(offload), strict=True):
        assert same(expected, found)
