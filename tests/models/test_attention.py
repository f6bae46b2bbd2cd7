"""Attention asks for a kernel that the device has, and gives the same whichever it is."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.models.attention import _has_flash, attend
from zeroshard.models.cache import LayerCache


def _qkv(heads=4, kv_heads=2, num_tokens=6, width=8, **options):
    shapes = [(2, heads, num_tokens, width), *[(2, kv_heads, num_tokens, width)] * 2]
    return [torch.randn(shape, **options) for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_keys_give_what_shared_ones_do(masked, monkeypatch):
    torch.manual_seed(0)
    tensors = _qkv(requires_grad=True)
    mask = torch.rand(2, 1, 6, 6).gt(0.5).logical_or(torch.eye(6, dtype=torch.bool)).tril() if masked else None
    found = []
    for traced in (False, True):
        monkeypatch.setattr("zeroshard.models.attention._is_planned", lambda traced=traced: traced)
        y = attend(*tensors, mask)
        found.append([y, *torch.autograd.grad(y.square().sum(), tensors)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "masked", "kv_heads", "num_keys", "grouped"),
    [
        (torch.bfloat16, False, 2, 2, True),  # flash attention shares keys
        (torch.bfloat16, True, 2, 4, False),
        (torch.float32, False, 2, 4, False),
        (torch.float32, True, 4, 4, False),
        (torch.float16, False, 4, 4, False),
    ],
)
def test_on_cuda_no_call_is_one_that_only_the_math_kernel_serves(
    dtype, masked, kv_heads, num_keys, grouped, monkeypatch
):
    """Planted: with `enable_gqa` and a mask PyTorch's choice is the math kernel, which holds all scores."""
    asked = []

    def sdpa(q, k, v, **options):
        asked.append((k.shape[1], options["enable_gqa"], options["is_causal"]))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    with FakeTensorMode():
        mask = torch.ones(6, 6, dtype=torch.bool, device="cuda") if masked else None
        attend(*_qkv(kv_heads=kv_heads, dtype=dtype, device="cuda"), mask)
    assert asked == [(num_keys, grouped, not masked)]


@pytest.mark.parametrize(
    ("capability", "width", "num_keys"),
    [((8, 0), 128, 2), ((9, 0), 128, 2), ((12, 0), 64, 2), ((7, 5), 64, 4), ((7, 0), 128, 4), ((9, 0), 256, 4)],
)
def test_queries_share_keys_where_a_gpu_has_flash_attention_for_them(capability, width, num_keys, monkeypatch):
    """A T4 has none: with `enable_gqa` only the math kernel would be left, in fp16 too."""
    asked = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: asked.append(k.shape[1]))
    monkeypatch.setattr("zeroshard.models.attention._capability", lambda device: capability)
    with FakeTensorMode():
        attend(*_qkv(width=width, dtype=torch.float16, device="cuda"))
    assert asked == [num_keys]


@pytest.mark.redundant
def test_what_a_gpu_has_is_a_constant_of_compiled_code(monkeypatch):
    def capability(device):
        torch._dynamo.graph_break()  # stands for what dynamo cannot trace; without it nothing happens here
        return 7, 5

    monkeypatch.setattr("zeroshard.models.attention._capability", capability)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + _has_flash(torch.device("cuda", 0)), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == 0


def test_the_first_tokens_of_a_cache_need_no_mask_and_later_ones_see_what_came_before(monkeypatch):
    torch.manual_seed(0)
    q, k, v = _qkv()
    whole = attend(q, k, v)
    cache = LayerCache(6)
    pieces = []
    for start, end in ((0, 3), (3, 5), (5, 6)):
        keys, values, mask = cache.extend(k[:, :, start:end], v[:, :, start:end])
        assert (mask is None) == (start == 0 or end - start == 1)
        pieces.append(attend(q[:, :, start:end], keys, values, mask))
    torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=1e-5, atol=1e-6)
