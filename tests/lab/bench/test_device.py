import gc
import json
import threading
from dataclasses import replace

import pytest
import torch

from zeroshard.cli.verbs import laboratory
from zeroshard.host.errors import UserError
from zeroshard.lab.bench import conversions, device, disk, step, whole_step
from zeroshard.lab.planner.run_plan import predicted_step
from zeroshard.lab.predict.conversions import CONVERSIONS
from zeroshard.lab.predict.hardware import Calibration, Device, Link, read_calibration
from zeroshard.settings.wire_formats import FORMATS, WEIGHT_FORMATS
from zeroshard.zero import STAGES
from zeroshard.zero.offload.disk import DiskStates


def test_a_constant_and_a_rate_are_fitted_to_sizes_and_noise_does_not_bend_the_fit():
    sizes = [1e4, 1e5, 1e6, 1e7]
    constant, s_per_byte = device.fitted(sizes, [2e-4 + size * 3e-9 for size in sizes])
    assert constant == pytest.approx(2e-4)
    assert s_per_byte == pytest.approx(3e-9)
    assert device.fitted([1e3, 1e6], [0.0, 0.0]) == (0.0, 0.0)
    constant, s_per_byte = device.fitted([1e3, 1e5, 1e7], [0.0, 1e-6, 1e-1])
    assert constant == pytest.approx(0.0, abs=1e-4)
    assert s_per_byte == pytest.approx(1e-8, rel=0.25)
    constant, s_per_byte = device.fitted([1e3, 1e6], [1e-7, 1e-3])
    assert constant == 0.0  # never negative
    assert s_per_byte > 0


def _found():
    """Medians by hand: 6 GFLOP/s of products, half of it in attention, and collectives of 1 ms and 1 GB/s."""
    seconds = {"matmul float32 a nt": [1.0], "matmul float32 a nn": [2.0], "attention float32": [1.0]}
    seconds |= {
        "copy": [1.0],
        "anew": [1.0],
        "update": [2.0],
        "bus": [0.5],
        "gelu": [1.0],
        "kernel": [1.0],
        "hook": [1.5],
    }
    amounts = {"matmul float32 a nt": 9e9, "matmul float32 a nn": 9e9, "attention float32": 3e9}
    amounts |= {"copy": 8e9, "anew": 6e9, "update": 6e9, "bus": 1e9, "gelu": 5e8, "kernel": 1e5, "hook": 1e4}
    for op in device.OPS:
        for size, num_bytes in device.SIZES.items():
            seconds[f"torch {op} {size}"] = [1e-3 + num_bytes / 1e9]
            seconds[f"torch {op} {size} beside"] = [2e-3 + num_bytes / 2e9]
            amounts[f"torch {op} {size}"] = amounts[f"torch {op} {size} beside"] = num_bytes
    return {"seconds": seconds, "amounts": amounts, "memory_bytes": 1 << 30}


def test_the_calibration_has_rates_shares_and_a_link():
    found = device.calibration_of(_found(), 4, "torch", "cpu", 1)
    measured, link = found.device, found.link
    assert measured.matmul_flops_per_s == {"float32": 6e9}
    assert measured.matmul_layouts == {"float32": {"nt": 1.5, "nn": 0.75}}
    assert (measured.attention_share, measured.bytes_per_s, measured.memory_share) == (0.5, 8e9, 0.75)
    assert (measured.gelu_s, measured.kernel_s, measured.hook_s) == (2e-9, 1e-5, 5e-5)
    assert (measured.update_bytes_per_s, measured.bus_bytes_per_s) == (3e9, 2e9)
    assert link.num_ranks == 4
    for op in device.OPS:
        assert link.collectives[op] == pytest.approx((1e-3, 1e-9))
        assert link.beside[op] == pytest.approx((2e-3, 0.5e-9))
    assert link.bytes_per_s == pytest.approx(0.75e9)
    assert device.calibration_of(_found(), 1, "torch", "cpu", 1).link is None


def test_one_rank_measures_and_the_planner_reads_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "WARM_S", 1e-4)
    monkeypatch.setattr(conversions, "SIZES", {"cpu": (60, 300)})
    monkeypatch.setattr(conversions, "POOL", 900)
    monkeypatch.setattr(disk, "UNIT_BYTES", 1 << 14)
    monkeypatch.setattr(disk, "ALONE_S", 1e-3)
    report, calibration = device.measured(1, [], 1, "cpu", 1, str(tmp_path / "disk"))
    asked = "matmul attention copy anew update bus gelu wire kernel hook step disk"
    assert {row["what"] for row in report.rows} == set(asked.split())
    device.write(report, calibration, tmp_path / "device.json")
    assert read_calibration(tmp_path / "device.json") == calibration
    there = calibration.device
    assert min(there.disk_walk_bytes_per_s, there.disk_gather_bytes_per_s, there.disk_write_bytes_per_s) > 0
    assert set(there.disk_beside_s) == {"walk", "gather", "write"}
    assert {name: set(shares) for name, shares in there.matmul_layouts.items()} == {
        "float32": {"nt", "tn", "nn"},
        "bfloat16": {"nt", "tn", "nn"},
    }
    gc.collect()
    assert not (tmp_path / "disk").exists()
    names = {f"{form} {kind}" for form in FORMATS for kind in CONVERSIONS}
    assert set(calibration.device.conversions) == names | {f"{form} decode" for form in WEIGHT_FORMATS}
    content = json.loads((tmp_path / "device.json").read_text())
    content["device"]["conversions"]["int8 sum"] = [0.0, -1.0]
    (tmp_path / "damaged.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="has a time that is not a number of seconds"):
        read_calibration(tmp_path / "damaged.json")
    content["device"] |= {"conversions": {}, "disk_beside_s": {"walks": 1e-9}}
    (tmp_path / "damaged.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"damaged \(device.disk_beside_s.walks"):
        read_calibration(tmp_path / "damaged.json")
    content["device"]["disk_beside_s"] = {"walk": -1e-9}
    (tmp_path / "damaged.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="has a time that is not a number of seconds"):
        read_calibration(tmp_path / "damaged.json")
    del content["device"]["disk_beside_s"]  # as earlier versions wrote it
    (tmp_path / "damaged.json").write_text(
        json.dumps({**content, "device": content["device"] | {"bus_bytes_per_s": -1}})
    )
    with pytest.raises(UserError, match="has a rate, size or share that is not a positive number"):
        read_calibration(tmp_path / "damaged.json")
    for layouts, said in (({"mm": 1.0}, r"damaged \(device.matmul_layouts.float32.mm"), ({"nn": 0.0}, "a rate, size")):
        broken = content["device"] | {"matmul_layouts": {"float32": layouts}}
        (tmp_path / "damaged.json").write_text(json.dumps({**content, "device": broken}))
        with pytest.raises(UserError, match=said):
            read_calibration(tmp_path / "damaged.json")
    del content["device"]["conversions"]  # as earlier versions wrote it
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert read_calibration(tmp_path / "old.json").device == replace(
        calibration.device, conversions={}, disk_beside_s={}
    )


@pytest.mark.parametrize("computes", [True, False])
def test_a_file_is_walked_and_gradients_are_written_beside_computation_where_that_is_wanted(
    computes, tmp_path, monkeypatch
):
    found, read, send = [], DiskStates.read, disk.GradSlots.send

    def told(call):
        names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
        return lambda *args: (found.append("zeroshard-computes" in names()), call(*args))[1]

    monkeypatch.setattr(disk, "UNIT_BYTES", 1 << 14)
    monkeypatch.setattr(DiskStates, "read", told(read))
    monkeypatch.setattr(disk.GradSlots, "send", told(send))
    monkeypatch.setattr(disk, "ALONE_S", 1e-3)
    for case in disk.cases(tmp_path / "disk", 0, computes=computes):
        found.clear()
        case.call()
        assert set(found) == {computes and case.name != "disk gather"}, case.name
        assert (case.lost_s is not None) == computes
        if case.lost_s is not None:
            found.clear()
            assert case.lost_s() >= 0
            assert set(found) == (set() if case.name == "disk gather" else {True})  # its gradients count as writes
    assert "zeroshard-computes" not in [thread.name for thread in threading.enumerate()]


def test_what_a_disk_costs_is_computation_that_is_missing_beside_it(monkeypatch):
    now, computation = [100.0], disk._Computation()
    monkeypatch.setattr(disk, "_Computation", lambda: computation)
    monkeypatch.setattr(disk.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(computation, "_multiply", lambda: None)

    def passes(seconds, done):
        def call(*_):
            now[0] += seconds
            computation.num_done += done

        return call

    monkeypatch.setattr(computation._thread, "start", lambda: None)
    monkeypatch.setattr(computation._thread, "join", lambda: None)
    monkeypatch.setattr(disk.time, "sleep", passes(2.0, 200))
    assert disk._lost_s(passes(3.0, 250)) == pytest.approx(0.5)  # 50 products of 10 ms
    assert disk._lost_s(passes(3.0, 400)) == 0  # others were at work before


def test_quantising_has_a_time_for_a_call_and_for_an_element():
    middle = {f"wire int8 {kind} {numel}": 1e-5 + numel * 2e-9 for kind in CONVERSIONS for numel in (10**4, 10**6)}
    amounts = {name: int(name.split()[-1]) * (2 if " sum " in name else 1) for name in middle}
    found = conversions.conversions_of(middle, amounts, device.fitted)
    assert found["int8 quantise stochastically"] == pytest.approx((1e-5, 2e-9))
    assert found["int8 sum"] == pytest.approx((0.5e-5, 1e-9))  # of each of two pieces


def _slowed(comm):
    seconds = device._slowing(comm, "all_reduce", 1 << 12, torch.device("cpu"))
    return isinstance(seconds(), float)


def test_ranks_that_talk_measure_what_computation_pays(gloo_ranks):
    assert gloo_ranks(2).run(_slowed) == [True, True]


def test_a_step_says_how_much_longer_its_operations_take_than_alone():
    """A step of 1.25 times the operations' sum; then a step that is planned takes 1.25 times as long."""
    plain = Device("cpu", 1 << 30, {"float32": 1e11}, 1e10, "here", device_type="cpu", kernel_s=1e-5)
    alone = Calibration(plain, Link("none", 0.0, 1e9, "here", num_ranks=2))
    shape = whole_step.SHAPE
    model = step.make_model(shape, "meta")
    planned = predicted_step(model, STAGES[1], 2, shape.batch, shape.seq_len, alone).compute_s
    slower = replace(plain, in_step=whole_step.in_step(1.25 * planned, plain))
    assert slower.in_step == pytest.approx(1.25)
    assert whole_step.in_step(1.25 * planned, slower) == pytest.approx(1.25)
    again = predicted_step(model, STAGES[1], 2, shape.batch, shape.seq_len, replace(alone, device=slower))
    assert again.compute_s == pytest.approx(1.25 * planned)


def test_a_bench_that_cannot_begin_leaves_no_file_and_keeps_what_was_there(tmp_path):
    out, before = tmp_path / "device.json", tmp_path / "before.json"
    before.write_text("{}")
    for path in (out, before):
        with pytest.raises(UserError, match=r"offload\.path"):
            laboratory.bench(None, ["device", "--nproc", "1", "--disk", "/proc/nope", "--out", str(path)])
    assert (out.exists(), before.read_text()) == (False, "{}")
