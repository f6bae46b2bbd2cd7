"""The figures that everybody knows come out, and where they are wrong it is said how (docs/accounting.md)."""

import pytest
import torch

from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.lab.predict.traffic import bytes_by_op, messages
from zeroshard.models import build_model
from zeroshard.zero import STAGES, FlatLayout, MixedPrecision
from zeroshard.zero.whole_tensors.layout import whole_layout

ADAMW = OPTIMIZER_STATES["AdamW"]
SIXTEEN = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class _Shapes(torch.nn.Module):
    """``numel`` parameters in 75 equal units, without memory."""

    def __init__(self, numel):
        super().__init__()
        with torch.device("meta"):
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(numel // 75, 1, bias=False) for _ in range(75))


def _states(model, stage, world_size, precision, optimizer=ADAMW):
    buffers = buffers_of(model, world_size)
    return state_bytes(buffers, STAGES[stage], 0, optimizer, precision, device_type="cuda")


@pytest.mark.parametrize(("name", "master", "measured"), [("AdamW8bit", 4, 1.3), ("FlashAdamW", 2, 1.5)])
def test_an_update_of_codes_takes_longer_on_a_cpu_than_its_bytes_and_than_adamw_s(name, master, measured):
    """`benchmarks/claims/low_bit_step.py` measures the ratio."""
    codes = OPTIMIZER_STATES[name]
    ours = (3 * master + codes.step_bytes(master)) * codes.cpu_factor
    assert ours / (3 * 4 + ADAMW.step_bytes(4)) == pytest.approx(measured, rel=0.05)
    assert ADAMW.cpu_factor == 1


def test_sixteen_bytes_a_parameter():
    """Weights and gradients in 16 bits, and in 32 bits master, mean and mean square: 2 + 2 + 4 + 4 + 4.

    Gradients that travel in the master's dtype are 4 instead of 2.
    """
    numel = 75 * 10**6
    found = _states(_Shapes(numel), 0, 1, SIXTEEN)
    small = 75 * 4  # step counts
    assert found["params"] == 2 * numel
    assert found["master"] == 4 * numel
    assert found["optimizer"] == 8 * numel + small
    assert found["grads"] == 2 * numel
    assert sum(found.values()) - small == 16 * numel
    wide = _states(_Shapes(numel), 0, 1, MixedPrecision(param_dtype=torch.bfloat16))
    assert sum(wide.values()) - small == 18 * numel


def test_ten_bytes_a_parameter_with_8_bit_states():
    """Weights and gradients in fp32, two moments of a byte and a 64th each: 4 + 4 + 2 (1 + 4 / 256)."""
    numel, num_units = 75 * 10**6, 75
    state = OPTIMIZER_STATES["AdamW8bit"]
    found = state_bytes(buffers_of(_Shapes(numel), 1, block=256), STAGES[0], 0, state, device_type="cuda")
    num_blocks = num_units * 3907  # of a unit of 10^6
    assert found["params"] == found["grads"] == 4 * 256 * num_blocks
    assert found["optimizer"] == 2 * numel + 8 * num_blocks + 4 * num_units
    assert sum(found.values()) / numel == pytest.approx(10.03, abs=0.005)


def test_seven_bytes_a_parameter_without_master_weights():
    """Weights and gradients in bf16, 8 bits more of each weight, two moments: 2 + 2 + 1 + 2 (1 + 4 / 256)."""
    numel, num_units = 75 * 10**6, 75
    model = _Shapes(numel)
    for param in model.parameters():
        param.data = param.data.bfloat16()
    state = OPTIMIZER_STATES["FlashAdamW"]
    found = state_bytes(buffers_of(model, 1, block=256), STAGES[0], 0, state, device_type="cuda")
    num_blocks = num_units * 3907
    assert found["params"] == found["grads"] == 2 * 256 * num_blocks
    assert found["optimizer"] == 3 * numel + 8 * num_blocks + 4 * num_units
    assert found["master"] == 0
    assert sum(found.values()) / numel == pytest.approx(7.03, abs=0.005)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_paper_s_table_for_seven_and_a_half_billion_parameters_on_64_gpus(stage, gigabytes):
    """Rajbhandari et al. 2020, table 1 and figure 1, of 2 + 2 + 12 bytes.

    At stage 3 the paper keeps a shard of 16-bit weights beside the master's, and we the master's alone.
    """
    numel, world_size = 75 * 10**8, 64
    found = _states(_Shapes(numel), stage, world_size, SIXTEEN)
    theirs = 2 * numel // world_size if stage == 3 else 0
    assert (sum(found.values()) + theirs) / 1e9 == pytest.approx(gigabytes, abs=0.06)


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_two_volumes_of_traffic_and_three_at_stage_three(stage, volumes):
    """Psi elements: an all-reduce sends 2 Psi, a reduce-scatter or an all-gather Psi; sections 7.1 and 7.2.

    Stage 3 gathers twice but what is still there: the weights of the root unit and of the last one, which backward
    needs first.
    """
    model = _Shapes(75 * 64)
    buffers = buffers_of(model, 64)
    found = bytes_by_op(messages(buffers, STAGES[stage], SIXTEEN))
    psi = 2 * 75 * 64
    still_there = 2 * buffers[-1].layout.padded_numel if stage == 3 else 0
    sent = 2 * found.get("all_reduce", 0) + found.get("reduce_scatter", 0) + found.get("all_gather", 0)
    assert sent == volumes * psi - still_there


def test_whole_parameters_cannot_be_shared_out_evenly():
    """GPT-2's token embedding is 31% of 124M parameters: its owner among 8 holds 2.5 times an eighth."""
    with torch.device("meta"):
        model = build_model("gpt2-124m")
    shapes = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    whole, flat = whole_layout(shapes, 8), FlatLayout.of(shapes, 8)
    assert whole.longest == 50257 * 768
    assert whole.longest * 8 / flat.numel == pytest.approx(2.48, abs=0.01)
    assert flat.shard_numel * 8 / flat.numel < 1.0001
