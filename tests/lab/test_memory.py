"""Formulas by hand; that the engine keeps them is shown in tests/budgets."""

import pytest
import torch

from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.zero import STAGES, FlatLayout, MixedPrecision

N, W = 1000, 4


def _buffer(world_size=W):
    return Buffer("root", "root", FlatLayout.of([("w", (N,))], world_size), torch.float32, trained=True)


def _total(stage, precision=None, **kwargs):
    return state_bytes([_buffer()], STAGES[stage], 1, OPTIMIZER_STATES["AdamW"], precision, **kwargs)


def test_sixteen_bytes_a_parameter_and_less_with_each_stage():
    """Rajbhandari et al. 2020, figure 1, in fp32: 4 for the weight, 4 for its gradient, 8 for Adam."""
    totals = [sum(_total(stage).values()) for stage in STAGES]
    scalars = [4 * W, 4, 4, 4]
    assert [total - own for total, own in zip(totals, scalars, strict=True)] == [
        16 * N,
        8 * N + 8 * N // W,
        4 * N + 12 * N // W,
        16 * N // W,
    ]


def test_mixed_precision_is_the_papers_sixteen_with_fp32_gradients():
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    assert _total(0, policy) == {"params": 2 * N, "grads": 4 * N, "master": 4 * N, "optimizer": 8 * N + 4 * W}
    assert _total(3, policy) == {"params": 0, "grads": N, "master": N, "optimizer": 2 * N + 4}


def test_on_a_gpu_a_replicated_parameter_is_one_piece():
    assert _total(0, device_type="cuda")["optimizer"] == 8 * N + 4
    assert _total(1, device_type="cuda")["optimizer"] == 2 * N + 4


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_holds_everything_at_every_stage(stage):
    found = state_bytes([_buffer(1)], STAGES[stage], 0, OPTIMIZER_STATES["AdamW"])
    assert found == {"params": 4 * N, "grads": 4 * N, "master": 0, "optimizer": 8 * N + 4}
