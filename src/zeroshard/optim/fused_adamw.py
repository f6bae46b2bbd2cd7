"""AdamW as a torch optimizer on `zeroshard.kernels.adamw`: one launch a group, clipping and 16-bit weights folded in.

Its states have the names, shapes and dtypes of `torch.optim.AdamW`'s, so either loads what the other saved, and a
checkpoint does not tell which of them wrote it.
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

    On the CPU, and wherever the reference serves, an update has the bits of ``torch.optim.AdamW(foreach=False)``. On a
    GPU it differs from that by the rounding of hyper-parameters to fp32: relative 5e-5 of an update in the first
    steps, less later; torch's own fused optimizer rounds alike.

    Under `zeroshard.Zero` it saves three passes over memory: the engine has it add up squares for the gradient norm,
    multiply gradients by the clipping factor as it reads them, and write the 16-bit weights beside their masters.

    Args:
        params: parameters or param groups; contiguous, dense, floating.
        lr: learning rate, a number >= 0.
        betas: decay of the mean gradient and of the mean square.
        eps: added to the denominator.
        weight_decay: decoupled, >= 0.
        stochastic_rounding: round parameters that are bf16 themselves, with no fp32 master, up or down at random, so
            that small updates are kept in the mean. Which way is a function of the seed, the step, and the place of an
            element among the pieces that this optimizer was given.
        seed: of that rounding.
        kernels: who computes it; None: as `zeroshard.kernels.use_kernels` says, else auto.

    Raises:
        ValueError: a hyper-parameter outside its range; a parameter or gradient that does not fit.
    """

    zero_scope = "element-wise"  # for `zeroshard.Zero`, which cannot try kernels that run on GPUs alone

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
        kernels: Choice | None = None,
    ) -> None:
        self._kernels, self._seed, self._stochastic_rounding = kernels, seed, stochastic_rounding
        self._copies: dict[Tensor, Tensor] = {}
        self._pieces: dict[tuple[Any, ...], Pieces] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        own = ("_kernels", "_seed", "_stochastic_rounding", "_copies")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}, "_pieces": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its hyper-parameters are checked."""
        super().add_param_group(param_group)
        try:
            _options(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def write_copies(self, copies: Mapping[Tensor, Tensor]) -> None:
        """From now on each step writes these parameters, and no others, into these tensors too, in the same pass.

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
        self._copies = dict(copies)  # others are let go: weights that were laid out anew

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """`zeroshard.kernels.sum_of_squares`, by the kernels of this optimizer: 0-dim, float64."""
        return ops.sum_of_squares(flat, kernels=self._kernels)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scale: 0-dim fp32 on the parameters' device, by which gradients are multiplied as they are read:
                ``(max_norm / (norm + 1e-6)).clamp(max=1)`` clips them without a pass of its own. None: 1.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: a gradient that is sparse; hyper-parameters that were set outside their range.
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
            device, dtype, _, copy_dtype = kind
            grads = [_dense(param) for param in params]
            states = [self._state(param) for param in params]
            for state in states:
                state["step"] += 1
            steps = [int(state["step"]) for state in states]
            rounds = self._stochastic_rounding and dtype == torch.bfloat16
            ops.adamw(
                params,
                grads,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                step=steps,
                options=options,
                grad_scale=None if grad_scale is None else grad_scale.to(device),
                copies=None if copy_dtype is None else [self._copies[param] for param in params],
                rounding_seed=self._rounding_seed(index, steps[0]) if rounds else None,
                pieces=self._pieces.setdefault((index, *kind), Pieces()),
                kernels=self._kernels,
            )

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        elif state["step"].is_cuda:  # as torch's fused optimizer saved it; on the CPU, reading it waits for nothing
            state["step"] = state["step"].cpu()
        return state

    def _rounding_seed(self, group: int, step: int) -> int:
        """Another one for each step; pieces and elements are told apart by the kernel."""
        return (self._seed * 1_000_003 + step * 1_009 + group) % 2**31


def _options(group: Mapping[str, Any]) -> AdamWOptions:
    for name in NOT_SERVED:
        if group.get(name):
            raise ValueError(f"{name}: FusedAdamW has no such variant; use torch.optim.AdamW")
    beta1, beta2 = group["betas"]
    return AdamWOptions(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])


def _dense(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise ValueError(f"params: the gradient of a parameter of shape {tuple(param.shape)} is sparse; make it dense")
    return grad.contiguous()
