"""What must hold of any plan, whatever is trained: found wanting, it is the planner or the engine that is wrong."""

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from soak import examples
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.predict.memory import OPTIMIZER_STATES
from zeroshard.zero import STAGES

SETTINGS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["gpt2-demo", "llama-tiny"]),
        "optimizer": st.sampled_from(sorted(OPTIMIZER_STATES)),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "reduce_dtype": st.sampled_from([None, "float32", "bfloat16", "float16"]),
        "accumulate": st.sampled_from([None, "local", "sharded"]),
        "prefetch": st.integers(0, 3),
        "reshard_after_forward": st.booleans(),
        "overrides": st.fixed_dictionaries(
            {
                "n_layer": st.integers(1, 6),
                "n_head": st.just(4),
                "n_embd": st.sampled_from([16, 40, 128]),
                "vocab_size": st.sampled_from([61, 1000]),
                "activation_checkpointing": st.sampled_from(["none", "full", "selective", "selective:2", "every:2"]),
            }
        ),
    }
)
WORLDS = st.sampled_from([2, 3, 4, 8, 24, 64])


def _planner(given_, world_size, num_micro=1, micro_batch=1):
    rows = num_micro * micro_batch * world_size
    optimizer, _, state_format = given_["optimizer"].partition(" in ")
    how = {**given_, "optimizer": optimizer, "state_format": state_format or "fp32"}
    return planner_for(world_size=world_size, global_batch=rows, seq_len=32, gpu="h100-80gb", **how)


def _padding_bytes(planner, shards):
    """Of all that may be padded: weights, masters, gradients twice, states; and a step count of each piece.

    Where the number of GPUs is no power of two, a gradient is scaled in a copy: [Note: The mean] in `gradients`.
    """
    layouts = [buffer.layout for buffer in planner.workload.buffers(shards)]
    padded = sum(24 * (layout.padded_numel - layout.numel) + 16 * len(layout.slots) for layout in layouts)
    return padded + 8 * max(slot.numel for layout in layouts for slot in layout.slots)


@pytest.mark.redundant
@settings(max_examples=examples(5, 300), deadline=None, derandomize=True)
@given(SETTINGS, st.sampled_from(sorted(STAGES)), WORLDS, st.sampled_from([2, 3, 16]), st.integers(1, 3))
def test_more_gpus_never_need_more_memory_of_one_but_for_padding(chosen, stage, world_size, times, num_micro):
    few, many = (_planner(chosen, size, num_micro) for size in (world_size, world_size * times))
    before, after = (each.row(stage, 1).step.peak.total for each in (few, many))
    assert after <= before + _padding_bytes(many, world_size * times)


@pytest.mark.redundant
@settings(max_examples=examples(5, 300), deadline=None, derandomize=True)
@given(SETTINGS, WORLDS, st.integers(1, 3))
def test_a_higher_stage_never_holds_more_state(chosen, world_size, num_micro):
    planner = _planner(chosen, world_size, num_micro)
    held = [sum(planner.row(stage, 1).step.before_update.values()) for stage in STAGES]
    assert all(more >= less for more, less in pairwise(held)), held


@pytest.mark.redundant
@settings(max_examples=examples(5, 300), deadline=None, derandomize=True)
@given(SETTINGS, st.sampled_from(sorted(STAGES)), WORLDS, st.integers(1, 4), st.integers(1, 4))
def test_a_larger_micro_batch_never_needs_less_memory(chosen, stage, world_size, micro_batch, more):
    small = _planner(chosen, world_size, 1, micro_batch).row(stage, micro_batch)
    large = _planner(chosen, world_size, 1, micro_batch + more).row(stage, micro_batch + more)
    assert small.step.peak.total <= large.step.peak.total
    assert small.needed_bytes <= large.needed_bytes


@pytest.mark.redundant
@settings(max_examples=examples(5, 300), deadline=None, derandomize=True)
@given(SETTINGS, st.sampled_from(sorted(STAGES)), WORLDS, st.floats(1.01, 100), st.sampled_from(["within", "between"]))
def test_more_bandwidth_is_never_slower(chosen, stage, world_size, times, level):
    planner = _planner(chosen, world_size, 2)
    link = getattr(planner.cluster, level)
    fast = planner.on(**{level: replace(link, bytes_per_s=link.bytes_per_s * times)})
    slow_s, fast_s = (each.row(stage, 1).timing.step_s for each in (planner, fast))
    assert fast_s <= slow_s * (1 + 1e-9)


@pytest.mark.redundant
@settings(max_examples=examples(4, 300), deadline=None, derandomize=True)
@given(SETTINGS, st.sampled_from(sorted(STAGES)), st.sampled_from([8, 16, 64]), st.sampled_from([2, 16, 1024]))
def test_more_nodes_send_for_longer_and_save_no_more_than_their_optimizer_s_part(chosen, stage, world_size, times):
    """Of a step: its messages take longer, and all that is computed less of is the update of a smaller shard."""
    few, many = (_planner(chosen, size, 2).row(stage, 1).timing for size in (world_size, world_size * times))
    assert many.comm_s >= few.comm_s * (1 - 1e-9)
    assert many.exposed_s >= few.exposed_s * (1 - 1e-9)
