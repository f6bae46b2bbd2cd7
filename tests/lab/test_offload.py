"""How long a step waits for the host: the formula against a clock that plays the same events."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from dry_run import compared
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.predict.hardware import Calibration, find_device, write_calibration
from zeroshard.lab.predict.offload import (
    ADAM_BYTES,
    OF_A_GATHER,
    UnitTimes,
    exposed_s,
    gathers_s,
    hidden_units,
    host_rates,
    least_away,
    read_again_s,
    share_of,
)
from zeroshard.settings.validate import validate
from zeroshard.train.profiling.devices import Device
from zeroshard.zero.offload.disk import BLOCK_BYTES


def _units(forward, updates, down=0.0, up=0.0):
    before = list(itertools.accumulate(forward, initial=0.0))
    total = sum(forward)
    backward = [2 * (total - end) for end in before[1:]]  # of the units after each, twice the forward
    left = [2 * total - each - 2 * own for each, own in zip(backward, forward, strict=True)]
    return [UnitTimes(b, at, down, u, up) for b, at, u in zip(before[:-1], left, updates, strict=True)]


def test_the_forward_waits_where_it_is_ahead_of_the_updates_and_at_least_for_the_first():
    assert exposed_s(_units([1, 1, 1, 1], [0.5] * 4)) == pytest.approx(0.5)  # the first alone
    assert exposed_s(_units([1, 1, 1, 1], [2.0] * 4)) == pytest.approx(8 - 3)
    assert exposed_s(_units([1, 1, 1, 1], [0.5, 0.5, 5.0, 0.5])) == pytest.approx(6 - 2)
    assert exposed_s([]) == 0


def test_copies_down_are_hidden_by_backward_except_the_last_and_copies_up_follow_their_updates():
    assert exposed_s(_units([1, 1], [0.25, 0.25], down=0.5)) == pytest.approx(0.5 + 0.25)
    assert exposed_s(_units([1, 1], [0.25, 0.25], down=3)) == pytest.approx(6 - 2 + 0.25)
    assert exposed_s(_units([1, 1], [0.25, 0.25], up=2)) == pytest.approx(0.25 + 4 - 1)


def test_a_unit_waits_for_the_disk_which_reads_ahead_and_writes_behind():
    def on_disk(forward, updates, disk, **more):
        return [replace(unit, disk_s=disk, **more) for unit in _units(forward, updates)]

    assert exposed_s(on_disk([1] * 4, [0.5] * 4, 1)) == pytest.approx(0.5 + 0.5)  # the first is read, then updated
    assert exposed_s(on_disk([1] * 4, [0.5] * 4, 3)) == pytest.approx(3 * 3 + 1.5 + 0.5 - 3)  # the last one
    assert exposed_s(on_disk([1] * 4, [0.5] * 4, 1, grads_s=0.25)) == pytest.approx(0.25 + 1)
    assert exposed_s(on_disk([1] * 2, [0.5] * 2, 1, grads_s=9)) > 18 - 3  # written until long after backward


def test_on_a_cpu_updates_take_their_time_from_the_forward_and_only_a_slow_disk_is_waited_for():
    def exposed(disk):
        return exposed_s([replace(unit, disk_s=disk) for unit in _units([1] * 4, [0.5] * 4)], same_cores=True)

    assert exposed(0) == pytest.approx(4 * 0.5)
    assert exposed(1) == pytest.approx(4 * 0.5 + 0.5)  # nothing is computed while the first unit is read
    assert exposed(3) == pytest.approx(3 * 3 + 1.5 + 0.5 - 3)


def test_what_a_disk_takes_from_the_cores_that_compute_is_exposed_and_hides_what_it_takes_longer():
    def exposed(disk, beside):
        units = [replace(unit, disk_s=disk, disk_beside_s=beside) for unit in _units([1] * 4, [0.5] * 4)]
        return exposed_s(units, same_cores=True)

    assert exposed(0, 0.25) == pytest.approx(4 * (0.5 + 0.25))
    assert exposed(1, 0.25) == pytest.approx(4 * (0.5 + 0.25) + 0.25)  # less is waited for before the first unit
    assert exposed(9, 0.25) == exposed(9, 0) == pytest.approx(3 * 9 + 4.5 + 0.5 - 3)  # the disk has yet more to do
    units = [replace(unit, gather_s=3.0, gather_beside_s=0.5) for unit in _units([1, 2, 4, 9], [0.5] * 4)]
    assert gathers_s(units, backward=False) == pytest.approx(3 + (3 - 1) + (3 - 2) + 0.5)


def test_what_a_disk_costs_beside_computation_is_in_the_time_of_a_plan(tmp_path):
    model = {"name": "llama-tiny", "n_layer": 6, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}
    settings = {"seq_len": 64, "micro_batch": 1, "stage": "3", "gpus": 2, "offload": "disk-all", "json": True}
    settings |= {"dtype": "float32"}
    rates = dict.fromkeys((f"disk_{kind}_bytes_per_s" for kind in ("walk", "gather", "write")), 1e15)
    device = Device("cpu", 2**34, {"float32": 1e11}, 1e10, "a test", device_type="cpu", update_bytes_per_s=1e10)
    device = replace(device, bus_bytes_per_s=1e10, **rates)

    def planned(**beside):
        write_calibration(path := tmp_path / "cpu.json", Calibration(replace(device, disk_beside_s=beside)))
        [row] = json.loads(answer_plan(validate(PlanConfig, {"model": model, **settings, "gpu": str(path)})).text)[
            "rows"
        ]
        return row["step_s"]

    without, numel = planned(), 170_400 // 2
    added = {kind: (planned(**{kind: 1e-6}) - without) / 1e-6 for kind in ("walk", "gather", "write")}
    # read and written: the master and two states; read alone: the gradient; gathered once, in backward
    assert added == pytest.approx({"walk": (12 + 4 / 2) * numel, "gather": 4 * numel, "write": 4 * numel}, rel=1e-3)


def test_a_forward_reads_weights_from_the_file_only_where_it_comes_long_after_their_update():
    def found(disk, before):
        units = [replace(unit, disk_s=disk, gather_s=1.0) for unit in _units([before] * 4, [0.5] * 4)]
        return read_again_s(units), read_again_s(units, same_cores=True)

    assert found(3, 1) == (0, 0)  # it waits for each update
    assert found(0.75, 9) == (3, 3)  # for the first alone
    assert found(1.0, 1.75) == (2, 3)  # the second comes before a slot has another unit


def test_weights_are_read_from_the_file_while_the_unit_before_computes():
    units = [replace(unit, gather_s=3.0) for unit in _units([1, 2, 4, 9], [0.5] * 4)]
    ends = [
        0.0,
        2.0,
        6.0,
        14.0,
    ]  # of each unit in backward, counted from its end: they take 2, 4 and 8, the last as well
    units = [replace(unit, left_s=left) for unit, left in zip(units, ends, strict=True)]
    assert gathers_s(units, backward=False) == pytest.approx(3 + (3 - 1) + (3 - 2) + 3 * OF_A_GATHER)
    assert gathers_s(units, backward=True) == pytest.approx(3 + 3 * OF_A_GATHER + 3 * OF_A_GATHER + 3 * OF_A_GATHER)
    slow = [replace(unit, gather_s=7.0) for unit in units]
    assert gathers_s(slow, backward=True) == pytest.approx(7 + 7 * OF_A_GATHER + 7 * OF_A_GATHER + (7 - 4))
    assert gathers_s(units[:1], backward=True) == 3
    assert gathers_s([], backward=False) == 0


def test_the_units_that_are_used_first_stay_and_the_others_cost_nothing():
    units = _units([1] * 6, [0.6] * 6)
    assert hidden_units(units) == 5  # all but the first, which nothing hides
    units = _units([1] * 6, [1.5] * 6)
    num_units = hidden_units(units)
    assert num_units == 3  # 3 x 1.5 within ... the first 3 of the forward
    assert exposed_s(units[-num_units:]) == 0 < exposed_s(units[-num_units - 1 :])
    assert hidden_units(_units([1] * 4, [100.0] * 4)) == 0


def test_rates_are_those_measured_or_else_a_nodes_shared_out_to_its_ranks():
    device = find_device("h100-80gb").device
    one, eight = host_rates(device, 1), host_rates(device, 8)
    assert one.update_bytes_per_s == 8 * eight.update_bytes_per_s == 4.5e9 * ADAM_BYTES
    assert one.bus_bytes_per_s == eight.bus_bytes_per_s < 63e9
    half, full = (find_device(name).device for name in ("rtx-4060-8gb", "rtx-4090-24gb"))
    assert host_rates(full, 1).bus_bytes_per_s == 2 * host_rates(half, 1).bus_bytes_per_s  # 16 lanes, and 8
    assert not one.measured
    measured = host_rates(replace(device, update_bytes_per_s=1e9, bus_bytes_per_s=2e9), 8)
    assert (measured.update_bytes_per_s, measured.bus_bytes_per_s, measured.measured) == (1e9, 2e9, True)


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("stage", "state"), [*product("023", ("optimizer", "all")), *product("13", ("disk", "disk-all"))]
)
def test_a_dry_run_holds_on_the_host_what_was_planned(stage, state):
    """The plan is for a GPU, whose gradients leave; the dry run is of this machine."""
    model = {"name": "llama-tiny", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}
    settings = {"gpus": 2, "seq_len": 16, "micro_batch": 2, "stage": stage}
    offload = {"state": state, "fraction": "1"}
    config = validate(PlanConfig, {"model": model, "offload": offload, **settings})
    found = compared(config)
    kept = ("disk_master", "disk_optimizer", "host_slots") if "disk" in state else ("host_master",)
    kept += ("disk_grads",) if state == "disk-all" else ("host_grads",)
    for name in ("params", "host_params", "host_optimizer", *kept, "messages", "message bytes"):
        assert found[name]["predicted"] == found[name]["measured"], name
    assert all(found[name]["measured"] > 0 for name in ("host_optimizer", *kept))
    assert (found["host_params"]["measured"] > 0) == (state == "all" and stage == "3")
    assert abs(found["peak"]["predicted"] - found["peak"]["measured"]) <= 2048


@pytest.mark.redundant(but=["disk-all"])
@pytest.mark.parametrize("state", ["all", "disk-all"])
def test_a_dry_run_of_one_rank_frees_weights_as_planned(state):
    model = {"name": "llama-tiny", "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}
    settings = {"gpus": 1, "seq_len": 16, "micro_batch": 2, "dtype": "bfloat16"}
    peaks = {}
    for stage in "23":
        offload = {"state": state, "fraction": "1"}
        found = compared(validate(PlanConfig, {"model": model, **settings, "stage": stage, "offload": offload}))
        for name in ("params", "host_params", "host_optimizer", "messages", "message bytes"):
            assert found[name]["predicted"] == found[name]["measured"], name
        assert abs(found["peak"]["predicted"] - found["peak"]["measured"]) <= 2048
        assert (found["params"]["measured"] == 0) == (stage == "3")
        peaks[stage] = found["peak"]["measured"] - found["host_params"]["measured"]
    assert peaks["3"] < peaks["2"]


def test_a_plan_of_one_gpu_has_a_row_of_streamed_weights(tmp_path):
    """Of weights that take more than the GPU has; the command that is printed names the stage."""
    device = replace(find_device("rtx-4090").device, memory_bytes=6 << 30)
    write_calibration(path := tmp_path / "gpu.json", Calibration(device))
    model = {"name": "llama-7b", "activation_checkpointing": "full", "n_layer": 16}
    given = {"model": model, "seq_len": 512, "gpu": str(path), "micro_batch": 1}
    given |= {"offload": {"state": "all", "fraction": "1"}}
    rows = json.loads(answer_plan(validate(PlanConfig, {**given, "json": True})).text)["rows"]
    assert [(row["stage"], row["fits"]) for row in rows] == [(0, False), (1, False), (2, False), (3, True)]
    resident = [row["resident_bytes"]["before_update"] for row in rows]
    assert resident[3]["params"] == 0
    assert resident[3]["host_params"] == resident[0]["params"]
    text = answer_plan(validate(PlanConfig, given)).text
    assert "0, 1, 2" in text
    assert "Take stage 3, micro-batch 1, the lowest stage that fits with room" in text
    assert "--strategy zero3" in text
    given |= {"model": {**model, "n_layer": 2}, "offload": {"state": "optimizer", "fraction": "1"}, "json": True}
    rows = json.loads(answer_plan(validate(PlanConfig, given)).text)["rows"]
    assert [row["stage"] for row in rows] == [0]  # the others are the same


@pytest.mark.redundant(but=["3-disk-all-2"])
@pytest.mark.pairwise
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("state", ["all", "disk-all"])
@pytest.mark.parametrize("stage", "0123")
def test_a_dry_run_of_adapters_holds_what_was_planned(stage, state, gpus):
    model = {"name": "llama-tiny", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}
    settings = {"gpus": gpus, "seq_len": 16, "micro_batch": 2, "stage": stage, "lora": {"rank": 2}}
    settings |= {"offload": {"state": state, "fraction": "1"}}
    found = compared(validate(PlanConfig, {"model": model, **settings}))
    for name in ("params", "host_params", "host_optimizer", "messages", "message bytes"):
        assert found[name]["predicted"] == found[name]["measured"], name
    frozen = found["host_params"]["measured"]
    assert (frozen > 8 * found["host_optimizer"]["measured"]) == (stage == "3")  # the base
    assert abs(found["peak"]["predicted"] - found["peak"]["measured"]) <= 2048


def test_a_plan_says_what_is_in_the_file_and_what_a_day_writes_to_it():
    model = {"name": "llama-tiny", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}
    settings = {"gpus": 2, "gpu": "h100-80gb", "seq_len": 16, "micro_batch": 2, "stage": "2", "offload": "disk"}
    found = answer_plan(validate(PlanConfig, {"model": model, **settings})).text
    [row] = json.loads(answer_plan(validate(PlanConfig, {"model": model, **settings, "json": True})).text)["rows"]
    resident, off = row["resident_bytes"]["before_update"], row["offload"]
    stored = resident["disk_master"] + resident["disk_optimizer"]
    assert stored <= off["file_bytes"] <= stored + 3 * 3 * BLOCK_BYTES  # masters and states of three units
    assert off["host_bytes"] == sum(n for name, n in resident.items() if name.startswith("host_"))
    assert off["fraction"] == 1  # the rates of the disk are not known
    assert off["node_written_bytes_per_day"] == pytest.approx(2 * off["file_bytes"] * 86_400 / row["step_s"])
    assert f"{off['node_written_bytes_per_day'] / 2**40:,.1f} TiB written a day" in found


@pytest.mark.parametrize(("fewest", "found"), [(0, 3), (3, 3), (4, 4), (7, 7), (8, 8), (99, 8)])
def test_no_more_leaves_than_must(fewest, found):
    assert least_away(3, 8, lambda num_away: float(num_away - fewest)) == found


@pytest.mark.parametrize(
    ("left", "most"), [(lambda num: 7.0 * num - 258, 4), (lambda num: 1.0 if num > 36 else -1e9, 14)]
)
def test_few_numbers_of_units_are_tried_if_memory_grows_with_them_and_not_many_if_not(left, most):
    tried = []
    assert least_away(0, 80, lambda num: tried.append(num) or left(num)) == 37
    assert len(tried) <= most


@pytest.mark.parametrize("sizes", [[7, 1, 3], [10**9, *[1] * 7], [123_456_789] * 33])
def test_a_share_is_a_short_number_that_takes_those_units_and_no_other(sizes):
    buffers = [SimpleNamespace(unit=place, layout=SimpleNamespace(numel=size)) for place, size in enumerate(sizes)]
    for number in range(len(sizes) + 1):
        share = share_of(buffers, number)
        away = next(n for n in range(len(sizes) + 1) if sum(sizes[len(sizes) - n :]) >= share * sum(sizes))
        assert away == number
        assert len(str(share)) <= 4 or max(sizes) == 10**9


@pytest.mark.redundant
def test_rates_of_a_disk_are_in_the_time_of_a_plan_and_choose_what_leaves(tmp_path):
    """A GPU whose host updates at once and whose disk is fast, slow, or not measured."""
    model = {"name": "llama-tiny", "n_layer": 6, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}
    settings = {"seq_len": 512, "micro_batch": 4, "stage": "3", "gpus": 2, "offload": "disk-all", "json": True}
    device = replace(find_device("h100-80gb").device, update_bytes_per_s=1e15, bus_bytes_per_s=1e15)

    def planned(rate):
        rates = dict.fromkeys((f"disk_{kind}_bytes_per_s" for kind in ("walk", "gather", "write")), rate)
        write_calibration(path := tmp_path / "gpu.json", Calibration(replace(device, **rates)))
        settings_now = {**settings, "gpu": str(path)}
        [row] = json.loads(answer_plan(validate(PlanConfig, {"model": model, **settings_now})).text)["rows"]
        text = answer_plan(validate(PlanConfig, {"model": model, **settings_now, "json": False})).text
        return row["step_s"], row.get("offload"), "No time of the disk" in text

    unknown_s, unknown, says_so = planned(0)
    assert (unknown["fraction"], unknown["has_disk_rates"], says_so) == (1, False, True)
    fast_s, fast, says_so = planned(1e15)
    assert (0 < fast["fraction"] < 1, says_so) == (True, False)
    assert fast_s == pytest.approx(unknown_s, rel=1e-2)
    _, slow, _ = planned(1e6)
    assert slow is None  # nothing hides the update of a unit, and all of it fits the device


MODEL = {"name": "llama-tiny", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}


def _planned(**settings):
    all_state = {"state": "optimizer", "fraction": "1"}
    given = {"gpus": 4, "gpus_per_node": 2, "seq_len": 16, "micro_batch": 2, "offload": all_state, **settings}
    return answer_plan(validate(PlanConfig, {"model": MODEL, **given}))


def test_state_for_which_a_nodes_host_has_no_memory_is_refused_as_before_a_run():
    rows = json.loads(_planned(json=True, stage="2").text)["rows"]
    assert all(row["node_host_bytes"] == 2 * row["offload"]["host_bytes"] for row in rows)
    needed = min(row["node_host_bytes"] for row in rows)
    text = _planned(stage="2", host_memory=f"{needed}B").text
    assert f"{needed / 2**10:.1f} KiB of a node's host, which has {needed / 2**10:.1f} KiB" in text
    assert "--host-memory says how much it has" in _planned(stage="2").text
    with pytest.raises(UserError) as error:
        _planned(stage="2", host_memory=f"{needed - 1}B")
    assert str(error.value) == (
        "offload.state: 2 ranks keep 0.00 GiB in memory of a node, which has 0.00 GiB; give a smaller "
        "--offload.fraction, use more machines, or fewer ranks"
    )
    [row] = json.loads(_planned(json=True, stage="2", offload="none", host_memory="1B").text)["rows"][:1]
    assert row["fits"]  # nothing is on the host


def test_a_stage_that_keeps_too_much_on_the_host_does_not_fit_and_others_are_recommended():
    rows = json.loads(_planned(json=True).text)["rows"]
    most, *_, least = sorted(row["node_host_bytes"] for row in rows)[::-1]
    assert least < most
    found = json.loads(_planned(json=True, host_memory=f"{most - 1}B").text)
    out = [row for row in found["rows"] if not row["fits"]]
    assert found["host_memory_bytes"] == most - 1
    assert {row["binds"] for row in out} == {"host memory"}
    assert all((row["node_host_bytes"] >= most) == (not row["fits"]) for row in found["rows"])
    assert found["rows"][found["best"]]["fits"]


def test_memory_of_the_host_is_that_of_the_machine_that_was_measured(tmp_path):
    device = replace(find_device("h100-80gb").device, host_memory_bytes=1 << 10)
    write_calibration(path := tmp_path / "gpu.json", Calibration(device))
    with pytest.raises(UserError, match=r"^offload.state: 2 ranks keep .* in memory of a node"):
        _planned(gpu=str(path))
    assert json.loads(_planned(gpu=str(path), host_memory="1GiB", json=True).text)["host_memory_bytes"] == 1 << 30
    with pytest.raises(UserError, match=r"^host_memory: '5' is not a size; write a number and a unit"):
        _planned(host_memory="5")


def test_inputs_of_blocks_that_wait_on_the_host_count_there():
    model = {**MODEL, "activation_checkpointing": "offload"}
    given = {"model": model, "seq_len": 16, "micro_batch": 2, "stage": "0"}
    found = json.loads(answer_plan(validate(PlanConfig, {**given, "json": True})).text)["rows"][0]
    assert found["node_host_bytes"] == found["host_input_bytes"] > 0
    with pytest.raises(UserError, match=r"^model.activation_checkpointing: 1 rank keeps .*; recompute the inputs"):
        answer_plan(validate(PlanConfig, {**given, "host_memory": "1B"}))
