"""The projected loss without Triton: by chunks of rows, held to the formula in float64 and to PyTorch's own rules."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from exactness import assert_near, assert_same_bits, run
from zeroshard.kernels import linear_cross_entropy, losses
from zeroshard.kernels.linear_cross_entropy import CPU_CHUNK_BYTES, all_logits
from zeroshard.kernels.losses import cross_entropy_reference
from zeroshard.lab.predict.recorder import StorageEvents

OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}]
OPTIONS += [{"label_smoothing": 0.2, "z_loss": 1e-2, "reduction": "sum", "ignore_index": 4}]


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _blocks_of_two_rows(monkeypatch):
    monkeypatch.setattr(losses, "BLOCK_BYTES", 2 * 33 * 4)


def draw_targets(shape, vocab, ignored=()):
    targets = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(3))
    targets.flatten()[list(ignored)] = -100
    return targets


def projected(hidden, weight, targets, **options):
    return linear_cross_entropy(hidden, weight, targets, kernels="reference", **options)


def specified(hidden, weight, targets, chunk_rows=None, **options):
    return cross_entropy_reference(hidden @ weight.T, targets, **options)


def compare(function, specification, inputs, upstream, names, slack=1.0):
    grad = [torch.full((), upstream)]
    wanted = run(specification, [x.double() for x in inputs], grad)
    got = run(function, inputs, grad)
    for name, one, other in zip(names, got, wanted, strict=True):
        assert_near(one, other, slack=slack, terms=1e-3, what=name)
    assert_same_bits(got, run(function, inputs, grad))


@pytest.mark.parametrize("chunk_rows", [1, 3, None])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_are_the_formula_s_in_any_number_of_chunks(chunk_rows, options, dtype, random):
    """`compare` asserts it."""
    targets = draw_targets((2, 3), 33, [2])
    if "ignore_index" in options:
        targets = targets.clamp(min=0)
    function = partial(projected, targets=targets, chunk_rows=chunk_rows, **options)
    inputs = [random(2, 3, 12, dtype=dtype), random(33, 12, dtype=dtype)]
    compare(function, partial(specified, targets=targets, **options), inputs, 0.5, ("loss", "hidden", "weight"), 4)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_a_second_backward_has_the_same_bits_and_a_third_raises(wanted, random):
    inputs = {"hidden": random(5, 12), "weight": random(33, 12)}
    inputs[wanted].requires_grad_()
    loss = projected(**inputs, targets=draw_targets((5,), 33), chunk_rows=2)
    first = torch.autograd.grad(loss * 2, inputs[wanted], retain_graph=True)[0].clone()
    again = torch.autograd.grad(loss * 2, inputs[wanted], retain_graph=True)[0]
    assert torch.equal(first, again)
    assert torch.equal(first, torch.autograd.grad(loss * 2, inputs[wanted])[0])
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss * 2, inputs[wanted])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch, where it is asked for slopes
def test_second_derivatives_and_transforms_are_pytorch_s(random):
    inputs = [random(3, 4, dtype=torch.float64), random(5, 4, dtype=torch.float64)]
    call = partial(projected, targets=draw_targets((3,), 5, [1]), z_loss=0.1)
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)
    expected = torch.autograd.grad(call(*inputs), inputs[0])[0]
    assert_near(torch.func.grad(call)(*inputs).detach(), expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[0].detach(), torch.ones_like(inputs[0]))
        slope = forward_ad.unpack_dual(call(dual, *inputs[1:])).tangent
    assert_near(slope.detach(), expected.sum(), terms=1)
    double = torch.func.vmap(call)(*(torch.stack([x, x]).detach() for x in inputs))
    assert_near(double, call(*inputs).detach().expand(2))


def test_far_logits_and_equal_ones():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0], [float("-inf"), 0.0, 0.0]])
    targets = torch.tensor([1, 0, 1])
    got = run(lambda x: projected(x, torch.eye(3), targets), [logits.nan_to_num(neginf=-1e30)])
    wanted = run(lambda x: F.cross_entropy(x, targets), [logits.nan_to_num(neginf=-1e30)])
    assert_near(got[0], wanted[0].double())
    assert_near(got[1], wanted[1].double())


def test_a_target_outside_the_vocabulary_raises_even_where_nobody_looks(random):
    with pytest.raises(IndexError, match=r"targets: 7 is outside 0\.\.6"):
        projected(random(2, 4), random(7, 4), torch.tensor([1, 7]), check_targets=False)


def peak_and_left(rows, vocab, width):
    """Bytes allocated at most and at the end, of a loss and its backward on the meta device."""
    now, peak = 0, 0

    def heard(storage, change):
        nonlocal now, peak
        now += change
        peak = max(peak, now)

    with torch.device("meta"):
        hidden, weight = (torch.empty(size, width, requires_grad=True) for size in (rows, vocab))
        targets = torch.empty(rows, dtype=torch.int64)
        events = StorageEvents(heard)
        events.ignore([hidden, weight, targets])
        with events:
            loss = linear_cross_entropy(hidden, weight, targets, check_targets=False, kernels="reference")
            (loss / 2).backward()
            del loss
    return peak, now


@pytest.mark.redundant
def test_memory_is_a_chunk_of_logits_and_one_gradient_of_the_weight(monkeypatch):
    """4,096 rows and GPT-2's vocabulary. A plan with ``--impl eager`` has all logits."""
    monkeypatch.setattr(losses, "BLOCK_BYTES", 2**23)
    peak, left = peak_and_left(4096, 50257, 64)
    gradients = 4 * 64 * (4096 + 50257)
    assert peak <= 1.1 * CPU_CHUNK_BYTES + gradients
    assert left == gradients
    with all_logits():
        assert peak_and_left(4096, 50257, 64)[0] >= 3 * 4 * 4096 * 50257
