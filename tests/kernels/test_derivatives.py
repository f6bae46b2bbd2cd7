"""A derivative of a gradient that our kernels computed: right, or an error."""

import pytest
import torch

from zeroshard.kernels import cross_entropy, layer_norm, linear_cross_entropy, rms_norm, swiglu

TARGETS = torch.arange(6)
LOSSES = {
    "cross_entropy": lambda h, w, kernels: cross_entropy(h, TARGETS.to(h.device), kernels=kernels),
    "linear_cross_entropy": lambda h, w, kernels: linear_cross_entropy(h, w, TARGETS.to(h.device), kernels=kernels),
    "layer_norm": lambda h, w, kernels: layer_norm(h, w[0], w[1], kernels=kernels).sum(),
    "rms_norm": lambda h, w, kernels: rms_norm(h, w[0], kernels=kernels).sum(),
    "swiglu": lambda h, w, kernels: swiglu(h, 2 * h, kernels=kernels).sum(),
}


def _slope(name, kernels, random):
    """The loss, and its gradient with a graph, of inputs that a product comes before."""
    x, weight = (random(n, 8, dtype=torch.float64).requires_grad_() for n in (6, 8))
    loss = LOSSES[name](x @ weight, weight, kernels)
    return loss, torch.autograd.grad(loss, x, create_graph=True)[0]


@pytest.mark.redundant(but=["swiglu"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_penalty_raises_instead_of_taking_gradients_for_constants(name, triton, random):
    loss, slope = _slope(name, triton, random)
    with pytest.raises(RuntimeError, match="gradient of a Triton kernel cannot be differentiated again"):
        (loss + slope.square().sum()).backward()


@pytest.mark.parametrize("name", LOSSES)
def test_the_reference_has_second_derivatives(name, random):
    loss, slope = _slope(name, "reference", random)
    assert slope.requires_grad
    (loss + slope.square().sum()).backward()


@pytest.mark.redundant
@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_that_nobody_differentiates_changes_no_gradient(name, triton, random):
    x, weight = random(6, 8), random(8, 8)
    x.requires_grad_()
    loss = LOSSES[name](x * 1, weight, triton)
    plain = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x, create_graph=True)[0], plain)
