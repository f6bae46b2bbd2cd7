"""States in fewer bits: right on average, the same for any pieces, and what cannot be rounded stays."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.kernels import cpu_loops, use_kernels
from zeroshard.kernels.random_rounding import LOOP, PERIOD, State, StepNoise, decode_states, encode_states, nearest
from zeroshard.kernels.state_codes import Code

CPU = torch.device("cpu")
BLOCK = 256


LOOPS = [
    "reference",
    pytest.param("auto", marks=pytest.mark.skipif(cpu_loops.loop(LOOP) is None, reason="there is no C++ compiler")),
]


@pytest.fixture(params=LOOPS)
def kernels(request):
    with use_kernels(request.param):
        yield request.param


def bf16(values, of):
    rounded = torch.empty(values.shape, dtype=torch.bfloat16)
    encode_states([State(values.clone(), [rounded], None, of)], 1)
    wide = torch.empty(values.shape)
    decode_states([State(wide, [rounded], None, of)], 1)
    assert torch.equal(wide.nan_to_num(7.0), rounded.float().nan_to_num(7.0))
    return rounded


def int8(values, of, code):
    """Codes and scales, and the numbers that they are."""
    kept = [torch.empty(values.shape, dtype=torch.int8), torch.empty(-(-values.numel() // BLOCK))]
    encode_states([State(values.clone(), kept, code, of)], BLOCK)
    found = torch.empty(values.shape)
    decode_states([State(found, kept, code, of)], BLOCK)
    return *kept, found


@pytest.mark.redundant(but=["reference"])
def test_a_state_that_changes_slowly_is_right_on_average(kernels):
    values = torch.full((200_000,), 1.0 + 2**-10)  # an eighth of the way to the next number, 1 + 2^-7
    means = [bf16(values, StepNoise().of(torch.tensor(float(step)), CPU, 3, 0)).float().mean() for step in range(4)]
    assert all(abs(mean - values[0]) < 1e-4 for mean in means)
    assert len(set(map(float, means))) == 4
    assert bf16(values, nearest(CPU)).float().mean() == values.bfloat16().float().mean() == 1.0  # it would never change


@pytest.mark.redundant(but=["reference-Code.ROOT"])
@pytest.mark.parametrize("code", Code)
def test_the_mean_of_many_encodings_is_the_value(code, kernels):
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    values = values if code is Code.SIGNED else values.abs()
    found = torch.stack([int8(values, StepNoise().of(step, CPU, 5, 1), code)[2] for step in range(2000)])
    spread = found.std(0) / 2000**0.5
    # the codes' spacing is curved: the mean of a value's two neighbours is off by a part of their distance squared
    assert ((found.mean(0) - values).abs() < 5 * spread + 0.005 * values.abs()).all()
    assert (found.abs().amax(1) / values.abs().max() - 1).abs().max() < 1e-5  # the largest is exact


def test_nan_and_inf_stay(kernels):
    odd = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1, 0, -(2**31), 1], dtype=torch.int32)
    values = odd.view(torch.float32)
    for of in (StepNoise().of(1, CPU, 0, 0), nearest(CPU)):
        found = bf16(values, of)
        assert torch.equal(found[[0, 1, 5, 6]].float(), values[[0, 1, 5, 6]])
        assert found[2:5].isnan().all()
        assert 0 <= found[7] < 1e-38
    for code in Code:
        assert not int8(torch.tensor([1.0, float("nan")]), StepNoise().of(1, CPU, 0, 0), code)[2].isfinite().any()


def test_noise_is_of_the_place_in_the_parameter_and_not_of_the_piece(kernels):
    values = torch.randn(3 * PERIOD + 700, generator=torch.Generator().manual_seed(0))
    cuts = (0, BLOCK, PERIOD + 3 * BLOCK, values.numel())
    whole = bf16(values, StepNoise().of(2, CPU, 7, 0))
    assert torch.equal(
        torch.cat([bf16(values[a:b], StepNoise().of(2.0, CPU, 7 + a, 0)) for a, b in pairwise(cuts)]), whole
    )
    for code in Code:
        each = values if code is Code.SIGNED else values.abs()
        pieces = [int8(each[a:b], StepNoise().of(2, CPU, 7 + a, 1), code) for a, b in pairwise(cuts)]
        whole_codes = int8(each, StepNoise().of(2, CPU, 7, 1), code)
        for found, expected in zip(zip(*pieces, strict=True), whole_codes, strict=True):
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


@pytest.mark.redundant
@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=600), st.sampled_from(Code), st.integers(0, 10**6))
def test_codes_keep_signs_order_of_magnitude_and_never_become_zero_without_a_sign(given_values, code, step):
    """Zeros, denormals, a huge range, one element, a block of one sign: the loop's bits are the reference's."""
    values = torch.tensor(given_values)
    values = values if code is Code.SIGNED else values.abs()
    of = StepNoise().of(step, CPU, step, 0)
    codes, scales, found = int8(values, of, code)
    with use_kernels("reference"):
        for one, other in zip((codes, scales, found), int8(values, of, code), strict=True):
            assert torch.equal(one, other)
    root = 2 if code is Code.ROOT else 1
    largest = torch.cat([part.abs().max().expand(len(part)) for part in values.split(BLOCK)])
    assert (found * values >= 0).all()
    assert found.isfinite().all()
    assert scales.shape == (-(-len(values) // BLOCK),)
    assert ((found - values).abs() <= root * 0.15 * largest + 1e-36).all()
    if code is not Code.SIGNED and largest.min() > 1e-20:
        assert (found > 0).all()


@pytest.mark.redundant
@pytest.mark.skipif(cpu_loops.loop(LOOP) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("threads", [1, 3])
def test_one_call_of_the_loop_has_the_bits_of_the_reference_for_pieces_of_any_size(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 255, 256, 257, PERIOD - 1, PERIOD, PERIOD + 256 + 3, 5 * PERIOD + 17)
    try:
        for block in (16, 256, 4096):
            found = []
            for kernels in ("auto", "reference"):
                rows, generator = [], generator.manual_seed(0)
                for number, (size, code) in enumerate(product(sizes, (*Code, None))):
                    values = torch.randn(size, generator=generator) * 10.0 ** (number % 9 - 6)
                    values = values if code in (Code.SIGNED, None) else values.abs()
                    kept = [torch.empty(size, dtype=torch.int8), torch.empty(-(-size // block))]
                    kept = [torch.empty(size, dtype=torch.bfloat16)] if code is None else kept
                    rows.append(State(values, kept, code, StepNoise().of(3, CPU, 11 * number, number % 2)))
                with use_kernels(kernels):
                    encode_states(rows, block)
                    decode_states(rows, block)
                found.append([each for row in rows for each in (*row.kept, row.values)])
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    finally:
        torch.set_num_threads(before)
