from functools import partial

import pytest
import torch
import torch.nn.functional as F

from exactness import assert_near, assert_same_bits, run
from zeroshard.kernels import layer_norm, norm_kernels, rms_norm

OPERATIONS = ["layer_norm", "rms_norm"]
# Tiles of many rows and of one row, forward and backward; rows too wide to be held have tests of their own.
SHAPES = [(1, 1), (3, 5), (127, 5), (3, 64), (127, 64), (2, 768), (1, 1600)]
LARGE = [(1, 1), (127, 5), (4097, 64), (4097, 768), (4097, 1600), (127, 4096), (4097, 8192), (3, 16384), (127, 65536)]


def exact(operation, rounded, *, x, weight=None, bias=None, residual=None):
    """y, and h where there is a residual, in float64; y is that of h as it was ``rounded`` when it was handed on."""
    h = total = x if residual is None else x + residual
    if rounded is not None:
        h = total + (rounded.double() - total).detach()
    if operation == "layer_norm":
        y = F.layer_norm(h, h.shape[-1:], weight, bias, 1e-5)
    else:
        y = F.rms_norm(h, h.shape[-1:], weight, 1e-5)
    return (y,) if residual is None else (y, h)


def ours(operation, rounded, *, x, weight=None, bias=None, residual=None):
    if operation == "layer_norm":
        made = layer_norm(x, weight, bias, 1e-5, residual=residual, kernels="triton")
    else:
        made = rms_norm(x, weight, 1e-5, residual=residual, kernels="triton")
    return (made,) if residual is None else made


def compare(operation, given, grads, slack=1.0):
    """Ours against float64, and against itself; ``given``: arguments by name."""
    names, dtype = list(given), given["x"].dtype
    rounded = None

    def call(function, *tensors):
        return function(operation, rounded, **dict(zip(names, tensors, strict=True)))

    got = run(partial(call, ours), list(given.values()), grads)
    if len(grads) > 1:
        rounded = got[1]
        assert_near(rounded, given["x"].double() + given["residual"].double(), what="h")
    # In a row of one element all terms but eps cancel out, and what is left is scaled by 1 / |h|.
    h = given["x"] if rounded is None else rounded
    terms = (1 / h.double().abs().clamp(min=3e-3)).max().item() if h.shape[-1] == 1 else 0.0
    wanted = run(partial(call, exact), [t.double() for t in given.values()], grads)
    for name, one, other in zip([*["y", "h"][: len(grads)], *names], got, wanted, strict=True):
        assert_near(one, other, slack=slack, terms=terms, what=f"{operation} {tuple(given['x'].shape)} {dtype} {name}")
    assert_same_bits(got, run(partial(call, ours), list(given.values()), grads))


def drawn(operation, random, shape, dtype=torch.float32, with_residual=True):
    given = {"x": random(*shape, dtype=dtype), "weight": random(shape[-1], dtype=dtype)}
    if operation == "layer_norm":
        given["bias"] = random(shape[-1], dtype=dtype)
    if with_residual:
        given["residual"] = random(*shape, dtype=dtype)
    return given, [random(*shape, dtype=dtype) for _ in range(1 + with_residual)]


@pytest.mark.redundant
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_the_formula_s_at_every_width(operation, shape, triton, random):
    """`compare` asserts it."""
    compare(operation, *drawn(operation, random, shape, with_residual=shape[0] % 2 == 1))


@pytest.mark.redundant
@pytest.mark.pairwise
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5), (7, 768)])
def test_results_of_other_dtypes_are_rounded_once(operation, dtype, shape, triton, random):
    """`compare` asserts it."""
    compare(operation, *drawn(operation, random, shape, dtype))


@pytest.mark.pairwise
@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", LARGE)
def test_large_shapes(operation, dtype, shape, triton, random):
    """`compare` asserts it."""
    compare(operation, *drawn(operation, random, shape, dtype))


@pytest.mark.gpu
def test_more_elements_than_a_32_bit_offset_can_name(triton, device):
    x = torch.zeros(2**18 + 3, 8200, dtype=torch.bfloat16, device=device)
    x[-1] = torch.arange(8200, device=device) % 7
    y = layer_norm(x, kernels="triton")
    assert_near(y[-1], F.layer_norm(x[-1].double(), (8200,)), what="last row")
    assert not y[:-1].any()


@pytest.mark.redundant(but=["128-dtypes0-layer_norm"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("width", "dtypes"), [(128, (torch.float32,)), (200, (torch.bfloat16, torch.float64))])
def test_rows_too_wide_to_be_held(operation, width, dtypes, triton, random, monkeypatch):
    """Strips that are full and not, at a hundredth of the width that they begin at; `compare` asserts it."""
    for name in ("HELD", "STRIP"):
        monkeypatch.setattr(norm_kernels, name, 64)
    monkeypatch.setattr(norm_kernels, "PART_BYTES", 5 * width * 4 * 2)  # a part of 5 fp32 rows, another of 2
    for dtype in dtypes:
        compare(operation, *drawn(operation, random, (7, width), dtype))


@pytest.mark.redundant
@pytest.mark.parametrize(("operation", "shape"), [("rms_norm", (1, 65536)), ("layer_norm", (4097, 1))])
def test_the_widest_rows_and_the_most(operation, shape, triton, random):
    """`compare` asserts it."""
    compare(operation, {"x": random(*shape)}, [random(*shape)])


@pytest.mark.redundant
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("width", [5, 9000])
def test_without_a_weight(operation, width, triton, random):
    """`compare` asserts it."""
    compare(operation, {"x": random(3, width)}, [random(3, width)])


def test_an_fp32_weight_beside_bf16_rows(triton, random):
    x, weight, bias = random(5, 24, dtype=torch.bfloat16), random(24), random(24)
    compare("layer_norm", {"x": x, "weight": weight, "bias": bias}, [random(5, 24, dtype=torch.bfloat16)])
    for kernels in ("reference", "triton"):
        assert layer_norm(x, weight, bias, kernels=kernels).dtype == torch.bfloat16
        assert rms_norm(x, weight, kernels=kernels).dtype == torch.bfloat16


@pytest.mark.redundant
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "stride",
    [
        lambda t: t[..., :20],  # rows with a gap between them
        lambda t: t.transpose(0, 1),  # leading dimensions in another order
        lambda t: t.transpose(1, 2),  # neighbours far apart
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(3, -1, -1),  # the same rows again
    ],
    ids=["gap", "leading", "far", "every second", "expanded"],
)
def test_strided_inputs_and_gradients(operation, stride, triton, random):
    x, dy = stride(random(3, 4, 24)), stride(random(3, 4, 24))
    residual, dh = stride(random(3, 4, 24)), stride(random(3, 4, 24))
    given = {"x": x, "weight": random(2 * x.shape[-1])[::2], "residual": residual}
    compare(operation, given, [dy, dh])
    assert_near(ours(operation, None, x=x)[0], exact(operation, None, x=x.double())[0])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (16,), (2, 1, 3, 16)])
def test_any_leading_shape_and_no_rows(operation, shape, triton, random):
    given, grads = drawn(operation, random, shape)
    compare(operation, given, grads)
    if 0 in shape:
        d_weight = run(lambda x, w: ours(operation, None, x=x, weight=w), [given["x"], given["weight"]], grads[:1])[2]
        assert not d_weight.any()


@pytest.mark.redundant
@pytest.mark.parametrize("operation", OPERATIONS)
def test_extreme_values(operation, triton, random):
    """`compare` asserts it."""
    for x in (
        random(3, 64).sign() * 1e4,
        random(3, 64) * 1e-4,
        torch.zeros_like(random(3, 64)),
        random(3, 64).sign().mul(1e4).half(),
    ):
        grads = [random(*x.shape, dtype=x.dtype)]
        compare(operation, {"x": x, "weight": random(64, dtype=x.dtype)}, grads)
    # A large common offset: the mean itself is known to fp32's 2^-24 relative, which is 6e-4 of a deviation at 1e4.
    x = random(3, 64) + 1e4
    compare(operation, {"x": x}, [random(3, 64)], slack=400)


@pytest.mark.redundant(but=["weight"])
@pytest.mark.parametrize("needed", ["x", "weight", "bias", "residual"])
def test_each_gradient_is_the_same_when_it_is_the_only_one(needed, triton, random):
    given, grads = drawn("layer_norm", random, (5, 24))
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    together = torch.autograd.grad(ours("layer_norm", None, **leaves), leaves[needed], grads)[0]
    single = {name: tensor.detach().requires_grad_(name == needed) for name, tensor in given.items()}
    alone = torch.autograd.grad(ours("layer_norm", None, **single), single[needed], grads)[0]
    if alone.device.type == "cuda" and needed in ("weight", "bias"):
        assert_near(alone, together.double())  # by another compiled kernel, which writes no gradient of x
    else:
        assert torch.equal(alone, together)


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_of_the_two_outputs_may_be_used(used, triton, random):
    given, grads = drawn("rms_norm", random, (5, 24))

    def one(function):
        return lambda *tensors: function("rms_norm", None, **dict(zip(given, tensors, strict=True)))[used]

    leaves = [tensor.double().requires_grad_() for tensor in given.values()]
    wanted = torch.autograd.grad(one(exact)(*leaves), leaves, grads[used].double(), allow_unused=True)
    leaves = [tensor.detach().requires_grad_() for tensor in given.values()]
    got = torch.autograd.grad(one(ours)(*leaves), leaves, grads[used], allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_near(a, b)
