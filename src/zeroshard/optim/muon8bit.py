"""Muon whose momentum takes one byte an element: `Muon8bit`, and `MuonAdamW8bit`, which has `AdamW8bit` beside it.

| bytes of a matrix's element | weights | gradient | momentum | scales | all  |
|-----------------------------|---------|----------|----------|--------|------|
| Muon, fp32                  | 4       | 4        | 4        |        | 12   |
| Muon8bit, fp32              | 4       | 4        | 1        | 0.02   | 9.02 |

The momentum is decoded, updated and encoded again in fp32, one matrix at a time. Its code and blocks are those of the
first moment in `zeroshard.optim.low_bit`. Under `zeroshard.Zero` each matrix lies on one rank, as Muon needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Muon, Optimizer

from zeroshard.kernels import state_codes
from zeroshard.optim.low_bit import ADAMW_STATES, AdamW8bit, check_block, load_codes
from zeroshard.optim.muon import MATRICES, MuonAdamW, product_dtype, take_updates
from zeroshard.optimizer_classes.reach import OptimizerKind, Reach

_STATES = frozenset({"momentum_buffer_codes", "momentum_buffer_scales"})
_WHOLE = OptimizerKind(Reach.PER_TENSOR, "it orthogonalises the updates of matrices", (2,), by_unit=True)


class Muon8bit(Optimizer):
    """`torch.optim.Muon` with its momentum in 8-bit blocks, which are counted from each matrix's first element.

    States of a parameter: ``momentum_buffer_codes`` (int8) in its shape, ``momentum_buffer_scales`` (fp32) of one
    element a block.

    Args:
        params: matrices or group dicts of them: fp32, bf16 or fp16, whose momentum is computed in fp32.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in `torch.optim.Muon`.
        block: elements with a common scale; a power of two from 16 to 4096.

    Raises:
        ValueError: a setting is outside its range, or a parameter is not 2-D or has another dtype.
    """

    zero_reach = _WHOLE

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        block: int = 256,
    ) -> None:
        stand_in = [nn.Parameter(torch.empty(1, 1))]
        checked = Muon(
            stand_in, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn=adjust_lr_fn
        )
        super().__init__(params, {**checked.defaults, "block": check_block(block)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ValueError for parameters that are not matrices of fp32, bf16 or fp16."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.ndim != 2 or param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                self.param_groups.pop()
                what = f"{param.dtype} of shape {tuple(param.shape)}"
                raise ValueError(f"params: {what}; Muon8bit takes matrices of float32, bfloat16 or float16")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices that have a gradient; return the loss that ``closure`` returns, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            momentum, block = group["momentum"], group["block"]
            for param in (param for param in group["params"] if param.grad is not None):
                if param.grad.is_sparse:
                    raise RuntimeError("step: a gradient is sparse, and Muon8bit must be given dense ones")
                state, grad = self.state[param], param.grad.float()
                mean = torch.zeros_like(grad)
                if state:
                    mean = state_codes.decoded(
                        *(state[kind] for kind in sorted(_STATES)), block, state_codes.Code.SIGNED
                    )
                mean.lerp_(grad, 1 - momentum)
                state.update(state_codes.as_codes({"momentum_buffer": mean}, block))
                update = grad.lerp(mean, momentum) if group["nesterov"] else mean
                take_updates([param], [update], group, product_dtype(param.device))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this class, or of `torch.optim.Muon`, whose momentum is encoded."""
        load_codes(self, state_dict, lambda group: _STATES)


class MuonAdamW8bit(MuonAdamW):
    """`Muon8bit` on param groups with ``"matrices": True``, `AdamW8bit` on the others: `MuonAdamW` with 8-bit states.

    Args:
        params, lr, betas, eps, momentum, weight_decay: as `MuonAdamW` takes them; `muon_groups` makes the groups.
        block: elements with a common scale, in states of both; a power of two from 16 to 4096.

    Raises:
        ValueError: as `MuonAdamW` and `AdamW8bit`.
    """

    @staticmethod
    def zero_reach(settings: Mapping[str, Any]) -> OptimizerKind:
        """Matrices must be whole, and blocks of all others."""
        return _WHOLE if settings.get(MATRICES) else AdamW8bit.zero_reach(settings)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        block: int = 256,
    ) -> None:
        matrix = [nn.Parameter(torch.empty(1, 1))]
        muon = Muon8bit(matrix, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw", block=block)
        self._take_rules(params, muon, AdamW8bit(matrix, lr, betas, eps, weight_decay, block))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this class, or of `MuonAdamW`, whose momentum and moments are encoded."""
        load_codes(self, state_dict, lambda group: _STATES if group[MATRICES] else ADAMW_STATES)
