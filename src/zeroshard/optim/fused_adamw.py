"""AdamW as a torch optimizer on `zeroshard.kernels.adamw`: one launch per group, with clipping and casts fused in.

Its states have the names, shapes and dtypes of `torch.optim.AdamW`'s. So each of the two can load the other's states,
and their checkpoints look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard import kernels as ops
from zeroshard.kernels import AdamWOptions, Choice
from zeroshard.kernels.adamw import Pieces

NOT_SERVED = ("amsgrad", "maximize")  # of `torch.optim.AdamW`'s options; a loaded state may ask for them


class FusedAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), all parameters of a group in one kernel launch.

    On the CPU, and wherever the reference implementation is used, an update has the bits of
    ``torch.optim.AdamW(foreach=False)``. On a GPU it differs from that by the rounding of hyper-parameters to fp32: by
    5e-5 of an update in the first steps, less later; torch's own fused optimizer rounds in the same way.

    Under `zeroshard.Zero` it saves two passes over memory: the engine has it multiply gradients by the clipping factor
    as it reads them, and write 16-bit weights in the pass that updates their fp32 master weights.

    Args:
        params: parameters or param groups; contiguous, dense, floating.
        lr: learning rate, a number >= 0.
        betas: decay rates of the averages of gradients and of squared gradients.
        eps: added to the denominator.
        weight_decay: decoupled weight decay, >= 0.
        kernels: which implementation computes it; None: the one that `zeroshard.kernels.use_kernels` chose, else auto.

    Raises:
        ValueError: a hyper-parameter outside its range; a parameter or gradient that the kernel cannot take.
    """

    # Tells `zeroshard.Zero` that updates are element-wise. It tries other optimizers out, but cannot run GPU kernels.
    zero_scope = "element-wise"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        kernels: Choice | None = None,
    ) -> None:
        self._kernels = kernels
        self._copies: dict[Tensor, Tensor] = {}
        self._pieces: dict[tuple[Any, ...], Pieces] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kernels": self._kernels, "_copies": self._copies, "_pieces": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch, and check its hyper-parameters."""
        super().add_param_group(param_group)
        try:
            _options(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def write_copies(self, copies: Mapping[Tensor, Tensor]) -> None:
        """Have each later step also write these parameters, and no others, into these tensors, in the same pass.

        Args:
            copies: parameter -> a contiguous tensor of its shape on its device, in any of fp32, bf16 and fp16.

        Raises:
            ValueError: a key that is no parameter of this optimizer, or a tensor of another shape.
        """
        known = {param for group in self.param_groups for param in group["params"]}
        for param, copy in copies.items():
            if param not in known:
                raise ValueError(f"copies: a tensor of shape {tuple(param.shape)} is no parameter of this optimizer")
            if copy.shape != param.shape:
                raise ValueError(f"copies: shape {tuple(copy.shape)} is not its parameter's {tuple(param.shape)}")
        self._copies = dict(copies)  # drops earlier copies: the engine may have laid out its weights anew

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scale: 0-dim fp32 on the parameters' device, by which gradients are multiplied as they are read:
                ``(max_norm / (norm + 1e-6)).clamp(max=1)`` clips them without a separate pass. None: 1.

        Returns:
            The loss that ``closure`` returned; None without a closure.

        Raises:
            ValueError: a gradient is sparse; a hyper-parameter was set to a value outside its range.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            self._step_group(index, group, grad_scale)
        return loss

    def _step_group(self, index: int, group: dict[str, Any], grad_scale: Tensor | None) -> None:
        options = _options(group)
        alike: dict[tuple[torch.device, torch.dtype, torch.dtype, torch.dtype | None], list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None:
                copy = self._copies.get(param)
                kind = (param.device, param.dtype, param.grad.dtype, None if copy is None else copy.dtype)
                alike.setdefault(kind, []).append(param)
        for kind, params in alike.items():
            device, _, _, copy_dtype = kind
            grads = [_dense(param) for param in params]
            states = [self._state(param) for param in params]
            for state in states:
                state["step"] += 1
            ops.adamw(
                params,
                grads,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                step=[int(state["step"]) for state in states],
                options=options,
                grad_scale=None if grad_scale is None else grad_scale.to(device),
                copies=None if copy_dtype is None else [self._copies[param] for param in params],
                pieces=self._pieces.setdefault((index, *kind), Pieces()),
                kernels=self._kernels,
            )

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        elif state["step"].is_cuda:  # torch's fused optimizer saved it; on the CPU it can be read without synchronising
            state["step"] = state["step"].cpu()
        return state


def _options(group: Mapping[str, Any]) -> AdamWOptions:
    for name in NOT_SERVED:
        if group.get(name):
            raise ValueError(f"{name}: FusedAdamW has no such variant; use torch.optim.AdamW")
    if group["weight_decay"] and not group.get("decoupled_weight_decay", True):  # a loaded state of `torch.optim.Adam`
        raise ValueError("decoupled_weight_decay: FusedAdamW adds no decay to gradients; use torch.optim.Adam")
    beta1, beta2 = group["betas"]
    return AdamWOptions(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])


def _dense(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise ValueError(f"params: the gradient of a parameter of shape {tuple(param.shape)} is sparse; make it dense")
    return grad.contiguous()
