"""Dynamic loss scaling with one scale for all ranks. Training in float16 needs it; training in bfloat16 does not.

Small gradients underflow in float16. So the loss is multiplied by a scale before backward, and gradients are divided by
it afterwards. If the scale is too large, some gradients overflow: then no rank takes that step, and the scale is
halved. After a number of steps without an overflow it is doubled. Micikevicius et al. 2018, "Mixed Precision Training",
section 3.2, https://arxiv.org/abs/1710.03740.

`torch.amp.GradScaler` decides from the gradients of its own process. With a sharded optimizer each rank has other
gradients, so only one rank might see an overflow and skip the step, and the weights would diverge. Here the ranks
all-reduce the maximum of an overflow flag.

    loss = model(tokens, targets)
    scaler.scale_loss(loss).backward()
    if scaler.unscale_(optim):
        zero.clip_grad_norm_(1.0)
        optim.step()
    scaler.update()
    optim.zero_grad()
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import CONTROL, Communicator, labelled

GROWTH, BACKOFF = 2.0, 0.5  # powers of two: scaling causes no rounding error unless a gradient over- or underflows
SMALLEST_SCALE = 1.0


class LossScaler:
    """The scale of the loss, the same on every rank.

    Args:
        comm: the ranks that train together.
        scale: initial scale, above 0.
        growth_interval: steps in a row without an overflow after which the scale is doubled, 1 or more.
        divided_by: a further factor by which losses were divided; `unscale_` multiplies gradients by it.

    Attributes:
        scale: scale of the next step.
        num_skipped: how many steps were skipped so far because of an overflow.

    Raises:
        ValueError: a scale or interval that makes no sense.
    """

    def __init__(
        self, comm: Communicator, scale: float = 2.0**16, growth_interval: int = 2000, *, divided_by: int = 1
    ) -> None:
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"scale: {scale} is not a finite number above 0")
        if growth_interval < 1:
            raise ValueError(f"growth_interval: {growth_interval} is below 1; give a number of steps")
        self.comm = comm
        self.scale = float(scale)
        self.growth_interval, self.divided_by = growth_interval, divided_by
        self.num_skipped = 0
        self._num_since_overflow = 0
        self._finite: bool | None = None

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which to call ``backward``; in fp32 or wider, because it often exceeds 65504."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> bool:
        """Divide the gradients that ``optimizer`` would use by the scale, in place. Collective.

        Returns:
            Whether no gradient is NaN/Inf on any rank; the same on all ranks. If False, do not step.
        """
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        for param in params:
            # Of a `DTensor` its local part; importing the class, to recognise it, takes most of a second.
            grad = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        overflowed = torch.zeros(1, device=self.comm.control_device)
        for (device, _), grads in by_kind.items():
            found = torch.zeros(1, device=device)
            # The fused check and multiplication that torch's own GradScaler uses.
            inverse = torch.full((1,), self.divided_by / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
            overflowed = torch.maximum(overflowed, found.to(overflowed.device))
        with labelled(CONTROL):
            self.comm.all_reduce(overflowed, "max").wait()
        self._finite = not overflowed.item()
        return self._finite

    def update(self) -> None:
        """Choose the scale of the next step by the result of `unscale_`.

        Raises:
            RuntimeError: `unscale_` was not called since the last `update`.
        """
        if self._finite is None:
            raise RuntimeError("update: call unscale_(optimizer) first, once a step")
        if self._finite:
            self._num_since_overflow += 1
            if self._num_since_overflow == self.growth_interval:
                self.scale, self._num_since_overflow = self.scale * GROWTH, 0
        else:
            self.scale, self._num_since_overflow = self.scale * BACKOFF, 0
            self.num_skipped += 1
        self._finite = None

    @property
    def exhausted(self) -> bool:
        """Whether the scale is so small that it cannot be the cause of overflows."""
        return self.scale < SMALLEST_SCALE

    def state_dict(self) -> dict[str, float | int]:
        """Return the state that a resumed run needs, in a form for JSON."""
        return {
            "scale": self.scale,
            "num_since_overflow": self._num_since_overflow,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the values of `state_dict`."""
        self.scale = float(state["scale"])
        self._num_since_overflow = int(state["num_since_overflow"])
        self.num_skipped = int(state["num_skipped"])
