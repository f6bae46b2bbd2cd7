"""States under keys that are no parameter, and in lists, dicts and sets: trained, sent, cut and saved as any other."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zeroshard
from zeroshard.comm import run_threads
from zeroshard.zero import Offload, Zero
from zeroshard.zero.sharded_optimizer.optimizer import ShardedOptimizer

NUM_STEPS, MIDDLE = 6, 3
torch.manual_seed(0)
FIRST = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Keeps(Optimizer):
    """Its update follows all that it keeps, as MADGRAD, SPAM, heavyball's classes and Kron keep it."""

    zero_reach = "element-wise"

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.state["k"] = torch.tensor([0])
        self.done = 0

    def state_dict(self):
        return {**super().state_dict(), "done": self.done}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.done = state_dict["done"]

    @torch.no_grad()
    def step(self, closure=None):
        common = self.state.setdefault("common", {"rate": 1.0, "steps": 0, ("any", 1): "key"})
        for group in self.param_groups:
            group.update(count=group.get("count", 0) + 1, slower=group.get("slower", torch.tensor([1.0])) * 0.95)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    inner = {"buffer": torch.zeros_like(p), "seen": set(), "none": None}
                    self.state[p]["ema"] = torch.zeros_like(p)  # what a checkpoint calls an average of weights
                    self.state[p].update({0: inner, "n": 0, "both": [torch.zeros_like(p), ("a", 0.5, torch.float32)]})
                state = self.state[p]
                state["n"] += 1
                state["ema"].lerp_(p.grad, 0.5)
                state[0]["buffer"].mul_(0.9).add_(p.grad)
                state[0]["seen"].add(int(state["n"]))  # `consolidate` returns numbers as tensors
                state["both"][0].add_(state[0]["buffer"], alpha=state["both"][1][1])
                assert state[0]["none"] is None
                assert state["both"][1][2] is torch.float32
                factor = len(state[0]["seen"]) * common["rate"] * float(self.state["k"] + 1)
                p.sub_(
                    state["both"][0] + 0.1 * state["ema"] * (1 + self.done),
                    alpha=group["lr"] * factor * float(group["slower"]) / group["count"],
                )
        self.state[self.param_groups[0]["params"][0]]["first"] = 1
        common.update(rate=common["rate"] * 0.9, steps=common["steps"] + 1)
        self.state["k"] += 1
        self.done += 1


class KeepsWhole(Keeps):
    zero_reach = "per-tensor"


def backward(model, step, rank):
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    (model(rows.chunk(2)[rank]) - 1).square().mean().backward()


def train(model, optimizer, steps, ranks=(0, 1)):
    for step in steps:
        for rank in ranks:
            backward(model, step, rank)
        for param in model.parameters() if len(ranks) > 1 else ():
            param.grad /= len(ranks)
        optimizer.step()
        optimizer.zero_grad()


def one_process(cls, steps=range(NUM_STEPS), states=None, weights=None):
    model = copy.deepcopy(FIRST)
    model.load_state_dict(weights or model.state_dict())
    optimizer = cls(model.parameters())
    if states is not None:
        optimizer.load_state_dict(copy.deepcopy(states))  # torch takes over what belongs to no parameter
    train(model, optimizer, steps)
    return model.state_dict()


def engine(comm, stage, cls, **settings):
    zero = Zero(copy.deepcopy(FIRST), stage, [], comm, **settings)
    return zero, zero.optimizer(cls)


def check(found, cls):
    for name, value in one_process(cls).items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def later(zero, optimizer, begin=MIDDLE):
    train(zero.model, optimizer, range(begin, NUM_STEPS), [zero.comm.rank])
    return zero.state_dict()


@pytest.fixture(params=[Keeps, KeepsWhole])
def cls(request):
    return request.param


def by_numbers(states, model):
    """A state by names, as `consolidate` returns it, in the form of torch."""
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in states["param_groups"]]
    return {
        "state": {numbers.get(key, key): state for key, state in states["state"].items()},
        "param_groups": groups,
        "done": states["done"],
    }


@pytest.mark.redundant(but=["Keeps-3"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_trains_is_saved_restaged_and_unsharded_as_in_one_process(stage, cls, tmp_path):
    def rank_main(comm):
        zero, optimizer = engine(comm, stage, cls)
        train(zero.model, optimizer, range(MIDDLE), [comm.rank])
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": torch.Generator()})  # of users alone
        zeroshard.save(tmp_path / "saved", zero, step=MIDDLE)
        states, weights = zero.optim_state_dict(), zero.state_dict()
        assert zero.memory_bytes()["optimizer"] >= 2 * sum(piece.nbytes for piece in zero.pieces())
        zero.restage(3 - stage)
        found = [later(zero, optimizer)]
        zero, optimizer = engine(comm, (stage + 2) % 4, cls)
        zeroshard.load(tmp_path / "saved", zero)
        found.append(later(zero, optimizer))
        zero, optimizer = engine(comm, (stage + 1) % 4, cls)
        zero.load_state_dict(weights)
        optimizer.load_state_dict(states)
        return [*found, later(zero, optimizer), one_process(cls, range(MIDDLE, NUM_STEPS), states, weights)]

    for found in run_threads(rank_main, 2)[0]:
        check(found, cls)
    saved = zeroshard.consolidate(tmp_path / "saved")
    assert saved["optimizer"]["state"]["common"] == {"rate": pytest.approx(0.9**3), "steps": 3, ("any", 1): "key"}
    states = by_numbers(saved["optimizer"], FIRST)
    check(one_process(cls, range(MIDDLE, NUM_STEPS), states, saved["model"]), cls)


@pytest.mark.redundant
def test_an_optimizer_made_by_hand_and_a_state_by_names_are_taken_over(tmp_path):
    def rank_main(comm):
        model = copy.deepcopy(FIRST)
        optimizer = Keeps(model.parameters())
        train(model, optimizer, range(MIDDLE))
        zero = Zero(model, 2, [], comm)
        found = later(zero, optimizer)
        zeroshard.save(tmp_path / "saved", zero, step=NUM_STEPS)
        return found

    check(run_threads(rank_main, 2)[0], Keeps)
    states = zeroshard.consolidate(tmp_path / "saved")["optimizer"]

    def from_names(comm):
        zero, optimizer = engine(comm, 3, Keeps)
        optimizer.load_state_dict(states)
        return zero.optim_state_dict()["state"]

    found = run_threads(from_names, 2)[0]
    assert (found["k"], found["common"]["steps"], found[0]["n"]) == (NUM_STEPS, NUM_STEPS, NUM_STEPS)


def test_a_sharded_optimizer_keeps_it_too():
    """`check` asserts it."""

    def made(comm):
        model = copy.deepcopy(FIRST)
        return model, ShardedOptimizer(model.parameters(), KeepsWhole, comm=comm)

    def rank_main(comm):
        model, optimizer = made(comm)
        train(model, optimizer, range(MIDDLE))
        for rank in range(2):
            optimizer.consolidate_state_dict(rank)
            if rank == comm.rank:
                states = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(MIDDLE, NUM_STEPS))
        found = [model.state_dict(), one_process(KeepsWhole, range(MIDDLE, NUM_STEPS), states, weights)]
        model, optimizer = made(comm)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        train(model, optimizer, range(MIDDLE, NUM_STEPS))
        return [*found, model.state_dict()]

    for found in run_threads(rank_main, 2)[1]:
        check(found, KeepsWhole)


@pytest.mark.redundant
@pytest.mark.parametrize("place", ["host", "disk"])
def test_states_off_the_device_are_saved_and_resumed(place, cls, tmp_path):
    """`check` asserts it."""

    def offload(folder):
        return Offload(place, path=tmp_path / folder if place == "disk" else None)

    def rank_main(comm):
        zero, optimizer = engine(comm, 2, cls, offload=offload("first"))
        train(zero.model, optimizer, range(MIDDLE), [comm.rank])
        zeroshard.save(tmp_path / "saved", zero, step=MIDDLE)
        found = [later(zero, optimizer)]
        zero, optimizer = engine(comm, 3, cls, offload=offload("second"))
        zeroshard.load(tmp_path / "saved", zero)
        return [*found, later(zero, optimizer)]

    for found in run_threads(rank_main, 2)[0]:
        check(found, cls)
