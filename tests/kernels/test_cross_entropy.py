from functools import partial

import pytest
import torch

from exactness import assert_near, assert_same_bits, run
from zeroshard.kernels import cross_entropy
from zeroshard.kernels.cross_entropy import cross_entropy_reference
from zeroshard.kernels.cross_entropy_kernels import BLOCK

# All tail, whole blocks and a tail, whole blocks alone.
SHAPES = [(1, 1), (3, 7), (33, 7), (5, 257), (2, 50257), (1, 2 * BLOCK)]
OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.2, "z_loss": 1e-2, "reduction": "sum"}]


def draw_targets(shape, vocab, device, ignored=()):
    targets = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(3))
    targets.flatten()[list(ignored)] = -100
    return targets.to(device)


def exact(logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    """The formula of the module's docstring, in float64 and row by row."""
    total, count = torch.zeros((), dtype=torch.float64, device=logits.device), 0
    for row, target in zip(logits.reshape(-1, logits.shape[-1]), targets.flatten().tolist(), strict=True):
        if target == ignore_index:
            total = total + 0.0 * row.nan_to_num(0, 0, 0).sum()
            continue
        lse = row.logsumexp(0)
        loss = lse - (1 - label_smoothing) * row[target] + z_loss * lse**2
        if label_smoothing:
            loss = loss - label_smoothing * row.mean()
        total, count = total + loss, count + 1
    return total / count if reduction == "mean" and count else total


def ours(logits, targets, **options):
    return cross_entropy(logits, targets, kernels="triton", **options)


def compare(logits, targets, upstream=1.0, **options):
    grad = [torch.full((), upstream, device=logits.device)]
    wanted = run(partial(exact, targets=targets, **options), [logits.double()], grad)
    function = partial(ours, targets=targets, **options)
    got = run(function, [logits], grad)
    for name, one, other in zip(("loss", "d_logits"), got, wanted, strict=True):
        terms = float(logits.shape[-1] == 1)  # with a vocabulary of 1 the loss is a difference of equals
        assert_near(one, other, terms=terms, what=f"{tuple(logits.shape)} {logits.dtype} {options} {name}")
    assert_same_bits(got, run(function, [logits], grad))


@pytest.mark.redundant(but=["options1-shape0", "options3-shape5"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradient_are_the_formula_s(shape, options, triton, random, device):
    """`compare` asserts it."""
    rows, vocab = shape
    ignored = range(0, rows, 3) if rows > 1 else ()
    compare(
        random(*shape), draw_targets((rows,), vocab, device, ignored), upstream=0.5 if rows == 3 else 1.0, **options
    )


@pytest.mark.redundant
def test_a_vocabulary_of_128256(triton, random, device):
    """`compare` asserts it."""
    compare(random(1, 128256), draw_targets((1,), 128256, device))


@pytest.mark.redundant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, triton, random, device):
    """`compare` asserts it."""
    compare(random(3, 257, dtype=dtype), draw_targets((3,), 257, device), upstream=0.25, z_loss=1e-3)


@pytest.mark.redundant
@pytest.mark.parametrize("vocab", [7, BLOCK + 3])
def test_smoothing_in_float64_is_not_rounded_to_float32(vocab, triton, random, device):
    """`compare` asserts it."""
    logits, options = random(3, vocab, dtype=torch.float64), {"label_smoothing": 0.1, "z_loss": 1e-2}
    compare(logits, draw_targets((3,), vocab, device), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4097, 7), (127, 257), (127, 50257), (33, 128256)])
def test_large_shapes(shape, dtype, triton, random, device):
    """`compare` asserts it."""
    compare(random(*shape, dtype=dtype), draw_targets(shape[:1], shape[1], device, [0]), label_smoothing=0.1)


@pytest.mark.gpu
def test_more_logits_than_a_32_bit_offset_can_name(triton, device):
    logits = torch.zeros(2**31 // 50304 + 5, 50304, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.zeros(logits.shape[0], dtype=torch.int64, device=device)
    loss = ours(logits, targets, reduction="sum")
    loss.backward()
    expected = torch.full((50304,), 1 / 50304, dtype=torch.float64)
    expected[0] -= 1
    assert_near(logits.grad[-1], expected)


@pytest.mark.redundant
def test_leading_shapes_and_strides(triton, random, device):
    wide = random(2, 3, 40)
    for logits in (wide[..., :33], wide[:, :1, :], wide.transpose(0, 1), wide.mT, wide[..., ::2]):
        targets = draw_targets(logits.shape[:-1], logits.shape[-1], device, [1])
        wanted = run(partial(exact, targets=targets), [logits.double()])
        for one, other in zip(run(partial(ours, targets=targets), [logits]), wanted, strict=True):
            assert_near(one, other)


def test_without_rows(triton, device):
    logits, targets = torch.zeros(0, 7, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    for kernels in ("reference", triton):
        assert cross_entropy(logits, targets, kernels=kernels).isnan()
        assert cross_entropy(logits, targets, reduction="sum", kernels=kernels) == 0


def test_all_masked_is_nan_with_no_gradient(triton, random, device):
    targets = torch.full((3,), -100, device=device)
    loss, grad = run(partial(ours, targets=targets), [random(3, 9)])
    assert loss.isnan()
    assert torch.equal(grad, torch.zeros_like(grad))
    reference = run(partial(cross_entropy, targets=targets, kernels="reference"), [random(3, 9)])
    assert_same_bits([loss, grad], reference)


@pytest.mark.redundant
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinities in the interpreter
@pytest.mark.parametrize("vocab", [9, BLOCK + 9])
def test_extreme_values(vocab, triton, random, device):
    targets = torch.tensor([0, 1, 2], device=device)
    compare(random(3, vocab).sign() * 1e4, targets)
    compare(random(3, vocab) - 1e4, targets)
    masked = random(3, vocab)
    masked[:, 3 : vocab - 3] = float("-inf")  # whole blocks of them
    masked[:, 0] = float("-inf")
    masked[0, 0] = 2.0
    compare(masked, targets)
    nothing = torch.full((1, vocab), float("-inf"), device=device)
    assert ours(nothing, targets[:1]).isnan()
    above = torch.full((1, vocab), float("inf"), device=device)
    assert ours(above, targets[:1]).isnan()


@pytest.mark.parametrize("options", OPTIONS)
def test_the_reference_is_the_formula_and_torch_s(options, random, device):
    logits, targets = random(2, 4, 33), draw_targets((2, 4), 33, device, [2])
    got = run(partial(cross_entropy_reference, targets=targets, **options), [logits.double()])
    wanted = run(partial(exact, targets=targets, **options), [logits.double()])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_backward_may_run_again(triton, random, device):
    logits = random(3, 33).requires_grad_()
    loss = ours(logits, draw_targets((3,), 33, device))
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])


@pytest.mark.redundant
@pytest.mark.parametrize("target", [-1, 33, 10**12])
def test_a_target_outside_the_vocabulary_is_refused_or_not_a_number(target, triton, random, device):
    targets = torch.tensor([1, target, 2], device=device)
    for kernels in ("reference", triton):
        with pytest.raises(ValueError, match=f"^targets: {target} is outside 0..32"):
            cross_entropy(random(3, 33), targets, kernels=kernels)
    loss, grad = run(partial(ours, targets=targets, check_targets=False), [random(3, 33)])
    assert loss.isnan()
    assert grad[1].isnan().all()
