import sys

import pytest
import torch

from zeroshard.kernels import sum_of_squares

MODULE = sys.modules["zeroshard.kernels.sum_of_squares"]  # the function hides its module's name
BLOCK = MODULE.BLOCK


@pytest.mark.parametrize("numel", [1, 5, 127, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_those_of_float64(numel, dtype, triton, random):
    flat = random(numel, dtype=dtype)
    wanted = flat.double().square().sum()
    got = sum_of_squares(flat, kernels=triton)
    assert (got.dtype, got.shape, got.device) == (torch.float64, (), flat.device)
    assert abs(got - wanted) <= (1e-14 if dtype == torch.float64 else 1e-6) * wanted
    assert torch.equal(got, sum_of_squares(flat, kernels=triton))
    assert abs(sum_of_squares(flat, kernels="reference") - wanted) <= 1e-12 * wanted


def test_a_program_adds_up_more_than_one_block(triton, random, monkeypatch):
    monkeypatch.setattr(MODULE, "MAX_PROGRAMS", 2)
    flat = random(5 * BLOCK + 1)
    wanted = flat.double().square().sum()
    assert abs(sum_of_squares(flat, kernels=triton) - wanted) <= 1e-6 * wanted


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31 + BLOCK + 1])
def test_as_many_elements_as_a_32_bit_number_can_count_and_more(numel, triton, device):
    flat = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    flat[-1] = 3.0
    assert sum_of_squares(flat, kernels=triton) == 9


@pytest.mark.soak  # a minute: few blocks of many elements, as each block is a turn of a loop in Python
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's
def test_numbers_of_elements_just_below_an_overflow_in_the_interpreter(triton, device, monkeypatch):
    monkeypatch.setattr(MODULE, "BLOCK", 2**20)
    flat = torch.zeros(2**31 - 1, dtype=torch.float16)  # pages that nobody writes to take no memory
    flat[-1] = 3.0
    assert sum_of_squares(flat, kernels=triton) == 9


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_nothing_and_what_is_not_finite(kernels, triton, device):
    assert sum_of_squares(torch.zeros(0, device=device), kernels=kernels) == 0
    assert sum_of_squares(torch.full((7,), 1e20, device=device), kernels=kernels).isfinite() == (kernels != triton)
    for bad in (float("nan"), float("inf")):
        flat = torch.ones(9, device=device)
        flat[4] = bad
        assert not sum_of_squares(flat, kernels=kernels).isfinite()


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_a_wrong_argument_is_named(kernels):
    with pytest.raises(ValueError, match=r"^flat: torch.int64 is not supported"):
        sum_of_squares(torch.zeros(4).long(), kernels=kernels)
    with pytest.raises(ValueError, match=r"^flat: strides \(2,\) leave gaps"):
        sum_of_squares(torch.zeros(8)[::2], kernels=kernels)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_without_a_break_in_the_graph(compiler, random):
    compiled = torch.compile(lambda x: sum_of_squares(x * 2, kernels="triton"), backend="aot_eager", fullgraph=True)
    flat = random(100)
    assert torch.equal(compiled(flat), sum_of_squares(flat * 2, kernels="triton"))
