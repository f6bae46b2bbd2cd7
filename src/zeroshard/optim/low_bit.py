"""AdamW with 8-bit states: `AdamW8bit`, and `FlashAdamW`, which needs no fp32 master weights either.

| bytes of a parameter        | weights | correction | gradient | m | v | scales | all   |
|-----------------------------|---------|------------|----------|---|---|--------|-------|
| AdamW, fp32                 | 4       |            | 4        | 4 | 4 |        | 16    |
| AdamW8bit, fp32             | 4       |            | 4        | 1 | 1 | 0.03   | 10.03 |
| FlashAdamW, bf16            | 2       | 1          | 2        | 1 | 1 | 0.03   | 7.03  |

The scales are of blocks that are counted from each parameter's own first element, and `zeroshard.Zero` cuts parameters
only where a block ends. So the states, and each update, are the same at every stage and number of ranks. 8-bit
Optimizers via Block-wise Quantization, Dettmers et al. 2022, arXiv:2110.02861; FlashOptim 2026, arXiv:2602.23349. The
update and its codes: `zeroshard.kernels.adamw8bit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.host.torch_internals import runs_eagerly
from zeroshard.kernels import state_codes
from zeroshard.kernels.adamw8bit import AdamWOptions, Codes, adamw8bit
from zeroshard.optim.classes.reach import ALL_NDIMS, OptimizerKind, Reach

ADAMW_STATES = frozenset({"step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"})
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def _reach(settings: Mapping[str, Any]) -> OptimizerKind:
    block = settings.get("block", 256)
    reason = f"it keeps 8-bit states in blocks of {block}"
    return OptimizerKind(Reach.BLOCK_WISE, reason, ALL_NDIMS, block, by_unit=True)


class AdamW8bit(Optimizer):
    """AdamW whose two moments take one byte each, and a scale for each block.

    States of a parameter: ``exp_avg_codes`` and ``exp_avg_sq_codes`` (int8) in its shape, ``exp_avg_scales``
    and ``exp_avg_sq_scales`` (fp32) of one element a block, ``step``.

    Args:
        params: parameters or group dicts, as in every optimizer: fp32, bf16 or fp16, which are computed in fp32.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        block: elements with a common scale; a power of two from 16 to 4096.

    Raises:
        ValueError: a setting is outside its range, or a parameter has another dtype.
    """

    zero_reach = staticmethod(_reach)
    corrects = False  # whether parameters in bf16 keep 8 further bits

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        block: int = 256,
    ) -> None:
        check_block(block)
        AdamWOptions(lr, *betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "block": block})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ValueError for parameters of a dtype that is not among fp32, bf16 and fp16."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in _FLOATING:
                self.param_groups.pop()
                raise ValueError(f"params: {param.dtype}; {type(self).__name__} takes float32, bfloat16 and float16")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the loss that ``closure`` returns, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @runs_eagerly  # in a compiled step as well: a loop takes addresses, and step numbers would compile it anew
    def _update(self) -> None:
        for group in self.param_groups:
            options = AdamWOptions(float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"])
            params = [param for param in group["params"] if param.grad is not None]
            states = []
            for param in params:
                if param.grad.is_sparse:
                    raise RuntimeError(
                        f"step: a gradient is sparse, and {type(self).__name__} must be given dense ones"
                    )
                state = self.state[param]
                if not state:
                    state.update(self._fresh(param, group["block"]))
                states.append(state)
            for state in states:
                state["step"] += 1
            flat = [param if param.is_contiguous() else param.contiguous() for param in params]
            grads, steps = [param.grad for param in params], [int(state["step"]) for state in states]
            adamw8bit(flat, grads, [*map(_codes, states)], steps, options, group["block"])
            for param, copy in zip(params, flat, strict=True):
                if copy is not param:
                    param.copy_(copy)

    def _fresh(self, param: Tensor, block: int) -> dict[str, Any]:
        """States of a parameter before its first update, which are zero."""
        scales = torch.full((-(-param.numel() // block),), 2.0**-126, dtype=torch.float32, device=param.device)
        codes = torch.zeros(param.shape, dtype=torch.int8, device=param.device)
        state: dict[str, Any] = {"step": torch.tensor(0.0), "exp_avg_codes": codes, "exp_avg_scales": scales}
        state |= {"exp_avg_sq_codes": torch.full_like(codes, -128), "exp_avg_sq_scales": scales.clone()}
        return state | ({"correction": torch.zeros_like(codes)} if self._corrected(param) else {})

    def _corrected(self, param: Tensor) -> bool:
        return self.corrects and param.dtype == torch.bfloat16

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this class, or of `torch.optim.AdamW`, whose moments are encoded."""
        _load_codes(self, state_dict)
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if self._corrected(param) and self.state.get(param):
                self.state[param].setdefault("correction", torch.zeros_like(param, dtype=torch.int8))


class FlashAdamW(AdamW8bit):
    """`AdamW8bit` that keeps, of a parameter in bf16, 8 further bits as a state: ``correction`` (int8).

    So a model in bf16 (``model.to(torch.bfloat16)`` before it is wrapped) needs no fp32 master weights: updates are
    computed on 24 bits, and only what is smaller than 2^-16 of a weight is lost. Parameters of other dtypes are updated
    as by `AdamW8bit`. Arguments and errors are the same.
    """

    zero_reach = staticmethod(_reach)
    corrects = True

    def weights_replaced(self) -> None:
        """Forget the further bits, because weights were replaced by others, which they are no part of.

        `zeroshard.Zero` calls it where it replaces weights; a loop of your own, after ``model.load_state_dict``.
        """
        for state in self.state.values():
            if "correction" in state:
                state["correction"].zero_()


def _codes(state: Mapping[str, Any]) -> Codes:
    kinds = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
    return Codes(*(state[kind] for kind in kinds), state.get("correction"))


def check_block(block: int) -> int:
    """Return ``block``; ValueError unless it is a power of two from 16 to 4096."""
    if not isinstance(block, int) or block & (block - 1) or not 16 <= block <= 4096:
        raise ValueError(f"block: {block!r} is no power of two from 16 to 4096")
    return block


def _load_codes(optimizer: AdamW8bit, state_dict: dict[str, Any]) -> None:
    """Do as ``optimizer.load_state_dict(state_dict)`` for a class that keeps codes; states in fp32 are encoded.

    Args:
        optimizer: the optimizer; a setting that the saved groups lack, such as ``block``, keeps its value.
        state_dict: of the class itself, or of the class with states in fp32.

    Raises:
        ValueError: states of another class.
    """
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    before = optimizer.param_groups
    Optimizer.load_state_dict(optimizer, state_dict)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group |= {name: value for name, value in old.items() if name not in group}
    members = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    for key, (param, group) in zip(saved, members, strict=True):
        if given := state_dict["state"].get(key):  # torch's method has converted all states to the parameter's dtype
            states = state_codes.as_codes(given, group["block"])
            if ADAMW_STATES - states.keys():
                name, keeps = type(optimizer).__name__, ", ".join(sorted(ADAMW_STATES))
                raise ValueError(f"state_dict: its states are {', '.join(sorted(given))}; {name} keeps {keeps}")
            optimizer.state[param] = {
                kind: value.to(param.device) if isinstance(value, Tensor) and kind != "step" else torch.as_tensor(value)
                for kind, value in states.items()
            }


def fp32_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of `AdamW8bit` or `FlashAdamW` as `torch.optim.AdamW` loads it.

    Codes are decoded. FlashAdamW's corrections are parts of weights, and are left out: a checkpoint of `zeroshard.save`
    that is loaded into a model in fp32 keeps them.

    Args:
        state_dict: as ``optimizer.state_dict()`` or ``zero.optim_state_dict()`` returns it; it is not changed.
    """
    states = {key: state_codes.as_values(state) for key, state in state_dict["state"].items()}
    for state in states.values():
        state.pop(state_codes.CORRECTION, None)
    groups = [{key: value for key, value in group.items() if key != "block"} for group in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}
