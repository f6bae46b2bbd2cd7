"""What the engine queues on streams is ordered by streams and events alone: no race at any stage, and races are seen.

On each stream a mistake is planted that a GPU would forgive in most steps, and none is missed.
"""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from hazards import Hazard, HazardCommunicator, HazardDevice, on_device
from nets import WIDTH, Net, in_order, recomputed
from zeroshard.checkpoint import BackgroundSaver, background
from zeroshard.checkpoint.host_copies import HostCopies
from zeroshard.comm.streams import DeviceStreams
from zeroshard.zero import STAGES, MixedPrecision, Zero
from zeroshard.zero import precision as precision_module
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.transport import wire

NUM_STEPS = 3


def _in_another_order(net, x):
    """But for the first time, after which units have their places: gradients come after their unit was reduced."""
    seen = getattr(net, "seen", False)
    net.seen = True
    return in_order(net, x, (3, 2, 1, 0) if seen else None)


def _by_parts(net, x):
    """The first block's parts are called in its place, last, and its weights stay until backward is over."""
    return net.blocks[0][0](in_order(net, x, skip=(0,)))


PATHS = {
    "in order": in_order,
    "recomputed": recomputed,
    "skipping": partial(in_order, skip=(0,)),  # other ranks run it
    "by parts": _by_parts,
    "another order": _in_another_order,
}


@dataclass(frozen=True)
class Case:
    """A way to train."""

    stage: int = 3
    prefetch: int = 1
    num_micro: int = 1
    accumulate: str | None = None
    shard_size: int | None = None
    bfloat16: bool = False
    path: str = "in order"
    inline: bool = False
    evaluates: bool = False
    saves: str = ""
    wire: str | None = None
    secondary: int | None = None
    node_size: int | None = None
    reproducible: int | None = None
    frozen: str | None = None


class _Later:
    """The writer of a save, which begins when it is told to, after whatever the training has queued by then."""

    def __init__(self, device):
        self._device, self._jobs = device, []

    def submit(self, work, *args):
        future = Future()
        self._jobs.append((future, work, args))
        return future

    def run(self):
        for future, work, args in self._jobs:
            future.set_result(work(*args))
        self._jobs = []
        self._device.compute.clock |= self._device.host.clock  # who queues more has waited for the writer

    def shutdown(self):
        """Nothing runs."""


def _saver(case, device, comm, optim, monkeypatch):
    saver = BackgroundSaver(comm, in_place=case.saves == "in place")
    saver._pool = _Later(device)

    def write(folder, comm, shards, *_):
        device.access(device.host, "the writer", reads=[shard.tensor for shard in shards])

    monkeypatch.setattr(background.api, "write_rank", write)
    optim.register_step_pre_hook(lambda *_: saver.settle())
    return saver


def _train(case, monkeypatch, plant=lambda monkeypatch: None):
    """Train a little, with a mistake if one is planted; raises `Hazard` at the first race."""
    device = HazardDevice()
    on_device(monkeypatch, device)
    plant(monkeypatch)
    comm = HazardCommunicator(device, 4, rank=1, inline=case.inline)
    model = Net(4, block=lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)), path=PATHS[case.path])
    for block in model.blocks:
        block[0].weight.requires_grad_(case.frozen is None)
    dtype = torch.bfloat16 if case.bfloat16 else None
    precision = MixedPrecision(param_dtype=dtype, gather=case.wire, reduce=case.wire, node_size=case.node_size)
    monkeypatch.setattr(precision_module, "EXACT_NUMEL", WIDTH)
    with device:
        zero = Zero(
            model,
            case.stage,
            units=list(model.blocks),
            comm=comm,
            precision=precision,
            prefetch=case.prefetch,
            accumulate=case.accumulate,
            shard_size=case.shard_size,
            secondary_shard_size=case.secondary,
            reproducible=case.reproducible,
            frozen_format=case.frozen,
        )
        device.watch(zero)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-3, foreach=False)
        saver = _saver(case, device, comm, optim, monkeypatch) if case.saves else None
        x = torch.ones(2, WIDTH)
        for step in range(NUM_STEPS):
            if saver is not None and step:
                saver.start(f"step-{step}", zero, step=step)
            for micro in range(case.num_micro):
                with zero.micro_batch(last=micro == case.num_micro - 1):
                    model(x).float().sum().backward()
            zero.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
            if saver is not None:
                saver._pool.run()
                saver.wait()
            if case.evaluates:
                with torch.no_grad():
                    model(x)
                with zero.full_params(write_back=True), torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.5)
    return device


# Whether the communicator computes on the caller's stream, evaluations, saves, what travels, a second copy, nodes.
AROUND = {
    "alone": (False, False, "", None, None),
    "evaluates, saves in place": (False, True, "in place", None, 2),
    "inline, saves at once": (True, False, "at once", None, None),
    "int8 travels": (False, False, "", "int8", 2),
    "int8 travels inline, evaluates": (True, True, "", "int8", None),
    "int8 travels between nodes": (False, False, "", "int8", None, 2),
    "int8 travels between nodes inline, evaluates": (True, True, "", "int8", 2, 2),
    "reproducible": (False, False, "", None, None, None, 4),
    "reproducible inline, evaluates, saves in place": (True, True, "in place", None, 2, None, 4),
}


@pytest.mark.redundant(but=["3-3-(3, 'local')-None-fp32-recomputed-evaluates, saves in place"])
@pytest.mark.pairwise("stage", "path")
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bfloat16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shard_size", [None, 2])
@pytest.mark.parametrize("accumulation", [(1, None), (2, None), (3, "local"), (3, "sharded")], ids=str)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_touched_before_what_it_must_wait_for(
    stage, prefetch, accumulation, shard_size, bfloat16, path, around, monkeypatch
):
    """`_train` raises `Hazard` if it is."""
    num_micro, accumulate = accumulation
    case = Case(stage, prefetch, num_micro, accumulate, shard_size, bfloat16, path, *AROUND[around])
    if case.reproducible is not None:
        case = replace(case, accumulate=None, shard_size=None)
    if stage == 0:  # which knows neither
        case = replace(case, shard_size=None, wire=None, node_size=None)
    if stage < 3 or case.shard_size is not None:  # which has no second copy, or too few ranks for it
        case = replace(case, secondary=None)
    if case.shard_size is not None:
        case = replace(case, node_size=None)
    _train(case, monkeypatch)


@pytest.mark.filterwarnings("ignore:.*which rounds it:UserWarning")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stage", [1, 3])
def test_codes_are_decoded_once_they_are_there_and_their_memory_is_free(stage, path, monkeypatch):
    """`_train` raises `Hazard` if not."""
    prefetch = list(PATHS).index(path) % 3
    _train(Case(stage, prefetch, 2, path=path, bfloat16=True, evaluates=stage == 3, frozen="nf4"), monkeypatch)


# -- what is not waited for ---------------------------------------------------------------------------------------


def _engine(monkeypatch, stage, *, prefetch=1, shard_size=None):
    device = HazardDevice()
    on_device(monkeypatch, device)
    model = Net(5)
    comm = HazardCommunicator(device, 4, rank=1)
    zero = Zero(model, stage, units=list(model.blocks), comm=comm, prefetch=prefetch, shard_size=shard_size)
    device.watch(zero)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3, foreach=False)
    return device, model, optim, zero


def _begun(device, what):
    return [(label, clock, waited) for label, clock, waited in device.begun if label.startswith(what)]


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathers_wait_for_the_step_and_nothing_that_was_queued_after_it(stage, monkeypatch):
    device, model, optim, _ = _engine(monkeypatch, stage, prefetch=5)
    x = torch.ones(2, WIDTH)
    with device:
        for _ in range(2):
            model(x).sum().backward()
            optim.step()
            stepped = device.compute.clock["compute"]
            optim.zero_grad()
            x = torch.ones(2, WIDTH).mul(2).sub(1)
        del device.begun[:]
        assert device.compute.clock["compute"] > stepped
        model(x)
    begun = _begun(device, "all_gather")
    assert len(begun) == 6
    assert all(clock["compute"] <= stepped for _, clock, _ in begun)


@pytest.mark.redundant
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_sharded_weights_are_gathered_while_units_before_them_compute(prefetch, monkeypatch):
    device, model, _, _ = _engine(monkeypatch, 3, prefetch=prefetch)
    starts = {}
    with device:
        model(torch.ones(2, WIDTH)).sum().backward()
        for index, block in enumerate(model.blocks):

            def begins(*_, index=index):
                starts[index] = device.compute.clock["compute"]

            block.register_forward_pre_hook(begins)
        del device.begun[:]
        model(torch.ones(2, WIDTH))
    waits = {label: clock["compute"] for label, clock, _ in _begun(device, "all_gather")}
    for index in range(prefetch, 5):
        assert waits[f"all_gather blocks.{index}/weights"] <= starts[index - prefetch]


@pytest.mark.parametrize(("stage", "shard_size"), [(0, None), (1, None), (2, None), (1, 2), (2, 2)])
def test_what_computes_waits_for_neither_of_the_last_two_reductions(stage, shard_size, monkeypatch):
    """Neither between the two parts of stage 0's over NCCL nor between that of a group and that over replicas."""
    device, model, _, zero = _engine(monkeypatch, stage, shard_size=shard_size)
    with device:
        model(torch.ones(2, WIDTH)).sum().backward()
    reductions = _begun(device, "reduce_scatter")[:5]  # of blocks; the root's is the last, and is waited for
    name = zero.rank_groups.shard_group.stream.name
    ends = [clock[name] + 1 for _, clock, _ in reductions]
    assert all(waited[name] < end for end, (_, _, waited) in zip(ends, reductions[2:], strict=False))


# -- planted faults -----------------------------------------------------------------------------------------------


def _forgets(lane):
    """What is queued on a lane waits for no mark."""

    def plant(monkeypatch):
        whole = DeviceStreams.on
        monkeypatch.setattr(
            DeviceStreams, "on", lambda self, to, *after: whole(self, to, *(() if to == lane else after))
        )

    return plant


def _does_nothing(owner, name):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, lambda of: None)


FAULTS = {
    "the copy does not wait for the step": (_forgets("copy_in"), Case(1, bfloat16=True)),
    "the gather does not wait for the copy": (_forgets("gather"), Case(3, bfloat16=True)),
    "the reduction does not wait for the gradients": (_forgets("reduce"), Case(2)),
    "memory is taken while weights in it are read": (_does_nothing(DeviceStreams, "freed"), Case(3)),
    "gradients are written while they are reduced": (
        _does_nothing(Gradients, "_vacate_local"),
        Case(1, path="another order"),
    ),
    "what has arrived in a wire format is freed while it is read": (
        _does_nothing(wire, "record_read"),
        Case(3, wire="int8"),  # at stages 1 and 2 the next codes come after the step, and so after these
    ),
    "a shard is quantised before it is computed": (_forgets("reduce"), Case(2, wire="int8")),
    "a node's sum is freed while it is quantised": (
        _does_nothing(wire, "record_read"),
        Case(2, wire="int8", node_size=2, num_micro=2),
    ),
    "weights are quantised before the step is over": (_forgets("copy_in"), Case(1, wire="int8")),
    "a save copies what is still being computed": (_forgets("save"), Case(1, saves="in place")),
    "a step changes what is being copied": (_does_nothing(HostCopies, "settle"), Case(2, saves="in place")),
    "the writer reads copies that have not come": (_does_nothing(HostCopies, "wait"), Case(3, saves="at once")),
}


@pytest.mark.redundant(but=["what has arrived in a wire format is freed while it is read"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    plant, case = FAULTS[fault]
    with pytest.raises(Hazard):
        _train(case, monkeypatch, plant)
