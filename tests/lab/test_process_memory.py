"""What a process holds beside the engine's exact account."""

from dataclasses import replace

import pytest

from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.predict.actions import CATEGORIES, Moment, Step
from zeroshard.lab.predict.hardware import DEVICES
from zeroshard.lab.predict.process_memory import (
    COMPILED_LOGIT_BYTES,
    CONTEXT_BYTES,
    FRAGMENTS,
    NCCL_BYTES,
    NCCL_PAIR_BYTES,
    PLAIN_LOGIT_BYTES,
    PLAIN_LOGIT_HOLE_BYTES,
    Process,
    ProcessMemory,
    process_memory,
)
from zeroshard.lab.predict.rates import Software

H100 = DEVICES["h100-80gb"]
EAGER, COMPILED, FUSED = (Software(impl) for impl in ("eager", "compile", "kernels"))
DEMO = {"n_layer": 2, "n_embd": 64, "n_head": 2, "seq_len": 32}
GB = 10**9


def _moment(**gb):
    return Moment({**dict.fromkeys(CATEGORIES, 0), **{name: round(each * GB) for name, each in gb.items()}}, "")


def _step(peak, at_loss=None, grads=0):
    return Step([], [], 0, [], [], peak, {}, {"grads": grads * GB}, {}, 1, at_loss)


PEAK = _moment(master=1, optimizer=2, grads=3, activations=3, temporaries=1)
AT_LOSS = _moment(master=1, optimizer=2, activations=5)


def test_fragments_are_a_share_of_what_comes_and_goes_and_not_of_states():
    found = process_memory(_step(PEAK), H100, EAGER, Process())
    assert (found.context, found.fragments, found.logits) == (CONTEXT_BYTES, round(FRAGMENTS * 4 * GB), 0)
    assert found.total == sum(found.as_dict().values())
    assert found.reserved == found.total - CONTEXT_BYTES
    assert found.allocated == found.reserved - found.fragments


def test_each_group_of_ranks_has_buffers_of_its_own_and_one_rank_none():
    sizes = {(1,): 0, (2,): NCCL_PAIR_BYTES, (8, 1): NCCL_BYTES, (8, 2): NCCL_BYTES + NCCL_PAIR_BYTES}
    for groups, num_bytes in sizes.items():
        assert process_memory(_step(PEAK), H100, EAGER, Process(group_sizes=groups)).comm_buffers == num_bytes


@pytest.mark.parametrize(
    ("software", "own_loss", "allocated", "unused"),
    [
        (FUSED, True, 0, 0),
        (COMPILED, True, 0, 0),  # our own loss
        (COMPILED, False, 0, 0),  # compiled with the model: the trace has it
        (replace(COMPILED, loss="compiled"), True, COMPILED_LOGIT_BYTES, 0),
        (replace(COMPILED, loss="plain"), True, PLAIN_LOGIT_BYTES, PLAIN_LOGIT_HOLE_BYTES),
        (replace(COMPILED, loss="chunked"), True, 0, 0),
        (EAGER, False, 0, PLAIN_LOGIT_HOLE_BYTES),  # the trace has them
        (EAGER, True, 0, 0),  # eager code with our own loss
    ],
)
def test_logits_are_there_with_all_activations_by_how_the_loss_is_computed(software, own_loss, allocated, unused):
    what = Process(num_logits=GB, own_loss=own_loss)
    found = process_memory(_step(AT_LOSS, AT_LOSS), H100, software, what)
    assert (found.logits, found.freed) == (allocated * GB, unused * GB)


def test_logits_that_are_less_than_the_peak_elsewhere_cost_nothing():
    what, apart = Process(num_logits=GB // 8, own_loss=True), replace(COMPILED, loss="compiled")
    found = process_memory(_step(PEAK, AT_LOSS), H100, apart, what)
    assert (found.logits, found.freed) == (0, 0)
    more = process_memory(_step(PEAK, AT_LOSS), H100, apart, replace(what, num_logits=GB))
    assert more.logits == (8 + COMPILED_LOGIT_BYTES - 10) * GB  # of another moment than the peak


def test_shards_of_gradients_leave_room_that_nothing_fits_into_and_whole_ones_do_not():
    freed = {
        shards: process_memory(_step(AT_LOSS, AT_LOSS, grads=4), H100, FUSED, Process(shards_grads=shards)).freed
        for shards in (False, True)
    }
    assert freed == {False: 0, True: 4 * GB}
    # where they are there at the fullest moment, they are counted already
    assert process_memory(_step(PEAK, grads=3), H100, FUSED, Process(shards_grads=True)).freed == 0


def test_compiled_code_keeps_nothing_that_backward_does_not_read():
    assert process_memory(_step(AT_LOSS), H100, COMPILED, Process(unread_bytes=GB)).compiled == -GB
    assert process_memory(_step(AT_LOSS), H100, EAGER, Process(unread_bytes=GB)).compiled == 0


def test_the_last_product_of_a_block_is_an_odd_one_in_a_llama_and_an_even_one_in_a_gpt2():
    def unread(name, how):
        heads = {"n_head": 2, "n_kv_head": 2} if name == "llama-tiny" else {"n_head": 2}
        overrides = {"n_layer": 2, "n_embd": 64, **heads, "activation_checkpointing": how}
        return planner_for(name, overrides=overrides, seq_len=32).workload.unread_bytes(3)

    names, ways = ("gpt2-demo", "llama-tiny"), ("none", "full", "selective", "selective:2")
    kept = {(name, how): unread(name, how) for name in names for how in ways}
    one = 3 * 32 * 64 * 2 * 2  # rows, tokens, width, blocks, bytes
    assert {key for key, num_bytes in kept.items() if num_bytes} == {
        ("gpt2-demo", "selective"),
        ("llama-tiny", "selective"),
        ("llama-tiny", "selective:2"),
    }
    assert set(kept.values()) == {0, one}


@pytest.mark.redundant
def test_a_plan_for_a_gpu_has_it_and_one_for_a_cpu_has_not():
    planner = planner_for("gpt2-demo", overrides=DEMO, gpu="a100-80gb", impl="compile")
    row = planner.row(0, 2)
    what = Process(num_logits=2 * 32 * 256, group_sizes=(1, 1), own_loss=True)
    assert row.process == process_memory(row.step, planner.device, planner.software, what)
    assert row.needed_bytes == row.step.peak.total + row.process.total
    least, most = row.tokens_per_s_range
    assert least < row.tokens_per_s < most
    on_cpu = replace(planner, device=replace(planner.device, device_type="cpu", sustained="", matmul_share=1.0))
    assert on_cpu.row(0, 2).process == ProcessMemory()
    assert on_cpu.row(0, 2).tokens_per_s_range == (on_cpu.row(0, 2).tokens_per_s,) * 2


@pytest.mark.redundant
def test_eager_code_is_not_faster_than_its_host_issues_it():
    eager, fused = (planner_for("gpt2-demo", overrides=DEMO, impl=impl) for impl in ("eager", "kernels"))
    assert eager.row(0, 1).timing.step_s > 1.9 * fused.row(0, 1).timing.step_s
    assert eager.row(0, 1).binds == "kernel launches"
