"""What quantising takes in plans: the conversions that an engine makes, and the time of each."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from dry_run import this_machine
from zeroshard.comm import NullCommunicator
from zeroshard.lab.planner.explain import explain
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.predict.actions import Compute, Issue, Message, Moment, Step, Wait
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.conversions import CONVERSIONS, converted
from zeroshard.lab.predict.hardware import DEVICES, Device, Link
from zeroshard.lab.predict.timeline import operation_s, simulate
from zeroshard.lab.predict.work import Work
from zeroshard.models import build_model
from zeroshard.settings.wire_formats import BlockFormat, DtypeFormat
from zeroshard.zero import MixedPrecision, Zero
from zeroshard.zero.transport import wire as wire_module

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 100, "seq_len": 16}
WIRE = {"gather": "int8", "reduce": "int4"}
INT8 = BlockFormat("int8")


def _planned(step):
    """Elements and calls by conversion, of the last micro-batch."""
    found = Counter()
    for action in step.last:
        for work in action.work if isinstance(action, (Compute, Issue)) else ():
            if work.conversion:
                found[work.conversion, "numel"] += work.numel
                found[work.conversion, "calls"] += work.num_calls
    return found


def _counted(stage, wire, kwargs, monkeypatch):
    """Likewise of a real engine's third step, by whom it calls."""
    found = Counter()

    def counts(name, numel_of):
        real = getattr(wire_module, name)

        def call(*args):
            kind, form, numel, calls = numel_of(*args)
            found[f"{form.name} {kind}", "numel"] += numel
            found[f"{form.name} {kind}", "calls"] += calls
            real(*args)

        monkeypatch.setattr(wire_module, name, call)

    def quantised(values, packed, form, key=None):
        return "quantise" if key is None else "quantise stochastically", form, values.numel(), 1

    counts("quantise", quantised)
    counts("dequantise", lambda packed, values, form: ("dequantise", form, values.numel(), 1))
    counts("dequantised_sum", lambda rows, own, *rest: ("sum", rest[2], (len(rows) - 1) * own.numel(), len(rows) - 1))
    model = build_model("gpt2-demo", overrides=SIZES)
    comm = NullCommunicator(4, 3)
    zero = Zero(model, stage, comm=comm, precision=MixedPrecision(**wire), units=list(model.blocks), **kwargs)
    optimizer = zero.optimizer(torch.optim.SGD, lr=1e-3)
    tokens = torch.zeros(1, SIZES["seq_len"], dtype=torch.int64)
    for _ in range(3):
        optimizer.zero_grad()
        found.clear()
        model(tokens, tokens).backward()
        zero.clip_grad_norm_(1.0)  # all reductions are taken in
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("stage", "kwargs"),
    [
        pytest.param(2, {}, id="flat"),
        pytest.param(3, {"shard_size": 2}, id="replicas"),
        pytest.param(3, {"secondary_shard_size": 2}, id="copy", marks=pytest.mark.soak),
        pytest.param(1, {"shard_size": 1}, id="one shards", marks=pytest.mark.soak),
    ],
)
def test_a_plan_has_the_conversions_that_an_engine_makes(stage, kwargs, monkeypatch):
    """Of a rank of four on two nodes: what is quantised to the nearest and stochastically, taken back, and added up."""
    given = {"world_size": 4, "gpus_per_node": 2, "overrides": SIZES, "dtype": "float32", "wire": WIRE}
    given["node_copy"], shards = kwargs.get("secondary_shard_size"), kwargs.get("shard_size")
    row = planner_for("gpt2-demo", gpu=this_machine(2**40, "cpu"), **given).row(stage, 1, shards)
    assert _planned(row.step) == _counted(stage, WIRE, kwargs, monkeypatch)
    on_gpu = planner_for("gpt2-demo", gpu="a100-80gb", **given).row(stage, 1, shards)
    assert _planned(on_gpu.step) == _planned(row.step)  # beside computation, and no others


def test_a_conversion_takes_what_was_measured_else_its_bytes():
    work = converted("quantise stochastically", INT8, 1000, 3)
    device = replace(CPU, conversions={"int8 quantise stochastically": (1e-3, 1e-6)})
    assert operation_s(work, device) == (pytest.approx(3e-3 + 1e-3), "wire")
    moved = INT8.num_bytes(1000) + 4000
    assert operation_s(work, CPU)[0] == pytest.approx(moved / 1e9 + 3e-4)
    a100 = DEVICES["a100-80gb"]
    large = converted("dequantise", INT8, 10**9, 1, itemsize=2)
    assert operation_s(large, a100)[0] == pytest.approx((INT8.num_bytes(10**9) + 2e9) / (0.75 * a100.bytes_per_s))
    assert operation_s(converted("sum", INT8, 8, 1000), a100)[0] == pytest.approx(1000 * a100.kernel_s)
    assert converted("quantise", DtypeFormat(torch.bfloat16), 8).num_bytes == 16 + 32


CPU = Device("test", 10**9, {"float32": 1e12}, 1e9, "invented", kernel_s=1e-4, device_type="cpu")
SECOND = converted("quantise", INT8, 10**6)


def _step(actions):
    nothing = Moment({}, "")
    return Step([], [], 0, list(actions), [], nothing, {}, {}, {}, 1)


def test_quantising_beside_computation_takes_the_device_from_it_and_before_it_the_time():
    gpu = replace(CPU, device_type="cuda", kernel_s=0.0, conversions={"int8 quantise": (0.0, 1e-6)})
    link = Link("l", 0.0, 1e9, "invented", call_s=0.0, share=1.0)
    message = Message("all_gather", 4 * 10**9, "u", "weights", 2)  # 2 s
    compute, wait = Compute((Work(4 * 10**12, 0, "float32"),)), Wait(1)
    beside = _step([Issue(1, message, work=(SECOND,)), compute, wait])
    before = _step([Compute((SECOND,)), Issue(1, message), compute, wait])
    alone = _step([Issue(1, message), compute, wait])
    seconds = [simulate(step, gpu, Cluster(2, 2, link, link)) for step in (alone, beside, before)]
    assert [timing.step_s for timing in seconds] == pytest.approx([4, 5, 5])
    assert [timing.wire_s for timing in seconds] == pytest.approx([0, 1, 1])


def test_what_quantising_takes_is_told_with_its_source():
    given = {"world_size": 2, "overrides": SIZES, "dtype": "float32", "wire": WIRE}
    planner = planner_for("gpt2-demo", gpu="a100-80gb", **given)
    told = explain(planner, planner.row(2, 1))
    assert "Of the step quantising takes" in told
    assert "int4 sum" in told
    assert "its bytes over the memory's rate" in told
    measured = {f"{form} {kind}": (1e-5, 2e-9) for form in ("int8", "int4") for kind in CONVERSIONS}
    planner = planner.on(device=replace(planner.device, conversions=measured))
    row = planner.row(2, 1)
    told = explain(planner, row)
    assert "10 us a call, 2 ns a number" in told
    assert row.as_dict()["quantise_s"] == row.timing.wire_s > 0
    without = planner_for("gpt2-demo", gpu="a100-80gb", **{**given, "wire": {}})
    assert "quantis" not in explain(without, without.row(2, 1))
