"""States in fewer bits: right on average, the same for any pieces, and what cannot be rounded stays."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.kernels import random_rounding
from zeroshard.kernels.random_rounding import PERIOD, StepNoise, decode, encode, nearest, round_to_bf16

CPU = torch.device("cpu")
BLOCK = 256


def bf16(values, of):
    rounded = torch.empty(values.shape, dtype=torch.bfloat16)
    round_to_bf16(values, rounded, of)
    return rounded


def int8(values, of, *, signed):
    """Codes and scales, and the numbers that they are."""
    codes, scales = torch.empty(values.shape, dtype=torch.int8), torch.empty(-(-values.numel() // BLOCK))
    encode(values.clone(), codes, scales, of, BLOCK, signed=signed)
    return codes, scales, decode(codes, scales, BLOCK, signed=signed)


def test_a_state_that_changes_slowly_is_right_on_average():
    values = torch.full((200_000,), 1.0 + 2**-10)  # an eighth of the way to the next number, 1 + 2^-7
    means = [bf16(values, StepNoise().of(torch.tensor(float(step)), CPU, 3, 0)).float().mean() for step in range(4)]
    assert all(abs(mean - values[0]) < 1e-4 for mean in means)
    assert len(set(map(float, means))) == 4
    assert bf16(values, nearest(CPU)).float().mean() == values.bfloat16().float().mean() == 1.0  # it would never change


@pytest.mark.parametrize("signed", [True, False])
def test_the_mean_of_many_encodings_is_the_value(signed):
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.abs()
    found = torch.stack([int8(values, StepNoise().of(step, CPU, 5, 1), signed=signed)[2] for step in range(2000)])
    spread = found.std(0) / 2000**0.5
    # the codes' spacing is curved: the mean of a value's two neighbours is off by a part of their distance squared
    assert ((found.mean(0) - values).abs() < 5 * spread + 0.005 * values.abs()).all()
    assert (found.abs().amax(1) / values.abs().max() - 1).abs().max() < 1e-5  # the largest is exact


def test_nan_and_inf_stay():
    odd = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1, 0, -(2**31), 1], dtype=torch.int32)
    values = odd.view(torch.float32)
    for of in (StepNoise().of(1, CPU, 0, 0), nearest(CPU)):
        found = bf16(values, of)
        assert torch.equal(found[[0, 1, 5, 6]].float(), values[[0, 1, 5, 6]])
        assert found[2:5].isnan().all()
        assert 0 <= found[7] < 1e-38
    for signed in (True, False):
        assert (
            not int8(torch.tensor([1.0, float("nan")]), StepNoise().of(1, CPU, 0, 0), signed=signed)[2].isfinite().any()
        )


@pytest.mark.parametrize("threads", [1, 3])
def test_noise_is_of_the_place_in_the_parameter_and_not_of_the_piece(threads, monkeypatch):
    monkeypatch.setattr(random_rounding.torch, "get_num_threads", lambda: threads)
    values = torch.randn(3 * PERIOD + 700, generator=torch.Generator().manual_seed(0))
    cuts = (0, BLOCK, PERIOD + 3 * BLOCK, values.numel())
    whole = bf16(values, StepNoise().of(2, CPU, 7, 0))
    assert torch.equal(
        torch.cat([bf16(values[a:b], StepNoise().of(2.0, CPU, 7 + a, 0)) for a, b in pairwise(cuts)]), whole
    )
    for signed, each in ((True, values), (False, values.abs())):
        pieces = [int8(each[a:b], StepNoise().of(2, CPU, 7 + a, 1), signed=signed) for a, b in pairwise(cuts)]
        for found, expected in zip(
            zip(*pieces, strict=True), int8(each, StepNoise().of(2, CPU, 7, 1), signed=signed), strict=True
        ):
            assert torch.equal(torch.cat(found), expected)
    for other in (StepNoise().of(2, CPU, 8, 0), StepNoise().of(3, CPU, 7, 0), StepNoise().of(2, CPU, 7, 1)):
        assert not torch.equal(bf16(values, other), whole)


def test_words_of_a_step_are_spread_evenly_and_independent_of_neighbours_and_other_steps():
    first, second = (StepNoise().of(step, CPU, 0, 0).words[:PERIOD].float() for step in (1, 2))
    pairs = [(first, second), (first[1:], first[:-1]), (first, StepNoise().of(1, CPU, 0, 1).words[:PERIOD].float())]
    for one, other in pairs:
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.03  # 4 standard deviations
    shares = torch.histc(first, 16, 0, 65536) / PERIOD
    assert (shares - 1 / 16).abs().max() < 0.008


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=600), st.booleans(), st.integers(0, 10**6))
def test_codes_keep_signs_order_of_magnitude_and_never_become_zero_without_a_sign(given_values, signed, step):
    values = torch.tensor(given_values)
    values = values if signed else values.abs()
    _, scales, found = int8(values, StepNoise().of(step, CPU, step, 0), signed=signed)
    largest = torch.cat([part.abs().max().expand(len(part)) for part in values.split(BLOCK)])
    assert (found * values >= 0).all()
    assert found.isfinite().all()
    assert scales.shape == (-(-len(values) // BLOCK),)
    assert ((found - values).abs() <= 0.15 * largest + 1e-36).all()
    if not signed:
        assert (found > 0).all()
