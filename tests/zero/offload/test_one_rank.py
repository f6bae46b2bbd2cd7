"""One rank whose weights come from the host, or from its file: they are on the device while they are used, and no bit
changes.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from fake_cuda import CUDA, Peers, backward_events, device, guarded, reads  # noqa: F401 -- fixtures
from nets import WIDTH, LiveWeights, Net, muon_and_adamw, rows, units_with_weights
from soak import soaking
from zero.offload.executors import EXECUTORS, Late
from zero.offload.test_offload import MEETS, OF_RANKS, _AdaptedNet, _meeting, same
from zero.offload.test_on_a_gpu import Pages
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero
from zeroshard.zero.offload import host_grads, host_params, placement, staging

PLACES = {
    "host": Offload(weights="host"),
    "half on the host": Offload(weights="host", fraction=0.5),
    "disk": Offload("disk", "disk", "disk", "disk", path="states"),
    "masters on disk": Offload("disk", "disk", weights="host", path="states"),
}
OPTIMIZERS = {
    "AdamW": lambda zero: [zero.optimizer(torch.optim.AdamW, lr=1e-2)],
    "SGD": lambda zero: [zero.optimizer(torch.optim.SGD, lr=1e-1, momentum=0.9)],
    "Muon": muon_and_adamw,
}


NUM_STEPS = 50 if soaking() else 5


def _trained(offload, optimizer, around, dtype):
    """Losses, norms, weights and states of steps of which some are clipped, accumulated or skipped."""
    net = Net(4)
    zero = Zero(net, 3, units=list(net.blocks), precision=MixedPrecision(dtype), offload=offload)
    optims, found = OPTIMIZERS[optimizer](zero), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=around == "skipped")
    for step in range(NUM_STEPS):
        for micro in range(2 if around == "accumulated" else 1):
            with zero.micro_batch(last=micro == (around == "accumulated")):
                loss = net(rows(micro, step)).float().square().mean()
                scaler.scale(loss * (float("inf") if around == "skipped" and step % 5 == 2 else 1.0)).backward()
            found.append(loss.detach())
        for optim in optims:
            scaler.unscale_(optim)
        found.append(zero.clip_grad_norm_(0.05 if around == "clipped" else 100.0))
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        for optim in optims:
            optim.zero_grad()
    norms = torch.stack([each for each in found if each.dtype == torch.float32])
    assert around != "clipped" or (norms > 0.05).any()
    return found, zero.state_dict(), [zero.optim_state_dict(optim) for optim in optims]


_plain = {}


@pytest.mark.redundant
@pytest.mark.pairwise("optimizer", "place")
@pytest.mark.parametrize("executor", ["late", "thread"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("around", ["clipped", "accumulated", "skipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_have_the_bits_of_those_without_offloading(
    optimizer, around, dtype, place, executor, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    case = optimizer, around, dtype
    if case not in _plain:
        _plain[case] = _trained(None, *case)
    monkeypatch.setattr(placement, "Executor", EXECUTORS[executor])
    assert same(_trained(PLACES[place], *case), _plain[case])


ALONE = [what for what, (*_, settings) in MEETS.items() if not OF_RANKS & set(settings) and "nodes" not in what]


@pytest.mark.redundant(
    but=[
        "weights that are trained later-thread-disk",
        "two optimizers-late-host",
        "an optimizer made without the engine-late-host",
    ]
)
@pytest.mark.pairwise("executor", "place")
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("executor", ["late", "thread"])
@pytest.mark.parametrize("what", ALONE)
def test_what_an_engine_can_do_it_does_on_one_rank(what, executor, place, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    offload = PLACES[place]
    [expected] = run_threads(lambda comm: _meeting(comm, 3, what, None), 1)
    monkeypatch.setattr(placement, "Executor", EXECUTORS[executor])
    [found] = run_threads(lambda comm: _meeting(comm, 3, what, offload), 1)
    assert same(found, expected)


def test_reproducible_steps_of_one_rank_have_the_same_bits(tmp_path):
    ends = []
    for offload in (None, Offload(weights="host", grads="device")):
        net = Net(3)
        zero = Zero(net, 3, units=list(net.blocks), reproducible=2, offload=offload)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            for micro in range(2):
                net(rows(micro, step)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        ends.append([zero.state_dict(), zero.optim_state_dict()])
    assert same(*ends)


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.redundant(but=["disk-2", "host-0", "host-1"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_no_more_units_than_are_gathered_ahead_have_weights(place, prefetch, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    net = Net(8, LiveWeights)
    zero = Zero(net, 3, units=list(net.blocks), prefetch=prefetch, offload=PLACES[place])
    assert not any(group.params.full_bytes for unit in zero.units for group in unit.groups)
    seen, optim = units_with_weights(net, zero), zero.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        net(rows(0, step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        assert not any(group.params.full_bytes for unit in zero.units for group in unit.groups)
    assert len(seen) == 3 * 2 * 8
    assert max(seen) == prefetch + 1


def test_an_evaluation_of_frozen_weights_has_two_units_there():
    net = Net(8, LiveWeights).requires_grad_(False)
    zero = Zero(net, 3, units=list(net.blocks), offload=PLACES["host"])
    seen = units_with_weights(net, zero)
    with torch.no_grad():
        assert torch.equal(net(rows(0)), Net(8, LiveWeights)(rows(0)))
    assert max(seen) == 2
    assert zero.memory_bytes()["params"] == 0


NUM_LAYERS = 8


class _Most(TorchDispatchMode):
    """The most units but the root with weights on the device after any operation, and the most bytes there of state."""

    def __init__(self):
        super().__init__()
        self.zero, self.num_units, self.num_bytes = None, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.zero is not None:
            units = [unit for unit in self.zero.units[1:] if any(group.params.full_bytes for group in unit.groups)]
            sizes = self.zero.memory_bytes()
            there = sum(n for name, n in sizes.items() if not name.startswith(("host_", "disk_")))
            self.num_units, self.num_bytes = max(self.num_units, len(units)), max(self.num_bytes, there)
        return result


@pytest.mark.redundant
@pytest.mark.pairwise
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_larger_than_the_device_trains(dtype, frozen, num_micro, device, reads, monkeypatch):  # noqa: F811
    """Two units' weights, the gradients of three, and the root's of both are all that is there."""
    monkeypatch.setattr(placement, "Executor", Late)
    monkeypatch.setattr(host_params, "is_set", lambda flag: False)
    for module in (host_grads, host_params, staging):
        monkeypatch.setattr(module, "Slab", Pages)
    policy, itemsize = MixedPrecision(dtype), 4 if dtype is None else 2
    with FakeTensorMode(), _Most() as most:
        with CUDA:
            model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
        for layer in model if frozen else ():
            layer.weight.requires_grad_(False)
        comm = Peers(1, device, rank=0)
        zero = Zero(model, 3, units=list(model)[1:], comm=comm, precision=policy, offload=Offload(weights="host"))
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
        most.zero = zero
        for _ in range(2):
            for micro in range(num_micro):
                with zero.micro_batch(last=micro == num_micro - 1):
                    model(torch.empty(2, WIDTH, device=CUDA)).sum()
                    backward_events(zero)
            zero.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
        with torch.no_grad():
            model(torch.empty(2, WIDTH, device=CUDA))
    padded = [group.params.layout.padded_numel for group in zero.units[1].groups]
    a_unit, grads = sum(padded) * itemsize, 4 * padded[-1]
    assert most.num_units == 2
    assert most.num_bytes <= 3 * a_unit + 4 * grads
    assert most.num_bytes < NUM_LAYERS * (a_unit + grads) / 2  # half of the weights with their gradients


# -- what a user does with it -------------------------------------------------------------------------------------


def _engine(offload, build=lambda: Net(3), dtype=None):
    net = build()
    zero = Zero(net, 3, units=list(net.blocks), precision=MixedPrecision(dtype), offload=offload)
    return net, zero, zero.optimizer(torch.optim.AdamW, lr=1e-2)


def _step(net, zero, optim, step):
    net(rows(0, step)).float().square().mean().backward()
    zero.clip_grad_norm_(0.05)
    optim.step()
    optim.zero_grad()


@pytest.mark.redundant(but=["host-bf16-adapters"])
@pytest.mark.pairwise
@pytest.mark.parametrize("build", [lambda: Net(3), _AdaptedNet], ids=["all are trained", "adapters"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_saves_loads_and_changes_of_the_stage_find_all_weights(place, dtype, build, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "Executor", Late)
    ends, ways = [], (None, PLACES[place])
    for index, offload in enumerate(ways):
        net, zero, optim = _engine(offload, build, dtype)
        for step in range(3):
            _step(net, zero, optim, step)
        with torch.no_grad():
            found = [net(rows(0, 9))]  # an evaluation
        with zero.full_params():
            found.append([param.detach().clone() for param in net.parameters()])
        with zero.full_params(write_back=True), torch.no_grad():
            for param in net.parameters():
                param.mul_(0.5)
        found.append(zero.state_dict())
        zero.load_state_dict({name: value * 1.5 for name, value in zero.state_dict().items()})
        optim.load_state_dict(optim.state_dict())  # one rank has all of it
        found += [zero.state_dict(), optim.state_dict()]
        _step(net, zero, optim, 3)
        for stage in (0, 3, 2, 1, 3):
            zero.restage(stage)
            _step(net, zero, optim, 4 + stage)
            found.append(zero.state_dict())
        zeroshard.save(tmp_path / f"saved-{index}", zero, step=9)
        found.append(zeroshard.consolidate(tmp_path / f"saved-{index}"))
        zero.remove()
        ends.append([*found, dict(net.state_dict()), net(rows(0))])
    assert same(*ends)
    loaded = []
    for begins in range(2):
        for offload in ways:
            net, zero, optim = _engine(offload, build, dtype)
            zeroshard.load(tmp_path / f"saved-{begins}", zero)
            _step(net, zero, optim, 20)
            loaded.append([zero.state_dict(), zero.optim_state_dict()])
    assert all(same(each, loaded[0]) for each in loaded)


def test_frozen_weights_that_are_trained_later_are_back_on_the_device(tmp_path):
    ends = []
    for offload in (None, PLACES["host"]):
        net, zero, optim = _engine(offload, _AdaptedNet)
        _step(net, zero, optim, 0)
        for param in net.parameters():
            param.requires_grad_(True)
        for step in range(1, 4):
            _step(net, zero, optim, step)
        ends.append([zero.state_dict(), zero.optim_state_dict()])
    assert same(*ends)


class _Parts(Net):
    """A method that calls a layer of a unit, past the unit."""

    def __init__(self):
        super().__init__(2, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block[1](block[0](x).tanh())
        return self.last(x)


def test_layers_that_are_called_past_their_unit_have_their_weights():
    ends = []
    for offload in (None, PLACES["host"]):
        net, zero, optim = _engine(offload, _Parts)
        for step in range(3):
            _step(net, zero, optim, step)
        ends.append(zero.state_dict())
    assert same(*ends)


@pytest.mark.redundant
def test_a_transformers_model_generates():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=16)
    config.pad_token_id = config.eos_token_id = None
    found = []
    for offload in (None, PLACES["host"]):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
        if offload is not None:
            Zero(model, 3, units="auto", offload=offload)
        found.append(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False))
    assert torch.equal(*found)


class _OwnMemory(LocalCommunicator):
    """As ranks of one host have it, in a segment that nobody can resize."""

    def empty(self, numel, dtype):
        return torch.frombuffer(bytearray(numel * dtype.itemsize), dtype=dtype)


@pytest.mark.parametrize("build", [lambda: Net(3), _AdaptedNet], ids=["all are trained", "adapters"])
def test_weights_in_memory_of_the_communicator_are_freed_too(build):
    net = build()
    zero = Zero(net, 3, units=list(net.blocks), comm=_OwnMemory(), offload=PLACES["host"])
    assert zero.memory_bytes()["params"] == 0
    _step(net, zero, zero.optimizer(torch.optim.AdamW, lr=1e-2), 0)
    assert zero.memory_bytes()["params"] == 0


def test_what_needs_all_weights_is_refused_in_one_line():
    net, zero, optim = _engine(PLACES["host"])
    _step(net, zero, optim, 0)
    with pytest.raises(RuntimeError, match=r"^model.state_dict\(\): the weights are sharded .* use zero.state_dict"):
        net.state_dict()
    with pytest.raises(RuntimeError, match=r"written to while the weights were sharded, .*; do it inside zero.full_p"):
        torch.nn.init.zeros_(net.blocks[0].weight)
    with pytest.raises(RuntimeError, match=r"assigned to while the weights were sharded; do it inside zero.full_par"):
        net.blocks[0].weight.data = torch.zeros(WIDTH, WIDTH)
    with pytest.warns(UserWarning, match="inside zero.full_params"):
        assert net.blocks[0].weight.isnan().all()
    for stage in set(STAGES) - {3}:
        with pytest.raises(ValueError, match=f"^offload.weights: 'host' at stage {stage}, .*; give stage=3"):
            Zero(Net(2), stage, offload=Offload(weights="host"))
    with pytest.raises(ValueError, match=r"^offload.weights: 'host' with shard_size=1, .*; leave shard_size out"):
        Zero(Net(2), 3, comm=NullCommunicator(2), shard_size=1, offload=Offload(weights="host"))
