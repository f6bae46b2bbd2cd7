import pytest
import torch

from exactness import assert_near, assert_same_bits, run
from zeroshard.kernels import rope


def tables(num_positions, width, device, dtype=torch.float32):
    angles = torch.outer(torch.arange(num_positions), 0.7 ** torch.arange(width // 2)).to(device, torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def exact(q, k, cos, sin):
    """Each pair as a complex number, times another."""

    def turn(x):
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)
        return torch.cat((turned.real, turned.imag), dim=-1)

    return turn(q), turn(k)


def compare(q, k, random, dtype=torch.float32):
    cos, sin = tables(q.shape[2], q.shape[3], q.device, dtype)
    grads = [random(*q.shape, dtype=q.dtype), random(*k.shape, dtype=k.dtype)]
    wanted = run(lambda q, k: exact(q, k, cos.double(), sin.double()), [q.double(), k.double()], grads)
    ours = lambda q, k: rope(q, k, cos, sin, kernels="triton")  # noqa: E731
    got = run(ours, [q, k], grads)
    for name, one, other in zip(("q", "k", "dq", "dk"), got, wanted, strict=True):
        assert_near(one, other, what=name)
    assert_same_bits(got, run(ours, [q, k], grads))


@pytest.mark.redundant(but=["shape0", "shape4", "shape5"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 2), (2, 3, 1, 5, 6), (1, 5, 2, 3, 64), (1, 40, 40, 2, 128), (2, 2, 2, 0, 8), (0, 1, 1, 3, 8)]
)
def test_values_and_gradients_are_the_formula_s(shape, triton, random):
    """`compare` asserts it."""
    B, H, K, T, D = shape
    compare(random(B, H, T, D), random(B, K, T, D), random)


@pytest.mark.redundant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, triton, random):
    """`compare` asserts it."""
    tables_in = torch.float64 if dtype == torch.float64 else torch.float32
    compare(random(2, 3, 5, 8, dtype=dtype), random(2, 1, 5, 8, dtype=dtype), random, tables_in)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_shapes(dtype, triton, random):
    """`compare` asserts it."""
    compare(random(3, 127, 32, 128, dtype=dtype).transpose(1, 2), random(3, 8, 127, 128, dtype=dtype), random)


@pytest.mark.redundant
def test_strided_heads(triton, random, device):
    qkv = random(2, 5, 7, 12)  # [B, T, heads of q, k and v, D], as one projection gives them
    q, k = qkv[:, :, :4].transpose(1, 2), qkv[:, :, 4:6].transpose(1, 2)
    compare(q, k, random)
    compare(random(2, 3, 5, 24)[..., ::2], random(2, 12, 5, 3).transpose(1, 3), random)
    cos, sin = tables(5, 12, device)
    q_out, k_out = rope(q, k, cos.mT.contiguous().mT, sin, kernels=triton)
    for one, other in zip((q_out, k_out), exact(q.double(), k.double(), cos.double(), sin.double()), strict=True):
        assert_near(one, other)
    assert q_out.stride() == torch.empty_like(q).stride()


def test_one_gradient_for_both_is_not_turned_twice(triton, random, device):
    q, k = random(1, 2, 3, 8), random(1, 2, 3, 8)
    cos, sin = tables(3, 8, device)

    def loss(function, q, k):
        turned = function(q * 1, k * 1)
        return (turned[0] + turned[1]).square().sum()

    got = run(lambda q, k: loss(lambda *x: rope(*x, cos, sin, kernels=triton), q, k), [q, k])
    wanted = run(lambda q, k: loss(lambda *x: exact(*x, cos.double(), sin.double()), q, k), [q.double(), k.double()])
    for one, other in zip(got, wanted, strict=True):
        assert_near(one, other)


def test_angles_that_are_learned_are_the_reference_s(triton, random, device):
    cos, sin = tables(3, 8, device)
    q, k, learned = random(1, 2, 3, 8), random(1, 1, 3, 8), cos.clone().requires_grad_()
    assert rope(q, k, learned, sin, kernels="reference")[0].requires_grad
    for name, angles in (("cos", (learned, sin)), ("sin", (cos, learned))):
        with pytest.raises(ValueError, match=f"^{name}: triton computes no gradient of the angles"):
            rope(q, k, *angles, kernels=triton)
    with torch.no_grad():
        rope(q, k, learned, sin, kernels=triton)
