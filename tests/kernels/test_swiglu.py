import pytest
import torch
import torch.nn.functional as F

from exactness import assert_near, assert_same_bits, run
from zeroshard.kernels import swiglu


def ours(gate, up):
    return swiglu(gate, up, kernels="triton")


def compare(gate, up, random):
    grads = [random(*gate.shape, dtype=gate.dtype)]
    wanted = run(lambda gate, up: F.silu(gate) * up, [gate.double(), up.double()], grads)
    got = run(ours, [gate, up], grads)
    for name, one, other in zip(("y", "d_gate", "d_up"), got, wanted, strict=True):
        assert_near(one, other, what=name)
    assert_same_bits(got, run(ours, [gate, up], grads))


@pytest.mark.redundant(but=["dtype0-shape6", "dtype1-shape6"])
@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (127, 64), (4097, 1), (1, 65536), (2, 3, 768), (0, 8), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_the_formula_s(shape, dtype, triton, random):
    """`compare` asserts it."""
    compare(random(*shape, dtype=dtype), random(*shape, dtype=dtype), random)


def test_other_precisions_and_extreme_values(triton, random):
    """`compare` asserts it."""
    gate = (random(4, 33) * 30).half()
    gate[0, :4] = torch.tensor([1e4, -1e4, 0.0, -0.0])
    compare(gate, random(4, 33, dtype=torch.float16), random)
    compare(gate.float(), random(4, 33), random)
    compare(gate.double(), random(4, 33, dtype=torch.float64), random)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_shapes(dtype, triton, random):
    """`compare` asserts it."""
    compare(random(4097, 11008, dtype=dtype), random(4097, 11008, dtype=dtype), random)


@pytest.mark.gpu
def test_more_elements_than_a_32_bit_offset_can_name(triton, device):
    gate = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device=device)
    gate[-1] = 2.0
    assert_near(swiglu(gate, gate, kernels=triton)[-1:], F.silu(gate[-1:].double()) * 2)


@pytest.mark.redundant
def test_halves_of_one_projection_and_other_strides(triton, random):
    """`compare` asserts it."""
    gate, up = random(2, 3, 80).chunk(2, dim=-1)
    compare(gate, up, random)
    compare(random(5, 4).mT, random(4, 5), random)
    compare(random(4, 1).expand(4, 5), random(4, 10)[:, ::2], random)
