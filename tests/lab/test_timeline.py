from dataclasses import replace

import pytest

from zeroshard.lab.predict.actions import Compute, Issue, Message, Moment, Step, Wait
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.hardware import Device, Link
from zeroshard.lab.predict.timeline import operation_s, simulate
from zeroshard.lab.predict.work import Work

DEVICE = Device("test", 10**9, {"float32": 1e12}, 1e9, "invented", kernel_s=1e-6)
WITHIN = Link("within", 1e-6, 100e9, "invented", call_s=0.0, share=1.0)
BETWEEN = Link("between", 10e-6, 1e9, "invented", call_s=0.0, share=1.0)
SECOND = Work(10**12, 0, "float32")


def _step(actions, first=(), middle=(), num_middle=0, update=()):
    nothing = Moment({}, "")
    return Step(list(first), list(middle), num_middle, list(actions), list(update), nothing, {}, {}, {}, 1)


def _issue(number, num_bytes, op="all_gather", world_size=2):
    return Issue(number, Message(op, num_bytes, "u", "weights", world_size))


def _compute(*work):
    return Compute(work)


@pytest.mark.parametrize(
    ("work", "seconds", "limit"),
    [
        (Work(2 * 10**12, 1, "float32"), 2.0, "flops"),
        (Work(1, 3 * 10**9, "float32"), 3.0, "bytes"),
        (Work(1, 1, "float32"), 1e-6, "kernels"),
        (Work(10**12, 0, "int64"), 1.0, "flops"),
    ],
)
def test_an_operation_takes_as_long_as_what_limits_it(work, seconds, limit):
    assert operation_s(work, DEVICE) == (pytest.approx(seconds), limit)


def test_on_a_cpu_the_least_time_of_an_operation_comes_on_top():
    cpu = replace(DEVICE, device_type="cpu", kernel_s=0.5)
    assert operation_s(Work(2 * 10**12, 1, "float32"), cpu) == (pytest.approx(2.5), "flops")
    assert operation_s(Work(1, 1, "float32"), cpu) == (pytest.approx(0.5), "kernels")


def test_on_a_cpu_a_products_factors_come_from_memory_and_a_gelu_takes_what_was_measured():
    cpu = replace(DEVICE, device_type="cpu", kernel_s=0.5, gelu_s=1e-3)
    product = Work(2 * 10**12, 3 * 10**9, "float32", shape=(1, 10**4, 10**4, 10**4))
    assert operation_s(product, cpu)[0] == pytest.approx(2 + 3 + 0.5)
    slow = replace(cpu, matmul_layouts={"float32": {"nn": 0.5}, "bfloat16": {"nt": 0.1}})
    assert operation_s(replace(product, layout="nt"), slow)[0] == pytest.approx(2 + 3 + 0.5)
    assert operation_s(replace(product, layout="nn"), slow)[0] == pytest.approx(4 + 3 + 0.5)
    assert operation_s(replace(product, attention=True), cpu)[0] == pytest.approx(3 + 0.5)
    assert operation_s(Work(0, 10**9, "float32", num_gelus=4000), cpu)[0] == pytest.approx(4 + 0.5)
    assert operation_s(Work(0, 10**9, "float32", num_gelus=4000), DEVICE)[0] == pytest.approx(1)
    assert operation_s(Work(0, 0, "float32", num_hooks=2), replace(cpu, hook_s=0.25))[0] == pytest.approx(0.5)


def test_what_computation_covers_is_hidden_and_the_rest_exposed():
    """A gather of 1.5 s (half of 300e9 bytes over 100e9) beside 1 s of computation: 0.5 s are seen."""
    cluster = Cluster(2, 2, Link("l", 0.0, 100e9, "", call_s=0.0, share=1.0), BETWEEN)
    timing = simulate(_step([_issue(1, 300 * 10**9), _compute(SECOND), Wait(1)]), DEVICE, cluster)
    assert timing.step_s == pytest.approx(1.5)
    assert timing.compute_s == pytest.approx(1.0)
    assert timing.comm_s == pytest.approx(1.5)
    assert timing.exposed_s == pytest.approx(0.5)
    assert timing.bound_s == {"flops": pytest.approx(1.0)}


def test_collectives_run_one_after_the_other_and_not_before_they_are_issued():
    cluster = Cluster(2, 2, Link("l", 0.0, 100e9, "", call_s=0.0, share=1.0), BETWEEN)
    one = 200 * 10**9  # takes a second
    actions = [_compute(SECOND), _issue(1, one), _issue(2, one), _compute(SECOND), Wait(2)]
    timing = simulate(_step(actions), DEVICE, cluster)
    assert timing.step_s == pytest.approx(3.0)
    assert timing.exposed_s == pytest.approx(1.0)
    at_once = [_issue(1, one), _issue(2, one), Wait(2)]
    assert simulate(_step(at_once), DEVICE, cluster).step_s == pytest.approx(2.0)


@pytest.mark.parametrize(("slowing_s", "step_s"), [(0.0, 3.0), (0.25, 3.5), (1.0, 5.0), (1.5, 6.0)])
def test_while_collectives_run_computation_has_the_rest_of_the_cores(slowing_s, step_s):
    """Two collectives of 1 s beside 3 s of computation, from which each takes what was measured, and no more."""
    costs = {"all_gather": (1.0, 0.0)}
    link = replace(WITHIN, num_ranks=2, collectives=costs, beside={"all_gather": (slowing_s, 0.0)})
    actions = [_issue(1, 8), _issue(2, 8), _compute(SECOND, SECOND, SECOND), Wait(1), Wait(2)]
    timing = simulate(_step(actions), DEVICE, Cluster(2, 2, link, BETWEEN))
    assert timing.step_s == pytest.approx(step_s)
    assert timing.compute_s == pytest.approx(3.0)
    assert timing.exposed_s == pytest.approx(step_s - 3.0)


def test_what_is_left_of_a_collective_when_it_is_waited_for_runs_at_its_own_pace():
    """Half of a collective of 1 s passes beside 0.5 s of computation, at the cost of as much; half is waited for."""
    link = replace(WITHIN, num_ranks=2, collectives={"all_gather": (1.0, 0.0)}, beside={"all_gather": (0.5, 0.0)})
    actions = [_issue(1, 8), _compute(Work(10**12 // 4, 0, "float32")), Wait(1)]
    timing = simulate(_step(actions), DEVICE, Cluster(2, 2, link, BETWEEN))
    assert timing.step_s == pytest.approx(1.0)
    assert timing.exposed_s == pytest.approx(0.75)


def test_micro_batches_in_the_middle_count_as_often_as_they_are_there():
    cluster = Cluster(2, 2, WITHIN, BETWEEN)
    step = _step([_compute(SECOND)], first=[_compute(SECOND)], middle=[_compute(SECOND)], num_middle=6)
    assert simulate(step, DEVICE, cluster).step_s == pytest.approx(8.0)


def test_the_host_issues_operations_ahead_and_the_device_waits_only_for_what_is_not_issued():
    """0.1 s an operation: ten small ones take the host a second, in which a long one before them covers them."""
    gpu = replace(DEVICE, kernel_s=0.1)
    small, alone = [Work(0, 0, "float32")] * 10, Cluster(1, 1, WITHIN, BETWEEN)
    late = simulate(_step([_compute(*small), _compute(SECOND)]), gpu, alone)
    assert late.step_s == pytest.approx(1.0 + 1.0)
    assert late.bound_s["kernels"] == pytest.approx(1.0)
    assert (late.num_operations, late.issue_s) == (11, pytest.approx(1.1))
    ahead = simulate(_step([_compute(SECOND), _compute(*small)]), gpu, alone)
    assert ahead.step_s == pytest.approx(1.1)
    many = simulate(_step([], middle=[_compute(*small)], num_middle=100), gpu, alone)
    assert (many.step_s, many.num_operations) == (pytest.approx(100.0), 1000)
    assert simulate(_step([_compute(*small)]), replace(gpu, device_type="cpu"), alone).num_operations == 0


def test_a_measured_gpu_s_attention_is_slower_at_narrower_heads_than_measured_and_lost_bytes_take_time():
    shape, flops = (64, 2048, 2048, 128), 10**12
    at_shape = operation_s(Work(flops, 0, "float32", attention=True, shape=shape), DEVICE)[0]
    assert at_shape == pytest.approx(1.0)
    narrow = Work(flops, 0, "float32", attention=True, shape=(64, 1024, 1024, 64))
    assert operation_s(narrow, DEVICE)[0] == pytest.approx((2048 / 2348) / (0.88 * 1024 / 1324))
    assert operation_s(Work(0, 10**9, "float32", lost_bytes=10**9), DEVICE)[0] == pytest.approx(2.0)
    assert operation_s(Work(0, 10**9, "float32", lost_bytes=10**9), replace(DEVICE, matmul_share=0.5))[0] == 1.0
