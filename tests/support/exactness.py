"""How far a kernel may be from its formula in float64, and the harness that holds it there.

A kernel works in fp32 (fp64 for fp64) and rounds each result once. So an error has two parts:

* one unit in the last place of the result's own dtype: relative ``ROUNDING``. Half of one is what a GPU rounds to;
  Triton's interpreter truncates bf16 after rounding, and costs the other half;
* fp32's rounding of a sum of many terms, which is relative to the *terms* and not to what is left of them after
  cancellation: ``SUMMING`` times the largest magnitude among the result's elements. 2e-6 is 32 units of fp32 at 1.0,
  which covers a chain of a dozen operations over tree sums of 2^17 terms.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
SUMMING = {torch.float16: 2e-6, torch.bfloat16: 2e-6, torch.float32: 2e-6, torch.float64: 1e-14}


def assert_near(got: Tensor, exact: Tensor, *, slack: float = 1.0, terms: float = 0.0, what: str = "") -> None:
    """``got`` is the float64 tensor ``exact`` up to its dtype's rounding; NaN, so an unwritten element, never is.

    Args:
        slack: a factor on both parts, where a test says why.
        terms: the largest term of a sum that cancels out, where that is above the largest result.
    """
    assert got.shape == exact.shape, (what, got.shape, exact.shape)
    if not got.numel():
        return
    got, exact, dtype = got.double().cpu(), exact.double().cpu(), got.dtype
    largest = max(exact[exact.isfinite()].abs().amax().item() if exact.isfinite().any() else 0.0, terms)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # below it a dtype has no numbers
    bound = slack * (ROUNDING[dtype] * exact.abs() + SUMMING[dtype] * largest + smallest)
    wrong = ~((got - exact).abs() <= bound) & ~(got == exact)
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {got.numel()} beyond the bound, first {first(wrong, got, exact)}"
    )


def first(wrong: Tensor, got: Tensor, exact: Tensor) -> str:
    """Where, what came, what should have."""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"at {at}: {got[at].item()} for {exact[at].item()}"


def run(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Tensor], grads: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Outputs of ``function(*inputs)``, then the gradients of those inputs that are floating, for output ``grads``."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if grads is None:
        grads = [torch.ones_like(y) for y in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(outputs, wanted, [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)])
    return [y.detach() for y in outputs] + list(found)


def assert_same_bits(first_time: Sequence[Tensor], second_time: Sequence[Tensor]) -> None:
    """Both lists hold the same bits; NaN equals NaN."""
    for one, other in zip(first_time, second_time, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def same_bits(one: Any, other: Any) -> bool:
    """Whether tensors in mappings and sequences have the same bits and dtypes, and all else is equal."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_bits(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other
