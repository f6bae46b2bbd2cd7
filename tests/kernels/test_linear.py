"""Our linear layer gives torch's bits, and computes its weight's gradient in an engine's place if one is offered."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from zeroshard import grad_places
from zeroshard.kernels import Linear, linear

SHAPES = [((), 16, 8), ((1,), 3, 5), ((0,), 4, 4), ((7,), 257, 129), ((1, 128), 96, 64), ((2, 3, 4), 48, 16)]


class Place:
    """Offers memory of NaNs for a weight's first gradient, and adds up later ones."""

    def __init__(self, weight: torch.Tensor, scale: float = 0.5) -> None:
        self.memory, self.scale = torch.full_like(weight, float("nan")).detach(), scale
        self.given = self.times = 0
        grad_places.offer(weight, self)

    def place(self, dtype: torch.dtype) -> torch.Tensor | None:
        assert dtype == self.memory.dtype
        if self.given:
            return None
        self.given += 1
        return self.memory.view(self.memory.shape)

    def arrives(self) -> None:
        self.times += 1

    def takes(self, grad: torch.Tensor) -> bool:
        assert self.times
        self.times += 1
        self.memory.add_(grad, alpha=self.scale)
        return True


def _case(lead, num_out, num_in, dtype, *, bias=True):
    generator = torch.Generator().manual_seed(num_out)
    weight, x, g = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((num_out, num_in), (*lead, num_in), (*lead, num_out))
    )
    params = [nn.Parameter(weight)] + ([nn.Parameter(torch.ones(num_out, dtype=dtype))] if bias else [])
    return params, x.requires_grad_(), g


def _gradients(function, params, x, g):
    y = function(x, *params)
    y.backward(g)
    found = [each.grad for each in (*params, x)]
    for each in (*params, x):
        each.grad = None
    return y, *found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_torch(shape, bias, dtype):
    params, x, g = _case(*shape, dtype, bias=bias)
    expected = _gradients(F.linear, params, x, g)
    place = Place(params[0])
    y, d_weight, *others = _gradients(linear, params, x, g)
    assert place.times == 1
    assert d_weight is None
    torch.testing.assert_close([y, place.memory / place.scale, *others], list(expected), rtol=0, atol=0)


def test_a_weight_that_was_frozen_after_forward_gets_no_gradient():
    (weight,), x, _ = _case((4,), 16, 8, torch.float32, bias=False)
    place = Place(weight)
    y = linear(x, weight)
    weight.requires_grad_(False)
    y.sum().backward()
    assert (place.times, weight.grad) == (0, None)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_sees_a_weights_gradient():
    (weight,), x, g = _case((4,), 16, 8, torch.float32, bias=False)
    Place(weight)
    with torch.autograd.detect_anomaly():
        y = linear(x.detach() * float("inf"), weight)
        with pytest.raises(RuntimeError, match="returned nan values"):
            y.backward(g * 0)


class _Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        return None


def test_where_no_gradient_arrives_none_leaves():
    (weight, bias), x, _ = _case((4,), 16, 8, torch.float32)
    place = Place(weight)
    (_Stops.apply(linear(x, weight, bias)).sum() + x.sum()).backward()
    assert (place.times, weight.grad, bias.grad) == (0, None, None)


def _seen_in_a_second_run(weight, x):
    """A graph that is run twice; before the second time the user finds the weight's node in it."""
    y = linear(x, weight).square().sum()
    y.backward(retain_graph=True)
    seen = []
    y.grad_fn.next_functions[0][0].next_functions[0][0].next_functions[1][0].register_prehook(
        lambda grads: seen.append(grads[0])
    )
    y.backward()
    weight.grad = None
    return seen[0]


def test_hooks_on_a_graph_that_was_retained_see_the_gradient():
    (weight,), x, _ = _case((4,), 16, 8, torch.float32, bias=False)
    expected = torch.autograd.grad(F.linear(x, weight).square().sum(), [weight])[0]
    place = Place(weight)
    torch.testing.assert_close(_seen_in_a_second_run(weight, x), expected)
    assert place.times == 1


def test_without_an_offer_it_is_torchs_operation():
    (weight, bias), x, _ = _case((4,), 8, 8, torch.float32)
    assert linear(x, weight, bias).grad_fn.name() == F.linear(x, weight, bias).grad_fn.name()
    place = Place(weight)
    grad_places.withdraw(weight)
    linear(x, weight, bias).sum().backward()
    assert place.times == 0


def _grad(weight, x):
    return torch.autograd.grad(linear(x, weight).square().sum(), [weight])[0]


def _inputs_alone(weight, x):
    loss = linear(x, weight).square().sum()
    loss.backward(inputs=[x])
    assert weight.grad is None
    return torch.autograd.grad(F.linear(x, weight).square().sum(), [weight])[0]


def _create_graph(weight, x):
    linear(x, weight).square().sum().backward(create_graph=True)
    found, weight.grad = weight.grad, None
    return found


def _hooked(weight, x):
    seen = []
    handle = weight.register_hook(seen.append)
    linear(x, weight).square().sum().backward()
    handle.remove()
    weight.grad = None
    return seen[0]


def _func(weight, x):
    return torch.func.grad(lambda w: linear(x, w).square().sum())(weight)


def _vmap(weight, x):
    loss = torch.vmap(lambda row: linear(row, weight).square().sum())(x).sum()
    return torch.autograd.grad(loss, [weight])[0]


def _compiled(weight, x):
    return torch.autograd.grad(
        torch.compile(linear, backend="eager", fullgraph=True)(x, weight).square().sum(), [weight]
    )[0]


def _on_the_node(weight, x):
    seen = []
    y = linear(x, weight)
    y.grad_fn.register_hook(lambda grads, upstream: seen.append(grads[1]))
    y.square().sum().backward()
    weight.grad = None
    return seen[0]


def _before_the_node(weight, x):
    y = linear(x, weight)
    y.grad_fn.register_prehook(lambda upstream: upstream)
    y.square().sum().backward()
    found, weight.grad = weight.grad, None
    return found


def _held_node(register):
    def hooked(weight, x):
        seen = []
        node = weight.view_as(weight).grad_fn.next_functions[0][0]
        register(node, seen.append)
        linear(x, weight).square().sum().backward()
        weight.grad = None
        return seen[0]

    hooked.__name__ = register.__name__
    return hooked


def _before_accumulation(node, keep):
    node.register_prehook(lambda grads: keep(grads[0]))


def _after_accumulation(node, keep):
    node.register_hook(lambda none, grads: keep(grads[0].clone()))


CALLERS = [_grad, _inputs_alone, _create_graph, _hooked, _func, _vmap, _compiled]
CALLERS += [_on_the_node, _before_the_node, _held_node(_before_accumulation), _held_node(_after_accumulation)]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("caller", CALLERS, ids=lambda fn: fn.__name__.strip("_"))
def test_a_gradient_that_somebody_else_gets_is_a_tensor_of_its_own(caller):
    (weight,), x, _ = _case((4,), 16, 8, torch.float32, bias=False)
    expected = torch.autograd.grad(F.linear(x, weight).square().sum(), [weight])[0]
    place = Place(weight)
    found = caller(weight, x)
    assert place.times == 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16)], ids=str)
def test_its_output_may_be_changed_in_place(shape):
    (weight, bias), _, _ = _case((4,), 8, 16, torch.float32)
    x = torch.ones(shape)
    expected = torch.autograd.grad(torch.relu_(F.linear(x, weight, bias)).sum(), [weight])[0]
    place = Place(weight, scale=1.0)
    torch.relu_(linear(x, weight, bias)).sum().backward()
    torch.testing.assert_close(place.memory, expected, rtol=0, atol=0)


def _complex(weight, bias):
    x = torch.randn(4, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    return linear(x, weight.to(torch.complex64), bias.to(torch.complex64)).abs().sum()


def _sparse(weight, bias):
    return linear(torch.eye(8).to_sparse(), weight, bias).sum()


def _nested(weight, bias):
    rows = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    return linear(rows, weight, bias).values().sum()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
@pytest.mark.parametrize("loss", [_complex, _sparse, _nested], ids=lambda fn: fn.__name__.strip("_"))
def test_unusual_inputs_are_torchs_affair(loss):
    params, _, _ = _case((4,), 16, 8, torch.float32)
    expected = torch.autograd.grad(loss(*params), params)
    Place(params[0])
    torch.testing.assert_close(torch.autograd.grad(loss(*params), params), expected)


def test_complex_weights_have_torchs_gradients():
    (weight,), x, _ = _case((4,), 16, 8, torch.complex64, bias=False)
    expected = torch.autograd.grad(F.linear(x, weight).abs().sum(), [weight, x])
    place = Place(weight)
    found = torch.autograd.grad(linear(x, weight).abs().sum(), [weight, x])
    torch.testing.assert_close(found, expected)
    assert place.times == 0


def test_what_no_gradient_needs_is_not_kept():
    (weight, bias), x, _ = _case((4,), 16, 8, torch.float32)
    Place(weight)
    weight.requires_grad_(False)
    h = x * 1
    y = linear(h, weight, bias)
    h.add_(1)  # a frozen weight does not need it
    y.sum().backward()
    weight.requires_grad_(True)
    y = linear(x.detach(), weight)
    with torch.no_grad():
        weight.mul_(2)  # an input without a gradient does not need it
    y.sum().backward()


@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_only_the_gradient_that_is_asked_for_is_computed(which):
    (weight, bias), x, _ = _case((4,), 16, 8, torch.float32)
    of = {"x": x, "weight": weight, "bias": bias}[which]

    def num_products(function):
        y = function(x, weight, bias).square().sum()
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(y, [of])
        return counter.get_total_flops() // (2 * 4 * 16 * 8)

    Place(weight)
    assert num_products(linear) == (which != "bias")
    assert num_products(linear) <= num_products(F.linear)


def test_a_backward_inside_autocast_rounds_as_torchs_does():
    (weight,), x, g = _case((4,), 16, 8, torch.float32, bias=False)
    place = Place(weight)
    gradients = []
    for function in (F.linear, linear):
        y = function(x, weight)
        with torch.autocast("cpu", torch.bfloat16):
            y.backward(g)
        gradients.append(weight.grad)
        weight.grad = None
    assert place.times == 0
    assert torch.equal(*gradients)


class _Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


def test_a_mode_that_changes_linear_layers_is_differentiated():
    (weight,), x, _ = _case((4,), 16, 8, torch.float32, bias=False)
    place = Place(weight)
    with _Doubles():
        y = linear(x, weight)
    expected = torch.autograd.grad(2 * F.linear(x, weight).sum(), [x])[0]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), [x])[0], expected)
    with torch.device("cpu"):
        linear(x, weight).sum().backward()
    assert place.times == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_a_trace_holds_torchs_operation():
    made = Linear(8, 16)
    Place(made.weight)
    traced = torch.jit.trace(made, torch.ones(4, 8))
    assert "_PlacedLinear" not in str(traced.graph)


def test_second_derivatives_are_torchs():
    (weight, bias), x, _ = _case((4,), 16, 8, torch.float64)
    Place(weight)
    assert torch.autograd.gradgradcheck(lambda *args: linear(*args).tanh(), (x, weight, bias))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own decompositions
def test_forward_mode_is_torchs():
    (weight,), x, _ = _case((4,), 16, 8, torch.float32, bias=False)
    Place(weight)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(linear(dual, weight)).tangent
    torch.testing.assert_close(tangent, F.linear(torch.ones_like(x), weight))


def test_under_autocast_it_is_torchs_operation():
    (weight, bias), x, _ = _case((4,), 16, 8, torch.float32)
    place = Place(weight)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert place.times == 0
    assert weight.grad.dtype == torch.float32


def test_a_weight_that_is_used_several_times_gets_the_sum():
    (weight,), x, _ = _case((4,), 8, 8, torch.float32, bias=False)

    def loss(function):
        return function(function(function(x, weight), weight), weight).sum()

    (expected,) = torch.autograd.grad(loss(F.linear), [weight])
    place = Place(weight, scale=0.25)
    loss(linear).backward()
    assert place.times == 3
    torch.testing.assert_close(place.memory / place.scale, expected, rtol=0, atol=0)


def test_the_module_is_torchs_with_the_same_state():
    made = Linear(8, 16)
    assert isinstance(made, nn.Linear)
    assert list(made.state_dict()) == list(nn.Linear(8, 16).state_dict())
    Place(made.weight)
    twin, loaded = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    for each in (twin, loaded):
        assert torch.equal(each.weight, made.weight)
        assert not grad_places.is_offered(each.weight)


def test_an_offer_keeps_no_parameter_alive():
    weight = nn.Parameter(torch.zeros(2, 2))
    receiver = Place(weight)
    before = len(grad_places._receivers)
    del weight
    assert len(grad_places._receivers) == before - 1
    assert receiver.times == 0
