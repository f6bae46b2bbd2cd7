"""Our signatures over Liger-Kernel's functions: what is handed over, without a GPU; values, with one."""

import importlib.util

import pytest
import torch

from exactness import run
from zeroshard import kernels
from zeroshard.kernels import liger

HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None


@pytest.fixture
def handed_over(monkeypatch):
    """Calls of Liger's functions, as (module, name, arguments)."""
    calls = []

    def function(module, name):
        def call(*arguments):
            calls.append((module, name, arguments))
            return arguments[0]

        return call

    monkeypatch.setattr(liger, "_function", function)
    return calls


def test_a_layer_norm_without_a_bias_is_given_one_of_zeros(handed_over):
    x, weight = torch.ones(2, 4), torch.ones(4)
    liger.layer_norm(x, weight, None, 1e-5)
    ((module, name, (_, _, bias, eps)),) = handed_over
    assert (module, name, eps) == ("layer_norm", "LigerLayerNormFunction", 1e-5)
    assert torch.equal(bias, torch.zeros(4))


def test_a_layer_norm_without_a_weight_is_refused(handed_over):
    with pytest.raises(ValueError, match="liger has no layer_norm without a weight"):
        liger.layer_norm(torch.ones(2, 4), None, None, 1e-5)
    assert not handed_over


def test_rope_s_tables_hold_each_angle_twice(handed_over):
    q, k, cos, sin = torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8), torch.rand(3, 4), torch.rand(3, 4)
    liger.rope(q, k, cos, sin)
    ((_, _, (_, _, wide_cos, wide_sin)),) = handed_over
    assert wide_cos.shape == wide_sin.shape == (1, 3, 8)
    assert torch.equal(wide_cos[0, :, :4], cos)
    assert torch.equal(wide_cos[0, :, 4:], cos)


OPERATIONS = {
    "layer_norm": lambda x, w, t, k: kernels.layer_norm(x, w, w, kernels=k),
    "rms_norm": lambda x, w, t, k: kernels.rms_norm(x, w, kernels=k),
    "swiglu": lambda x, w, t, k: kernels.swiglu(x * 1, x * w, kernels=k),
    "geglu": lambda x, w, t, k: kernels.geglu(x * 1, x * w, kernels=k),
    "cross_entropy": lambda x, w, t, k: kernels.cross_entropy(x * w, t, label_smoothing=0.1, z_loss=0.01, kernels=k),
    "linear_cross_entropy": lambda x, w, t, k: kernels.linear_cross_entropy(x * w, x.detach(), t, kernels=k),
}


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_LIGER, reason="needs liger-kernel")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_liger_computes_what_the_reference_computes(operation, random, device):
    inputs, targets = [random(32, 64), random(64)], torch.arange(32, device=device)
    results = [run(lambda x, w, k=k: OPERATIONS[operation](x, w, targets, k), inputs) for k in ("liger", "reference")]
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_every_operation_of_the_table_is_there():
    for name in set(kernels.OPERATIONS) - {"adamw", "sum_of_squares", "block_formats"}:
        assert callable(getattr(liger, name))
