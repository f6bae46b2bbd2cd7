import math

import numpy as np
import pytest
import torch

from zeroshard.kernels import AdamWOptions, adamw
from zeroshard.kernels.adamw import BLOCK, Pieces, adamw_reference

OPTIONS = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
NUMELS = (1, 5, BLOCK, BLOCK + 1, 127)  # less than a block, a whole one, one and a tail
# A unit of fp32 in each of m, v and the update; the kernel's hyper-parameters are fp32, the reference's are double.
UPDATE = 1e-4


@pytest.fixture
def draw(random):
    """`draw(numels, dtype=...)`: parameters, gradients, m and v; v is positive."""

    def make(numels=NUMELS, dtype=torch.float32, grad_dtype=None, state_dtype=None):
        return (
            [random(n, dtype=dtype) for n in numels],
            [random(n, dtype=grad_dtype or dtype) for n in numels],
            [random(n, dtype=state_dtype or dtype) / 8 for n in numels],
            [random(n, dtype=state_dtype or dtype).square() for n in numels],
        )

    return make


def copied(state):
    return tuple([tensor.clone() for tensor in column] for column in state)


def in_fp64(state, step, options, scale=1.0):
    """The formula of the module's docstring, in float64."""
    made = []
    for p, g, m, v in zip(*([x.double() for x in column] for column in state), strict=True):
        g = g * scale
        m = options.beta1 * m + (1 - options.beta1) * g
        v = options.beta2 * v + (1 - options.beta2) * g * g
        p = p * (1 - options.lr * options.weight_decay)
        root = v.sqrt() / math.sqrt(1 - options.beta2**step) + options.eps
        made.append((p - options.lr / (1 - options.beta1**step) * m / root, m, v))
    return [list(column) for column in zip(*made, strict=True)]


def assert_updated(state, before, step, options, scale=1.0):
    """params, m and v are those of the formula: a share `UPDATE` of the update itself, and their own rounding."""
    wanted = in_fp64(before, step, options, scale)
    for got, exact, old in zip((state[0], state[2], state[3]), wanted, (before[0], before[2], before[3]), strict=True):
        for one, other, start in zip(got, exact, old, strict=True):
            eps = torch.finfo(one.dtype).eps
            bound = UPDATE * (other - start.double()).abs() + 2 * eps * (other.abs() + start.double().abs())
            assert ((one.double() - other).abs() <= bound + 1e-12).all()


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_an_update_is_the_formula_s(step, weight_decay, triton, draw):
    options = AdamWOptions(1e-2, 0.9, 0.95, 1e-8, weight_decay)
    for kernels in ("reference", triton):
        state = draw()
        before = copied(state)
        assert adamw(*state, step=step, options=options, kernels=kernels) is None
        assert_updated(state, before, step, options)
        assert all(torch.equal(*pair) for pair in zip(state[1], before[1], strict=True))  # gradients stay


def test_fp32_masters_with_16_bit_gradients_and_states(triton, draw):
    state = draw((5, 300), grad_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    before = copied(state)
    adamw(*state, step=3, options=OPTIONS, kernels=triton)
    assert_updated(state, before, 3, OPTIONS)


def test_the_kernel_takes_the_steps_of_torch_s_fused_one(triton, draw):
    """Its operations in its order, fp32 hyper-parameters: the same bits. The interpreter rounds twice in an fma."""
    step, state = 7, draw((300,))
    p, g, m, v = (column[0].clone().cpu().numpy().astype(np.float64) for column in state)
    adamw(*state, step=step, options=OPTIONS, kernels=triton)
    lr, beta1, beta2, eps, decay = (
        float(np.float32(x)) for x in (OPTIONS.lr, OPTIONS.beta1, OPTIONS.beta2, OPTIONS.eps, OPTIONS.weight_decay)
    )

    def once(x):  # round to fp32; a product of two fp32 numbers is exact in fp64
        return np.float32(x).astype(np.float64)

    def fma(a, b, c):
        return once((a * b if state[0][0].is_cuda else once(a * b)) + c)

    p = fma(-once(lr * decay), p, p)
    square = once(g * g)
    m = fma(beta1, m, fma(-beta1, g, g))
    v = fma(beta2, v, fma(-beta2, square, square))
    size = once(lr / once(1 - once(np.float32(beta1) ** np.float32(step))))
    root = once(np.sqrt(once(1 - once(np.float32(beta2) ** np.float32(step)))))
    p = once(p - once(once(size * m) / once(once(once(np.sqrt(v)) / root) + eps)))
    for got, wanted in zip((state[0][0], state[2][0], state[3][0]), (p, m, v), strict=True):
        assert np.array_equal(got.cpu().numpy(), wanted.astype(np.float32))


@pytest.mark.gpu
def test_the_bits_of_torch_s_fused_kernel(triton, draw):
    state = draw()
    params, grads = [torch.nn.Parameter(p.clone()) for p in state[0]], state[1]
    theirs = torch.optim.AdamW(params, 1e-2, (0.9, 0.95), 1e-8, 0.1, fused=True)
    for m, v in zip(*state[2:], strict=True):
        m.zero_()
        v.zero_()
    for step in range(1, 4):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        theirs.step()
        adamw(*state, step=step, options=OPTIONS, kernels=triton)
        for param, p, m, v in zip(params, state[0], *state[2:], strict=True):
            assert torch.equal(theirs.state[param]["exp_avg"], m)
            assert torch.equal(theirs.state[param]["exp_avg_sq"], v)
            torch.testing.assert_close(param.detach(), p, rtol=0, atol=2e-7)  # the power in the correction


def test_the_reference_has_the_bits_of_torch_s(draw):
    state = draw()
    params = [torch.nn.Parameter(p.clone()) for p in state[0]]
    theirs = torch.optim.AdamW(params, 1e-2, (0.9, 0.95), 1e-8, 0.1, foreach=False)
    for m, v in zip(*state[2:], strict=True):
        m.zero_()
        v.zero_()
    for step in range(1, 4):
        for param, grad in zip(params, state[1], strict=True):
            param.grad = grad * step
        theirs.step()
        adamw(state[0], [g * step for g in state[1]], *state[2:], step=step, options=OPTIONS, kernels="reference")
    for param, p in zip(params, state[0], strict=True):
        assert torch.equal(param.detach(), p)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_gradients_are_scaled_as_they_are_read(kernels, triton, draw, device):
    plain, scaled = (lambda s: (s, copied(s)))(draw())
    scale = torch.tensor(0.37, device=device)
    adamw(*scaled, step=2, options=OPTIONS, grad_scale=scale, kernels=kernels)
    adamw(plain[0], [g * scale for g in plain[1]], *plain[2:], step=2, options=OPTIONS, kernels=kernels)
    for index in (0, 2, 3):
        assert all(torch.equal(*pair) for pair in zip(plain[index], scaled[index], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_copies_are_written_beside_their_masters(kernels, dtype, triton, draw):
    state = draw()
    copies = [torch.full_like(p, float("nan"), dtype=dtype) for p in state[0]]
    adamw(*state, step=2, options=OPTIONS, copies=copies, kernels=kernels)
    unit = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 0.0}[dtype]  # as in exactness.ROUNDING
    for master, copy in zip(state[0], copies, strict=True):
        assert ((copy.float() - master).abs() <= unit * master.abs() + 1e-7 * (dtype == torch.float16)).all()


def test_each_parameter_has_its_own_number_of_steps(triton, draw):
    together, apart = (lambda s: (s, copied(s)))(draw((5, 6, 7)))
    adamw(*together, step=[1, 50, 3], options=OPTIONS, kernels=triton)
    for index, step in enumerate((1, 50, 3)):
        adamw(*(column[index] for column in apart), step=step, options=OPTIONS, kernels=triton)
    for one, other in zip(together, apart, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_tables_follow_tensors_that_move_or_change_their_number(triton, draw):
    pieces = Pieces()
    for numels in ((5, 6), (5, 6), (6, 5), (2048 + 3, 1, 1), (1,)):
        kept, fresh = (lambda s: (s, copied(s)))(draw(numels))
        adamw(*kept, step=2, options=OPTIONS, pieces=pieces, kernels=triton)
        adamw(*fresh, step=2, options=OPTIONS, kernels=triton)
        assert all(torch.equal(*pair) for pair in zip(kept[0], fresh[0], strict=True))


def test_pieces_that_start_anywhere_and_what_lies_between_them(triton, random, device):
    """Views into one buffer at odd offsets: neighbours stay as they are."""
    flats = [random(64).abs() for _ in range(4)]
    before = [flat.clone() for flat in flats]
    cuts = [slice(1, 18), slice(19, 20), slice(37, 63)]
    views = [[flat[cut] for cut in cuts] for flat in flats]
    expected = [[view.clone() for view in column] for column in views]
    adamw(*views, step=2, options=OPTIONS, kernels=triton)
    adamw(*expected, step=2, options=OPTIONS, kernels=triton)
    for flat, old, column, wanted in zip(flats, before, views, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(column, wanted, strict=True))
        for gap in (0, 18, 20, 36, 63):
            assert flat[gap] == old[gap]


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_empty_tensors_and_no_tensors(kernels, triton, device):
    adamw([], [], [], [], step=1, options=OPTIONS, kernels=kernels)
    empty = torch.zeros(0, device=device)
    found, wanted = ([torch.ones(1, device=device) for _ in range(4)] for _ in range(2))
    adamw(*([empty, column] for column in found), step=1, options=OPTIONS, kernels=kernels)
    adamw(*wanted, step=1, options=OPTIONS, kernels=kernels)
    assert found == wanted
    assert found[0] != 1
    adamw(empty, empty, empty, empty, step=1, options=OPTIONS, kernels=kernels)


def test_fp64_is_refused_where_triton_was_asked_for(triton, device):
    columns = [torch.ones(4, dtype=torch.float64, device=device) for _ in range(4)]
    with pytest.raises(ValueError, match=r"^params: torch.float64 is not supported by triton"):
        adamw(*columns, step=1, options=OPTIONS, kernels=triton)
    wanted = [c.clone() for c in columns]
    adamw(*columns, step=1, options=OPTIONS)
    adamw_reference(*wanted, 1, OPTIONS)
    assert torch.equal(columns[0], wanted[0])
