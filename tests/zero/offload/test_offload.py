"""State off the device changes no bit: whatever trains, wherever state is, whenever the thread gets its turn."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from nets import WIDTH, Net, muon_and_adamw, rows, set_values
from soak import soaking
from zero.offload.executors import EXECUTORS, AtOnce, Late
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero
from zeroshard.zero.offload import host_params, placement
from zeroshard.zero.offload.executor import Executor
from zeroshard.zero.optimizers.operands import WidenedGrads

NUM_STEPS = 5


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
        for step in range(NUM_STEPS if self.around in ("overflow", "looks", "keeps", "restage") else 3):
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
    "disk": Offload("disk", "disk", path="offload"),
    "states on disk": Offload("disk", "host", fraction=0.6, path="offload"),
    "all on disk": Offload("disk", "disk", "disk", "disk", path="offload"),
    "grads on disk": Offload(grads="disk", fraction=0.5, path="offload"),
}
_plain = {}


@pytest.mark.redundant(
    but=[
        "1-0-AdamW-fp32-(1, None)--all-late",
        "1-0-AdamW-bf16-(2, 'sharded')-reads-states on disk-at once",
        "1-0-Adam-bf16-(2, 'local')-zeros-weights too-late",
        "1-0-fused-fp32-(1, None)-torch's clips-grads stay-at once",
        "1-2-AdamW-fp32-(2, 'local')-looks-all on disk-at once",
        "2-0-AdamW-bf16-(2, 'local')-restage-grads on disk-thread",
        "2-1-SGD-bf16-(2, 'local')-overflow-half-at once",
        "1-1-Adam-fp32-(2, 'local')-reads-grads on disk-late",
        "1-0-SGD-bf16-(1, None)-keeps-disk-thread",
        "1-3-SGD-bf16-(2, 'sharded')-looks-all on disk-late",
    ]
)
@pytest.mark.pairwise("around", "executor")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS, ids=str)
@pytest.mark.parametrize("bfloat16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_bits_are_those_without_offloading(
    world_size, stage, optimizer, bfloat16, accumulation, around, place, executor, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    case = Case(world_size, stage, optimizer, bfloat16, accumulation, around)
    offload = PLACES[place]
    if offload.weights != "device" and stage < 3:
        offload = replace(offload, weights="device")
    if case not in _plain:
        _plain[case] = case.run(None)
    monkeypatch.setattr(placement, "Executor", EXECUTORS[executor])
    for expected, found in zip(_plain[case], case.run(offload), strict=True):
        assert same(expected, found)


# -- what it meets ------------------------------------------------------------------------------------------------


def _tied():
    net = Net(3)
    net.last.weight = net.first.weight
    return net


def _partly_frozen():
    net = Net(3)
    for param in (*net.blocks[1].parameters(), net.last.weight):
        param.requires_grad_(False)
    return net


class _Adapted(nn.Module):
    """A frozen layer with an adapter, as of PEFT."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + 0.5 * self.lora_B(self.lora_A(x))


class _AdaptedNet(Net):
    def __init__(self):
        super().__init__(3)
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)
        self.blocks = nn.ModuleList(_Adapted(block) for block in self.blocks)
        set_values(self, 0)


def _thaws(net, step):
    if step == 2:
        net.blocks[1].weight.requires_grad_(True)


def _goes_on(net, step):
    """Nothing happens between steps."""


def _adamw(zero, net):
    return [zero.optimizer(torch.optim.AdamW, lr=1e-2)]


def _two(zero, net):
    last = [*net.blocks[-1].parameters(), net.last.bias]
    others = [param for param in net.parameters() if not any(param is each for each in last)]
    adam = zero.optimizer(torch.optim.Adam, [{"params": others[:2], "lr": 1e-3}, {"params": others[2:]}], lr=1e-2)
    return [adam, zero.optimizer(torch.optim.SGD, last, lr=0.1, momentum=0.9)]


def _adafactor(zero, net):
    return [zero.optimizer(torch.optim.Adafactor, lr=1e-2)]


def _own(zero, net):
    return [zero.optimizer(Own, lr=1e-2, momentum=0.9)]


def _adopted(zero, net):
    return [torch.optim.AdamW(net.parameters(), lr=1e-2)]


NODES = {"param_dtype": torch.bfloat16, "gather": "int8", "reduce": "int8", "node_size": 2}
MEETS = {
    "tied weights": (_tied, _goes_on, _adamw, {}),
    "frozen weights": (_partly_frozen, _goes_on, _adamw, {}),
    "adapters": (_AdaptedNet, _goes_on, _adamw, {}),
    "adapters in bfloat16": (_AdaptedNet, _goes_on, _adamw, {"precision": MixedPrecision(torch.bfloat16)}),
    "adapters, and int8 travels": (_AdaptedNet, _goes_on, _adamw, {"precision": MixedPrecision(gather="int8")}),
    "adapters, and a second copy": (_AdaptedNet, _goes_on, _adamw, {"secondary_shard_size": 2}),
    "weights that are trained later": (_partly_frozen, _thaws, _adamw, {"precision": MixedPrecision(torch.bfloat16)}),
    "two optimizers": (Net, _goes_on, _two, {}),
    "whole tensors": (Net, _goes_on, lambda zero, net: muon_and_adamw(zero), {}),
    "whole tensors of Adafactor": (Net, _goes_on, _adafactor, {}),
    "a class from elsewhere": (Net, _goes_on, _own, {}),
    "an optimizer made without the engine": (Net, _goes_on, _adopted, {}),
    "int8 travels": (Net, _goes_on, _adamw, {"precision": MixedPrecision(gather="int8", reduce="int8")}),
    "int8 travels between nodes": (Net, _goes_on, _adamw, {"precision": MixedPrecision(**NODES)}),
    "a second copy": (Net, _goes_on, _adamw, {"secondary_shard_size": 2}),
    "replicas": (Net, _goes_on, _adamw, {"shard_size": 2}),
    "reproducible": (Net, _goes_on, _adamw, {"reproducible": 4}),
    "float64": (lambda: Net(3).double(), _goes_on, _adamw, {}),
    "no prefetch": (Net, _goes_on, _adamw, {"prefetch": 0}),
}


OF_RANKS = {
    "shard_size",
    "secondary_shard_size",
    "reproducible",
}  # settings that want several, or as many micro-batches


def _meeting(comm, stage, what, offload):
    build, between, optimizers, settings = MEETS[what]
    net = build()
    dtype = net.last.weight.dtype
    zero = Zero(net, stage, units=list(net.blocks), comm=comm, offload=offload, **settings)
    average = zero.ema(0.5) if optimizers in (_adamw, _two) else None
    optims = optimizers(zero, net)
    for step in range(4):
        between(net, step)
        net(rows(comm.rank, step).to(dtype)).square().mean().backward()
        zero.clip_grad_norm_(0.05)
        for optim in optims:
            optim.step()
        for optim in optims:
            optim.zero_grad()
        if average is not None:
            average.update()
    states = [zero.optim_state_dict(optim) for optim in optims]
    averages = [state["ema"] for state in average.state.values()] if average is not None else []
    return zero.state_dict(), states, averages


@pytest.mark.redundant(
    but=[
        "tied weights-0-late-host",
        "whole tensors-2-late-all on disk",
        "a class from elsewhere-0-late-host",
        "int8 travels between nodes-2-thread-disk",
        "a second copy-3-late-all on disk",
        "replicas-0-thread-host",
        "reproducible-2-late-disk",
    ]
)
@pytest.mark.pairwise("place", "executor", "stage")
@pytest.mark.parametrize("place", ["host", "disk", "all on disk"])
@pytest.mark.parametrize("executor", ["late", "thread"])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2, 3])
@pytest.mark.parametrize("what", MEETS)
def test_what_an_engine_can_do_it_does_with_state_away(what, stage, executor, place, monkeypatch, tmp_path):
    settings = MEETS[what][3]
    if stage == 0 and ("shard_size" in settings or ("precision" in settings and "int8" in what)):
        stage = 1
    if "secondary_shard_size" in settings:
        stage = 3
    rest = "disk" if place == "all on disk" else "host"
    offload = Offload(
        *[place.removeprefix("all on ")] * 2,
        grads="device" if "reproducible" in settings else rest,
        weights=rest if stage == 3 else "device",
        path=tmp_path if "disk" in place else None,
    )
    num_ranks = 4 if soaking() or OF_RANKS & set(settings) or "nodes" in what else 2
    expected = run_threads(lambda comm: _meeting(comm, stage, what, None), num_ranks, timeout_s=120)
    monkeypatch.setattr(placement, "Executor", EXECUTORS[executor])
    found = run_threads(lambda comm: _meeting(comm, stage, what, offload), num_ranks, timeout_s=120)
    for mine, theirs in zip(found, expected, strict=True):
        assert same(mine, theirs)


@pytest.mark.redundant
def test_what_was_saved_is_loaded_with_and_without_offloading(tmp_path):
    import zeroshard

    def on_rank(comm, stage, offload, begins, saves):
        net = Net(3)
        zero = Zero(net, stage, units=list(net.blocks), comm=comm, offload=offload)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        if begins:
            zeroshard.load(tmp_path / begins, zero)
        for step in range(3):
            net(rows(comm.rank, step)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        zeroshard.save(tmp_path / saves, zero, step=3)
        return zero.state_dict()

    def run(*args):
        return run_threads(lambda comm: on_rank(comm, *args), 2, timeout_s=120)

    run(2, None, "", "plain")
    run(3, Offload(), "", "away")
    ends = [
        run(1, away, begins, f"{begins}-{index}")
        for begins in ("plain", "away")
        for index, away in enumerate((None, Offload(fraction=0.6), Offload("disk", "disk", path=tmp_path / "files")))
    ]
    assert all(same(end, ends[0]) for end in ends)


REFUSED = {
    "offload.optimizer: 'lap' is no place for it; choose device, host, disk": {"optimizer": "lap"},
    "offload.grads: 'lap' is no place for it; choose device, host, disk": {"grads": "lap"},
    "offload.grads: 'disk' with master='device'; set optimizer and master to 'disk'": {
        "optimizer": "device",
        "master": "device",
        "grads": "disk",
        "path": "/tmp",
    },
    "offload.weights: 'disk' with master='host'; set master to 'disk'": {"weights": "disk"},
    "offload.optimizer: 'device' with master='host': the update needs both": {"optimizer": "device"},
    "offload.master: 'device' with optimizer='host': the update needs both": {"master": "device"},
    "offload.grads: 'host' with master='device'": {"optimizer": "device", "master": "device"},
    "offload.weights: 'host' with master='device'": {
        "optimizer": "device",
        "master": "device",
        "grads": "device",
        "weights": "host",
    },
    "offload.fraction: 1.5 is no share; give a number from 0 to 1, or 'auto'": {"fraction": 1.5},
    "offload.fraction: True is no share": {"fraction": True},
    "offload.path: state goes to a disk, and no folder is given": {"optimizer": "disk"},
    "offload.path: '/tmp' is given, and no state goes to a disk": {"path": "/tmp"},
    "offload.pinned: '4' ": {"pinned": "4"},
    "offload.pinned: -1 is no size": {"pinned": -1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_mean_nothing_are_refused_in_one_line(message):
    with pytest.raises(ValueError, match=r"^offload\.") as error:
        Offload(**REFUSED[message])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_engine_refuses_what_needs_its_state_on_the_device():
    from zeroshard.zero import LocalSteps

    def refuses(message, stage=2, offload=None, **settings):
        with pytest.raises(ValueError, match=f"^{message}"):
            Zero(Net(2), stage, offload=offload or Offload(), **settings)

    refuses("offload.weights: 'host' at stage 2, which keeps whole weights", offload=Offload(weights="host"))
    refuses("offload.grads: 'host' with reproducible", reproducible=4)
    refuses("offload.master: 'host' with local_steps", local_steps=LocalSteps(every=2), shard_size=1)
    with pytest.raises(TypeError, match=r"^offload: True is no Offload"):
        Zero(Net(2), offload=True)


@pytest.mark.parametrize(
    ("fraction", "away"), [(0, 0), (0.01, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.9, 4), (1, 4), ("auto", 4)]
)
def test_the_first_units_of_the_forward_stay(fraction, away):
    assert Offload(fraction=fraction).units_away([10, 10, 10, 10]) == away
    assert Offload(fraction=fraction).units_away([]) == 0
    assert Offload("device", "device", "device", fraction=fraction).units_away([10, 10, 10, 10]) == 0


@pytest.mark.redundant(
    but=["at once-0-False", "compared at once-0-True", "late-2-True", "thread-1-True", "on disk-2-False"]
)
@pytest.mark.pairwise("stage", "how")
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("how", [*EXECUTORS, "on disk", "compared at once"])
def test_what_is_written_through_data_between_steps_is_kept(stage, bfloat16, how, monkeypatch, tmp_path):
    """The comparison is one of a GPU, for which the update waits; on the CPU it is at once."""
    monkeypatch.setattr(placement, "Executor", EXECUTORS.get(how, Late))
    if how != "compared at once":
        monkeypatch.setattr(host_params, "is_here", lambda weights: False)
    away = Offload("disk", "disk", path=tmp_path) if how == "on disk" else Offload()

    def on_rank(comm, offload):
        net = Net(2)
        precision = MixedPrecision(torch.bfloat16 if bfloat16 else None)
        zero = Zero(net, stage, units=list(net.blocks), comm=comm, offload=offload, precision=precision)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        average, found = zero.ema(0.5), []
        for step in range(4):
            if step != 2:  # in one step there is nothing to update
                net(rows(comm.rank, step)).float().square().mean().backward()
            for param in net.parameters():
                param.data.mul_(1.5)
            optim.step()
            optim.zero_grad()
            average.update()
            found += [piece.detach().clone() for piece in zero.pieces()]
        return found, zero.state_dict(), [state["ema"] for state in average.state.values()]

    plain, found = (run_threads(lambda comm, o=o: on_rank(comm, o), 2, timeout_s=60) for o in (None, away))
    assert same(plain, found)


@pytest.mark.pairwise("stage", "world_size")
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_are_read_or_written_after_a_step_have_its_results(stage, world_size, bfloat16, monkeypatch):
    monkeypatch.setattr(placement, "Executor", Late)

    def on_rank(comm, offload):
        net, found = Net(2), []
        precision = MixedPrecision(torch.bfloat16 if bfloat16 else None)
        zero = Zero(net, stage, units=list(net.blocks), comm=comm, offload=offload, precision=precision)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            net(rows(comm.rank, step)).float().square().mean().backward()
            optim.step()
            found += [param.detach().clone() for param in net.parameters()]
            with torch.no_grad():
                for param in net.parameters():
                    param.mul_(1.5)
            optim.zero_grad()
            found += [param.data.clone() for param in net.parameters()]
        return found, zero.state_dict()

    ends = (run_threads(lambda comm, o=o: on_rank(comm, o), world_size, timeout_s=60) for o in (None, Offload()))
    plain, found = ends
    assert same(plain, found)


# -- the thread ---------------------------------------------------------------------------------------------------


def _engine(offload, executor, monkeypatch, stage=3, precision=None):
    monkeypatch.setattr(placement, "Executor", executor)
    net = Net(3)
    zero = Zero(net, stage, units=list(net.blocks), offload=offload, precision=precision)
    return net, zero, zero.optimizer(torch.optim.AdamW, lr=1e-2)


def _backward(net):
    net(rows(0)).square().mean().backward()


def test_a_unit_waits_for_its_own_update_alone_and_in_the_order_of_the_forward(monkeypatch):
    net, zero, optim = _engine(Offload(), Late, monkeypatch)
    zero.restage(0)
    _backward(net)
    optim.step()
    optim.zero_grad()
    late = [unit.groups[0].update for unit in zero.units]
    left = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda *_: left.append([update.pending for update in late]))
    assert [update.pending for update in late] == [True] * 4
    _backward(net)
    one_ahead = [[False, False, False, True], [False] * 4, [False] * 4]
    assert left == one_ahead


def test_states_and_pieces_that_are_read_wait(monkeypatch):
    net, zero, optim = _engine(Offload(), Late, monkeypatch)
    _backward(net)
    optim.step()
    assert len(optim.state) == 10
    _backward(net)
    optim.step()
    assert all(float(state["step"]) == 2 for state in optim.state.values())
    assert not zero.units[0].groups[0].update.pending
    _backward(net)
    optim.step()
    last = zero.units[-1].groups[0]
    assert last.update.pending
    assert len(last.shards) == 2
    assert not last.update.pending


def test_pieces_have_the_clipped_gradients_and_the_weights_of_the_last_step(monkeypatch):
    net, zero, optim = _engine(Offload(), Late, monkeypatch)
    _backward(net)
    expected = [torch.cat([grad.flatten() for grad in zero.full_grads().values()]).norm(), torch.tensor(1e-3)]
    found = [torch.cat([piece.grad for piece in zero.pieces()]).norm()]
    zero.clip_grad_norm_(1e-3)
    found.append(torch.cat([piece.grad for piece in zero.pieces()]).norm())
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    before = [piece.detach().clone() for piece in zero.pieces()]
    optim.step()
    assert not any(torch.equal(*pair) for pair in zip(before, zero.pieces(), strict=True))


def test_a_failed_update_names_its_unit_at_the_next_touch_and_no_later_unit_is_updated(monkeypatch):
    for executor in (Late, Executor):
        net, zero, optim = _engine(Offload(), executor, monkeypatch)
        _backward(net)
        optim.step()
        broken = zero.units[2].groups[0]
        before = zero.units[3].groups[0].params.master.clone()
        optim.state[broken.shards[0]]["exp_avg"] = torch.zeros(3)
        _backward(net)
        optim.step()
        with pytest.raises(RuntimeError, match=r"^step: the update of unit blocks.1 failed: \w+: .*t$"):
            _backward(net)
        with pytest.raises(RuntimeError, match=r"^step: the update of unit blocks.1 failed"):
            zero.state_dict()
        with pytest.raises(RuntimeError, match=r"^step: the update of unit blocks.1 failed"):
            zero.units[3].groups[0].params.update.wait()  # its turn has come, if it has one
        assert torch.equal(zero.units[3].groups[0].params._master, before)


@pytest.mark.parametrize("weights", ["device", "host"])
def test_weights_that_are_loaded_are_those_of_the_next_forward(weights):
    def on_rank(comm):
        torch.manual_seed(0)
        net, other = Net(3), Net(3)
        wanted, loaded = other(rows(0)).detach(), other.state_dict()
        zero = Zero(net, 3, list(net.blocks), comm, offload=Offload(weights=weights))
        optim = zero.optimizer(torch.optim.SGD, lr=1e-2)
        for _ in range(2):
            _backward(net)
            optim.step()
        zero.load_state_dict(loaded)
        with torch.no_grad():
            return torch.equal(net(rows(0)), wanted)

    assert run_threads(on_rank, 2) == [True, True]


def test_a_schedule_that_changes_settings_after_the_step_does_not_change_the_step(monkeypatch):
    ends = []
    for executor in (Late, AtOnce):
        net, zero, optim = _engine(Offload(), executor, monkeypatch)
        optim.param_groups[0]["lr"] = torch.tensor(1e-2)
        _backward(net)
        optim.step()
        optim.param_groups[0]["lr"].fill_(100.0)
        optim.param_groups[0]["weight_decay"] = 100.0
        ends.append(zero.state_dict())
    assert same(*ends)


def test_a_step_that_ends_takes_nothing_back_from_an_update_under_way(monkeypatch):
    """Gradients in bfloat16 are widened for the update; the end of ``step()`` shows narrow ones again: its own."""
    is_brought, is_over, widened = threading.Event(), threading.Event(), []
    bring, arm = WidenedGrads.bring, placement.Offloading.arm

    def slowly(self, pieces):
        bring(self, pieces)
        if threading.current_thread() is not threading.main_thread():
            is_brought.set()
            assert is_over.wait(60)
            widened.extend(piece.grad.dtype for piece in pieces)

    def until_brought(*args):
        arm(*args)
        assert is_brought.wait(60)

    monkeypatch.setattr(WidenedGrads, "bring", slowly)
    monkeypatch.setattr(placement.Offloading, "arm", until_brought)
    net = Net(3)
    dtypes = MixedPrecision(torch.bfloat16, torch.bfloat16)
    zero = Zero(net, 2, units=list(net.blocks), comm=NullCommunicator(2), precision=dtypes, offload=Offload())
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    _backward(net)
    optim.step()
    is_over.set()
    zero.state_dict()
    assert widened
    assert set(widened) == {torch.float32}


def test_an_executor_is_armed_again_once_its_updates_are_over():
    executor, done = Late(), []
    update = placement.Update("unit", executor)
    executor.arm([(update, lambda: done.append(1))])
    executor.arm([(update, lambda: done.append(2))])
    assert done == [1]
    executor.drain()
    assert done == [1, 2]


def test_a_fork_waits_for_the_update_and_the_child_has_a_thread_of_its_own():
    executor, begun, done = Executor(), threading.Event(), []
    update = placement.Update("unit", executor)

    def slowly():
        begun.wait()
        done.append(threading.get_ident())

    executor.arm([(update, slowly)])
    threading.Timer(0.2, begun.set).start()
    child = os.fork()
    if child == 0:
        if not done or update.pending:
            os._exit(1)  # nobody would end it here
        executor.arm([(update, slowly)])
        executor.drain()
        os._exit(0 if len(done) == 2 else 2)
    assert os.waitpid(child, 0)[1] == 0


def test_an_engine_whose_update_is_over_is_freed(monkeypatch):
    net, zero, optim = _engine(Offload(), Executor, monkeypatch)
    _backward(net)
    optim.step()
    zero.state_dict()
    gone = weakref.ref(zero)
    del net, zero, optim
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("bfloat16", [False, True])
def test_accounts_of_memory_say_what_is_away(bfloat16, monkeypatch):
    precision = MixedPrecision(torch.bfloat16 if bfloat16 else None, reduce_dtype=torch.float32)
    net, zero, optim = _engine(Offload(fraction=0.5), Executor, monkeypatch, stage=0, precision=precision)
    numel = [sum(param.numel() for param in part.parameters()) for part in (net.first, net.last, *net.blocks)]
    away, here = sum(numel[-3:]), sum(numel[:2])  # the last three of the forward: two have less than half
    _backward(net)
    optim.step()
    found = zero.memory_bytes()
    num_pieces = 2 * 3
    assert (found["host_master"], found["host_grads"]) == (4 * away * bfloat16, 4 * away)  # else it is in `params`
    assert found["host_optimizer"] == 2 * 4 * away + 4 * num_pieces
    here_bytes = {"params": (4 - 2 * bfloat16) * (away + here), "master": 4 * here * bfloat16, "host_params": 0}
    assert {name: found[name] for name in here_bytes} == here_bytes
    assert found["optimizer"] == 2 * 4 * here + 4 * 4
    counted, weights = dict.fromkeys(found, 0), set()
    for holding in zero.holdings():
        storage = holding.tensor.untyped_storage().data_ptr()
        if storage not in weights:  # else it is a part of them
            counted[holding.category] += holding.tensor.nbytes
        if holding.category == "params":
            weights.add(storage)
    kinds = ("params", "host_master", "host_grads", "host_optimizer", "optimizer")
    assert all(counted[name] == found[name] for name in kinds)


def test_modules_and_ranks_of_threads_have_executors_of_their_own():
    assert len(set(run_threads(lambda comm: id(Zero(nn.Linear(WIDTH, 2), comm=comm, offload=Offload())), 2))) == 2
