"""What a process holds beside the engine's exact account."""

from __future__ import annotations

from dataclasses import replace

from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.predict.actions import CATEGORIES, Moment
from zeroshard.lab.predict.process_memory import CONTEXT_BYTES, FRAGMENTS, LOGIT_BYTES, process_memory

PEAK = Moment({**dict.fromkeys(CATEGORIES, 0), "master": 10**9, "activations": 3 * 10**9, "temporaries": 10**9}, "")


def test_fragments_are_a_share_of_what_comes_and_goes_and_not_of_states():
    found = process_memory(PEAK, 10**9, "eager")
    assert (found.context, found.fragments, found.logits) == (CONTEXT_BYTES, round(FRAGMENTS * 4 * 10**9), 0)
    assert found.total == sum(found.as_dict().values())
    assert found.in_allocator == found.total - CONTEXT_BYTES


def test_compiled_code_keeps_all_logits_where_nothing_else_was_as_large():
    assert process_memory(PEAK, 10**9, "compile").logits == LOGIT_BYTES * 10**9 - 10**9
    assert process_memory(PEAK, 10**6, "compile").logits == 0


def test_a_plan_for_a_gpu_has_it_and_one_for_a_cpu_has_not():
    settings = {"overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2, "seq_len": 32}, "gpu": "a100-80gb"}
    planner = planner_for("gpt2-demo", **settings, impl="compile")
    row = planner.row(0, 2)
    assert row.process == process_memory(row.step.peak, 2 * 32 * 256, "compile")
    assert row.needed_bytes == row.step.peak.total + row.comm_bytes + row.process.total
    least, most = row.tokens_per_s_range
    assert least < row.tokens_per_s < most
    on_cpu = replace(planner, device=replace(planner.device, device_type="cpu", sustained="", matmul_share=1.0))
    assert on_cpu.row(0, 2).process.total == 0
    assert on_cpu.row(0, 2).tokens_per_s_range == (on_cpu.row(0, 2).tokens_per_s,) * 2


def test_eager_code_is_not_faster_than_its_host_issues_it():
    overrides = {"n_layer": 2, "n_embd": 64, "n_head": 2, "seq_len": 32}
    eager, fused = (planner_for("gpt2-demo", overrides=overrides, impl=impl) for impl in ("eager", "kernels"))
    assert eager.row(0, 1).timing.step_s > 2 * fused.row(0, 1).timing.step_s
    assert eager.row(0, 1).binds == "kernel launches"
