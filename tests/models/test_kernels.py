"""Whole models on our kernels: in Triton's interpreter, or on a GPU where there is one."""

from dataclasses import replace

import pytest
import torch

from exactness import assert_same_bits
from models.conftest import CONFIGS
from zeroshard.kernels.launch import HAS_TRITON, INTERPRETED
from zeroshard.models import GPT2, GPT2Config, Llama

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@pytest.fixture(params=["gpt2", "llama"])
def config(request):
    """One of each family."""
    return CONFIGS[request.param]


@pytest.fixture
def batch(batch):
    """A corner of it: the interpreter is slow."""
    return tuple(x[:2, :4] for x in batch)


def loss_and_grads(config, batch, kernels, dtype=torch.float32, autocast=False, compiled=False):
    model = (GPT2 if isinstance(config, GPT2Config) else Llama)(config, kernels=kernels).to(DEVICE, dtype)
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    tokens, targets = (x.to(DEVICE) for x in batch)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model(tokens, targets)
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


def assert_close(got, wanted, rtol):
    """Each tensor within ``rtol`` of its own size, not of each element: sums cancel."""
    for one, other in zip(got, wanted, strict=True):
        error, size = (one - other).double().norm().item(), other.double().norm().item()
        assert error <= rtol * size, (tuple(one.shape), error, size)


@pytest.mark.redundant
@needs_triton
@pytest.mark.pairwise("recompute")
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_loss_and_gradients_are_those_of_the_reference(config, batch, recompute):
    config = replace(config, activation_checkpointing=recompute)
    got = loss_and_grads(config, batch, "triton")
    assert_close(got, loss_and_grads(config, batch, "reference"), 1e-5)
    assert_same_bits(got, loss_and_grads(config, batch, "triton"))


@pytest.mark.redundant
@needs_triton
def test_in_bfloat16_both_are_as_far_from_fp32(config, batch):
    exact = loss_and_grads(config, batch, "reference")
    for kernels in ("triton", "reference"):
        got = loss_and_grads(config, batch, kernels, torch.bfloat16)
        assert_close([x.float() for x in got], exact, 0.05)


@pytest.mark.redundant
@needs_triton
def test_under_autocast_the_products_are_narrow_and_gradients_are_not(config, batch):
    exact = loss_and_grads(config, batch, "reference")
    for kernels in ("triton", "reference"):
        got = loss_and_grads(config, batch, kernels, autocast=True)
        assert {x.dtype for x in got} == {torch.float32}
        assert_close(got, exact, 0.05)


@pytest.mark.redundant
@needs_triton
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # torch's compiler looks at the block's input
@pytest.mark.parametrize("config", ["llama", pytest.param("gpt2", marks=pytest.mark.soak)], indirect=True)
def test_a_compiled_block_is_one_graph_with_our_kernels_in_it(config, batch):
    torch.compiler.reset()
    got = loss_and_grads(config, batch, "triton", compiled=True)
    assert_close(got, loss_and_grads(config, batch, "triton"), 1e-6)
