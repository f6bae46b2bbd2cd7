from functools import partial

import pytest
import torch

from exactness import ROUNDING, assert_near, assert_same_bits, run
from zeroshard.kernels import linear_cross_entropy
from zeroshard.kernels.cross_entropy import cross_entropy_reference
from zeroshard.kernels.linear_cross_entropy import (
    CHUNK_BYTES,
    VOCAB_MULTIPLE,
    _in_one_node,
    linear_cross_entropy_reference,
    rows_at_once,
)
from zeroshard.lab.predict.recorder import StorageEvents
from zeroshard.lab.predict.work import work_of_projected_loss


def draw_targets(shape, vocab, device, ignored=()):
    targets = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(3))
    targets.flatten()[list(ignored)] = -100
    return targets.to(device)


def exact(hidden, weight, targets, **options):
    options.pop("chunk_rows", None)
    return cross_entropy_reference(hidden @ weight.T, targets, **options)


def ours(hidden, weight, targets, **options):
    return linear_cross_entropy(hidden, weight, targets, kernels="triton", **options)


BOTH = pytest.mark.parametrize("who", ["reference", "triton"])  # on a CPU the reference goes by chunks too


def by(who, targets, **options):
    return partial(linear_cross_entropy, targets=targets, kernels=who, **options)


def compare(hidden, weight, targets, upstream=1.0, slack=1.0, **options):
    grad = [torch.full((), upstream, device=hidden.device)]
    wanted = run(partial(exact, targets=targets, **options), [hidden.double(), weight.double()], grad)
    function = partial(ours, targets=targets, **options)
    got = run(function, [hidden, weight], grad)
    for name, one, other in zip(("loss", "d_hidden", "d_weight"), got, wanted, strict=True):
        assert_near(one, other, slack=slack, terms=1e-3, what=f"{options} {name}")
    assert_same_bits(got, run(function, [hidden, weight], grad))


@pytest.mark.redundant
@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 5, 6, None])
@pytest.mark.parametrize("vocab", [1, 7, 257])
def test_loss_and_gradients_are_the_formula_s_in_any_number_of_chunks(chunk_rows, vocab, triton, random, device):
    """`compare` asserts it."""
    targets = draw_targets((5,), vocab, device, [2])
    compare(random(5, 12), random(vocab, 12), targets, upstream=0.5, chunk_rows=chunk_rows)


@pytest.mark.redundant
@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"reduction": "sum", "z_loss": 1e-2, "ignore_index": 4}]
)
def test_options(options, triton, random, device):
    """`compare` asserts it."""
    for dtype in (torch.float32, torch.float64):
        hidden, weight = random(2, 3, 12, dtype=dtype), random(33, 12, dtype=dtype)
        compare(hidden, weight, draw_targets((2, 3), 33, device), chunk_rows=4, **options)


@pytest.mark.redundant
@pytest.mark.parametrize("vocab", [50257, 8192 + 64])
def test_large_vocabularies(vocab, triton, random, device):
    # A product of so few rows adds its 50,257 terms one after the other: 6e-5 off, as PyTorch's own fp32 loss is.
    """`compare` asserts it."""
    compare(random(2, 4), random(vocab, 4), draw_targets((2,), vocab, device), slack=64, chunk_rows=1)


@pytest.mark.redundant
@pytest.mark.parametrize(("vocab", "sizes"), [(257, {256, 1}), (192, {192}), (33, {33})])
def test_products_over_an_odd_vocabulary_read_aligned_rows_of_aligned_lengths(
    vocab, sizes, triton, random, device, monkeypatch
):
    """See [Note: Odd vocabularies] in `zeroshard.kernels.linear_cross_entropy`; the products on a CPU show which."""
    hidden, weight = random(5, 12, dtype=torch.float32), random(vocab, 12, dtype=torch.float32)
    seen = []

    def watched(product):
        def call(*args, **kwargs):
            seen.append([*args, kwargs["out"]])
            return product(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("mm", "addmm"):
            patch.setattr(torch, name, watched(getattr(torch, name)))
        run(by("triton", draw_targets((5,), vocab, device), chunk_rows=3), [hidden, weight])
    assert len(seen) == 2 * 3 * len(sizes)  # of two chunks: logits and both gradients
    assert {size for tensors in seen for t in tensors for size in t.shape if size not in (2, 3, 12)} == sizes
    strides = {t.stride(0) * t.stride(1) for tensors in seen for t in tensors if 12 not in t.shape}
    assert strides == {-(-vocab // 64) * 64}


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_logits_and_their_gradient_once(who, dtype, triton, random, device):
    hidden, weight = random(6, 32, dtype=dtype), random(40, 32, dtype=dtype) / 8
    targets = draw_targets((6,), 40, device, [1])
    got = run(by(who, targets, chunk_rows=4), [hidden, weight])
    logits = (hidden @ weight.T).double().requires_grad_()
    loss = cross_entropy_reference(logits, targets)
    (grad,) = torch.autograd.grad(loss, logits)
    assert_near(got[0], loss.detach())
    # The gradient of the logits is rounded to the half dtype, a unit of each term, before it is multiplied.
    for one, left, right in ((got[1], grad, weight.double()), (got[2], grad.T, hidden.double())):
        wanted, terms = left @ right, left.abs() @ right.abs()
        assert ((one.double() - wanted).abs() <= ROUNDING[dtype] * (wanted.abs() + terms)).all()


@pytest.mark.redundant(but=["reference"])
@BOTH
def test_a_scaled_loss_keeps_small_gradients_in_fp16(who, triton, random, device):
    """Probabilities of 2e-5, a mean over 64 rows, a loss scale of 2^16: 3e-7 has two bits in fp16, 0.02 has eleven."""
    targets = torch.zeros(64, dtype=torch.int64, device=device)
    logits = torch.zeros(64, 16, dtype=torch.float16, device=device)
    logits[:, 1:] = -11.0 + random(64, 15).half() / 8
    weight = torch.eye(16, dtype=torch.float16, device=device)
    got = run(lambda x: by(who, targets)(x, weight) * 2.0**16, [logits])[1]
    (wanted,) = run(lambda x: cross_entropy_reference(x, targets) * 2.0**16, [logits.double()])[1:]
    assert_near(got, wanted, slack=2)


def test_the_upstream_gradient_is_not_rounded(triton, random, device):
    hidden, weight = random(4, 8, dtype=torch.bfloat16), random(9, 8, dtype=torch.bfloat16)
    targets = draw_targets((4,), 9, device)
    plain = run(partial(ours, targets=targets), [hidden, weight])[1]
    third = run(lambda h, w: ours(h, w, targets) / 3, [hidden, weight])[1]
    assert_near(third, plain.double() / 3)


@pytest.mark.redundant(but=["reference"])
@BOTH
def test_the_weight_s_gradient_is_summed_in_fp32(who, triton, device):
    """One large and many small addends: in bf16 the small ones would each be lost."""
    hidden = torch.ones(65, 1, dtype=torch.bfloat16, device=device)
    hidden[1:] *= 2.0**-8
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, device=device)
    targets = torch.zeros(65, dtype=torch.int64, device=device)
    d_weight = run(by(who, targets, chunk_rows=1, reduction="sum"), [hidden, weight])[2]
    assert d_weight[0, 0] == -0.625  # (1 + 64 / 256) / 2, each row's probability being a half


@pytest.mark.gpu
def test_large_shapes(triton, random, device):
    """`compare` asserts it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, weight = random(4097, 64), random(50257, 64) / 8
    compare(hidden, weight, draw_targets((4097,), 50257, device, [1]), slack=8, chunk_rows=1000)


@pytest.mark.redundant
def test_memory_of_a_loss_by_chunks_is_the_planned_one(triton, random, device):
    hidden, weight = random(12, 64), random(9, 64)
    peaks = []
    for compute in (_in_one_node, work_of_projected_loss):
        now, peak = 0, 0

        def changed(storage, num_bytes):
            nonlocal now, peak
            now += num_bytes
            peak = max(peak, now)

        outputs = torch.empty(12, device=device), torch.empty_like(hidden), torch.empty_like(weight)
        given = hidden, weight, draw_targets((12,), 9, device), torch.ones((), device=device), *outputs
        recorder = StorageEvents(changed)
        recorder.ignore(given)
        with recorder:
            compute(*given, -100, 0.0, 0.0, True, 4)
        peaks.append(peak)
    assert peaks == [4 * 4 * (VOCAB_MULTIPLE + 64)] * 2  # a chunk's logits, and the gradient of its hidden states


@pytest.mark.gpu
def test_peak_memory_is_a_chunk_and_not_the_logits(triton, device):
    hidden = torch.zeros(16384, 768, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.zeros(50304, 768, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.zeros(16384, dtype=torch.int64, device=device)
    peaks = []
    for kernels in ("reference", "triton"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, targets, kernels=kernels).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        hidden.grad = weight.grad = None
    assert peaks[1] <= 0.15 * peaks[0]


@pytest.mark.redundant
@pytest.mark.parametrize("ours_alone", ["hidden", "weight"])
def test_one_gradient_alone_and_a_second_backward(ours_alone, triton, random, device):
    targets = draw_targets((5,), 33, device)
    hidden = random(5, 12).requires_grad_(ours_alone == "hidden")
    weight = random(33, 12).requires_grad_(ours_alone == "weight")
    wanted = hidden if ours_alone == "hidden" else weight
    loss = ours(hidden, weight, targets)
    first = torch.autograd.grad(loss * 2, wanted, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss * 2, wanted)[0])


@BOTH
def test_no_rows_and_all_masked(who, triton, random, device):
    weight = random(33, 12)
    for hidden, targets in (
        (random(0, 12), torch.zeros(0, dtype=torch.int64, device=device)),
        (random(5, 12), torch.full((5,), -100, device=device)),
    ):
        loss, d_hidden, d_weight = run(by(who, targets), [hidden, weight])
        assert loss.isnan()
        assert not d_hidden.any()
        assert not d_weight.any()


@BOTH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, partial(torch.set_grad_enabled, False)])
def test_an_evaluation_makes_no_gradient_and_takes_no_memory_for_one(who, mode, triton, random, device, monkeypatch):
    hidden, weight = random(5, 12).requires_grad_(), random(33, 12).requires_grad_()
    targets = draw_targets((5,), 33, device)
    made, make = [], torch.empty
    with monkeypatch.context() as patch, mode():
        patch.setattr(torch, "addmm", None)  # what makes gradients
        patch.setattr(torch, "empty", lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1])
        got = by(who, targets)(hidden, weight)
    assert_near(got, exact(hidden.detach().double(), weight.detach().double(), targets))
    assert not got.requires_grad
    wanted = [(5,), (5, 64 if who == "triton" else 33)]  # losses, and a chunk of logits
    if who == "reference" and device.type == "cuda":
        wanted = []  # all logits, by torch's own operations
    assert [tuple(tensor.shape) for tensor in made] == wanted


@pytest.mark.redundant
def test_gradients_are_there_again_after_an_evaluation(triton, random, device):
    hidden, weight = random(5, 12).requires_grad_(), random(33, 12).requires_grad_()
    targets = draw_targets((5,), 33, device)
    with torch.no_grad():
        before = ours(hidden, weight, targets)
        with torch.enable_grad():  # a loss that is differentiated inside an evaluation
            inside = ours(hidden, weight, targets)
    after = ours(hidden, weight, targets)
    assert before == inside == after
    for loss in (inside, after):
        assert all(grad.any() for grad in torch.autograd.grad(loss, [hidden, weight]))


def test_the_reference_is_a_linear_layer_and_torch_s_loss(random, device):
    hidden, weight, targets = random(2, 3, 12), random(33, 12), draw_targets((2, 3), 33, device, [1])

    def separate(hidden, weight):
        logits = torch.nn.functional.linear(hidden, weight)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    got = run(partial(linear_cross_entropy_reference, targets=targets), [hidden, weight])
    assert_same_bits(got, run(separate, [hidden, weight]))


def test_chunks_are_of_one_size_and_small():
    for num_rows, vocab in ((16384, 50304), (16384, 128256), (1, 7), (300, 10**9)):
        rows = rows_at_once(num_rows, vocab, 2, on_cuda=False, triton=True)
        assert rows % 128 == 0
        assert rows * vocab * 2 <= CHUNK_BYTES + 128 * vocab * 2
    assert rows_at_once(16384, 50304, 2, on_cuda=False, triton=True) == 4096
    assert rows_at_once(4096, 50257, 4, on_cuda=False) == 320
