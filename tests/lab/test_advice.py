"""What a plan advises where nothing fits, held against an exhaustive search over the same levers."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from lab.small_plans import SMALL, small_gpu
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.changes import LORA_RANK, found_by_fit
from zeroshard.lab.planner.fit import every_lever, flags_of, with_levers
from zeroshard.lab.planner.plan import plan
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.planner.ways import Ways
from zeroshard.lab.predict import engine, model_trace
from zeroshard.models import llama
from zeroshard.models.adapters import Lora
from zeroshard.train.profiling.devices import DEVICES

WAYS = Ways((0, 1, 2, 3))
B32 = {"n_layer": 64, "n_head": 40, "n_kv_head": 8, "n_embd": 5120, "ffn_hidden": 27648, "vocab_size": 152064}
B70 = {"n_layer": 80, "n_head": 64, "n_kv_head": 8, "n_embd": 8192, "ffn_hidden": 28672}
REAL = {  # model, GPUs, their kind, and bytes of each
    "8b-1x12": ({}, 1, "rtx-4090-24gb", 12 * 2**30),
    "8b-1x24": ({}, 1, "rtx-4090-24gb", 0),
    "8b-1x48": ({}, 1, "rtx-6000-ada-48gb", 0),
    "8b-1x80": ({}, 1, "h100-80gb", 0),
    "8b-4x24": ({}, 4, "rtx-4090-24gb", 0),
    "32b-1x80": (B32, 1, "h100-80gb", 0),
    "32b-4x24": (B32, 4, "rtx-4090-24gb", 0),
    "70b-8x80": (B70, 8, "h100-80gb", 0),
}
SMALL_ONES = [(1, 0.55), (2, 0.2), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(1, 0.25), (2, 0.5)])]


def small(num_gpus, share):
    """A small model on GPUs that have ``share`` of what it needs beside the process's own memory."""
    gpu = replace(small_gpu(2**40), device_type="cuda")
    overrides = {**SMALL, "n_kv_head": 2, "seq_len": 256, "vocab_size": 2048}
    planner = planner_for("llama-tiny", world_size=num_gpus, gpu=gpu, overrides=overrides)
    row = planner.row(0, 1)
    own = row.process.context + row.process.comm_buffers + row.process.workspace
    there = own + share * (row.needed_bytes - own)
    return planner.on(device=replace(gpu, memory_bytes=round(there / 0.98)))


def real(question):
    overrides, num_gpus, name, memory_bytes = REAL[question]
    device = DEVICES[name]
    gpu = replace(device, memory_bytes=memory_bytes) if memory_bytes else device
    return planner_for("llama-8b", world_size=num_gpus, gpu=gpu, overrides=overrides)


def every_set(planner):
    """All sets of levers that go together, the smallest first."""
    pulled = every_lever(planner, WAYS)
    for size in range(len(pulled) + 1):
        for some in combinations(pulled, size):
            if len(flags_of(some)) == len(some):
                try:
                    yield with_levers(planner, some, WAYS)
                except UserError:
                    continue


def held_against_the_search(planner):
    """Each change that is listed is that of the search: it fits if any set of levers does, and pulls none too many."""
    listed = {each.what.partition(" (")[0]: each for each in found_by_fit(planner, WAYS)}
    asked = {
        "the job as it is": planner,
        "LoRA": planner.on(workload=planner.workload.changed(lora=Lora(LORA_RANK))),
    }
    for what, job in asked.items():
        fitting = [set(each.flags) for each in every_set(job) if each.fits]
        assert listed[what].row.fits == bool(fitting), what
        if fitting:
            flags = set(listed[what].flags)
            assert flags in fitting, what
            assert not any(each < flags for each in fitting), what
    seq_len, length = planner.workload.seq_len, 0
    while seq_len > 1 and not length:
        seq_len //= 2
        job = planner.on(workload=planner.workload.changed(seq_len=seq_len))
        length = seq_len if any(each.fits for each in every_set(job)) else 0
    shorter = [name for name in listed if name.startswith("sequences of ")]
    assert shorter == ([f"sequences of {length} tokens"] if length else [])
    return listed


@pytest.mark.redundant(but=["2-0.2"])
@pytest.mark.parametrize(("num_gpus", "share"), SMALL_ONES)
def test_what_is_listed_is_what_a_search_over_all_sets_of_levers_finds(num_gpus, share):
    """`held_against_the_search` asserts it."""
    pytest.importorskip("peft")
    held_against_the_search(small(num_gpus, share))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("question", REAL)
def test_what_is_listed_for_real_models_is_what_the_search_finds(question):
    """`held_against_the_search` asserts it."""
    pytest.importorskip("peft")
    held_against_the_search(real(question))


def test_where_nothing_helps_no_lever_is_planned_to_its_row(monkeypatch):
    """The table's row is recorded, and no other; three further traces say that no number of GPUs is enough.

    A job with another recomputation or length is not built anew: four blocks of it are, to be checked.
    """
    pytest.importorskip("peft")
    num = Counter()

    def counted(module, name, what):
        inner = getattr(module, name)

        def call(*args, **kwargs):
            num[what] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(model_trace, "_trace", "traces")
    counted(engine, "_Engine", "recordings")
    counted(llama, "Block", "blocks")
    gpu = replace(small_gpu(2**18), device_type="cuda")
    found = plan("llama-tiny", gpu=gpu, overrides={**SMALL, "n_layer": 31, "seq_len": 72})
    assert found.advice.endswith("no single change helps: take a larger GPU or a smaller model.")
    assert (num["traces"], num["recordings"]) == (4, 1)
    assert num["blocks"] <= 140  # 31 of the job, 31 with adapters
