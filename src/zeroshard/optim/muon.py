"""Muon for the matrices inside a model's blocks and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the update of a matrix. This suits
matrices that map activations to activations, but not embeddings, output heads or vectors. So a run with Muon needs two
update rules, while schedule, loss scaler and checkpoint expect one optimizer. Both rules are torch's own:
`torch.optim.Muon` and `torch.optim.AdamW` step on the param groups and the state of this optimizer.

[Note: Products in fp32]
    `torch.optim.Muon` orthogonalises in bfloat16. A CPU without instructions for it (AVX2 alone, say) multiplies
    matrices in bfloat16 25 to 75 times slower than in fp32: the demo's step took 0.48 s in place of 0.07 s. There
    the same iteration runs in fp32, so the last bits of an update depend on the kind of CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from zeroshard.optim.groups import decay_groups

MATRICES = "matrices"  # the setting of a param group that says whose rule it goes by
_STAND_IN = [nn.Parameter(torch.empty(1, 1))]


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` on param groups with ``"matrices": True``, `torch.optim.AdamW` on the others.

    Muon's updates are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``, Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, section 2.2), so that both rules go by one learning rate and one weight decay.

    Args:
        params: parameters or group dicts, as in every optimizer. A group may set the options of its own rule.
        lr: learning rate of both rules.
        betas: AdamW's betas.
        eps: AdamW's eps.
        momentum: Muon's momentum.
        weight_decay: weight decay of groups that do not set their own.
        fused: whether to use AdamW's fused kernel.

    Raises:
        ValueError: a setting is outside its range, or a group of matrices has a parameter that is not 2-D.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        fused: bool = False,
    ) -> None:
        muon = Muon(_STAND_IN, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
        self._take_rules(params, muon, AdamW(_STAND_IN, lr, betas, eps, weight_decay, fused=fused))

    def _take_rules(self, params: Iterable[Any], muon: Optimizer, adamw: Optimizer) -> None:
        """Step by ``muon`` and ``adamw``, whose own parameters are stand-ins, on param groups of ``params``."""
        self._rules = {True: muon, False: adamw}
        common = {name: muon.defaults[name] for name in ("lr", "weight_decay")}
        Optimizer.__init__(self, params, {**common, MATRICES: False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and complete it by its rule's defaults; the rule is Muon if it has ``"matrices": True``."""
        rule = self._rules[bool(param_group.get(MATRICES, False))]
        super().add_param_group({**rule.defaults, **self.defaults, **param_group})
        if self.param_groups[-1][MATRICES]:
            for param in self.param_groups[-1]["params"]:
                if param.ndim != 2:
                    self.param_groups.pop()
                    raise ValueError(f"params: Muon updates matrices, and one has the shape {tuple(param.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters once; return the loss that ``closure`` returns, None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for matrices, rule in self._rules.items():
            groups = [group for group in self.param_groups if group[MATRICES] is matrices]
            devices = {param.device for group in groups for param in group["params"]}
            if isinstance(rule, Muon) and not all(multiplies_bfloat16(device) for device in devices):
                _step_in_fp32(groups, self.state)
            else:
                rule.state, rule.param_groups = self.state, groups
                rule.step()
        return loss


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are fast on ``device``: on a CPU, whether oneDNN has kernels for them."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _step_in_fp32(groups: Iterable[dict[str, Any]], state: MutableMapping[Tensor, Any]) -> None:
    """Step as `torch.optim.Muon` does, with matrix products in fp32: [Note: Products in fp32]."""
    for group in groups:
        momentum = group["momentum"]
        for param in (param for param in group["params"] if param.grad is not None):
            if param.is_complex() or param.grad.is_sparse:
                raise RuntimeError("Muon takes no complex parameters and no sparse gradients; give these to AdamW")
            if "momentum_buffer" not in state[param]:
                state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
            buffer = state[param]["momentum_buffer"].lerp_(param.grad, 1 - momentum)
            update = param.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
            take_update(param, update, group, torch.float32)


def take_update(param: Tensor, update: Tensor, group: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Decay ``param [rows, columns]`` and subtract ``update``, orthogonalised by products in ``dtype``, scaled."""
    update = _orthogonalised(update.to(dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
    rows, columns = param.shape
    matches_adamw, lr = group["adjust_lr_fn"] == "match_rms_adamw", float(group["lr"])
    scale = 0.2 * sqrt(max(rows, columns)) if matches_adamw else sqrt(max(1, rows / columns))
    param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)


def _orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Return ``matrix`` with all singular values near 1, by the Newton-Schulz iteration of Jordan et al."""
    a, b, c = coefficients
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def muon_groups(
    named_params: Iterable[tuple[str, Tensor]], weight_decay: float, blocks: Iterable[str]
) -> list[dict[str, Any]]:
    """Return param groups for `MuonAdamW`: the blocks' matrices for Muon, then `decay_groups` of all others for AdamW.

    Args:
        named_params: (name, parameter) pairs.
        weight_decay: weight decay of matrices and embeddings.
        blocks: names of the blocks; Muon updates the 2-D parameters inside them.

    Raises:
        ValueError: as in `decay_groups`.
    """
    prefixes = tuple(f"{name}." for name in blocks)
    named = list(named_params)
    inner = [pair for pair in named if pair[0].startswith(prefixes) and pair[1].ndim == 2]
    matrices = [{**group, MATRICES: True} for group in decay_groups(inner, weight_decay)] if inner else []
    taken = {id(param) for _, param in inner}
    rest = [pair for pair in named if id(pair[1]) not in taken]
    return [*matrices, *({**group, MATRICES: False} for group in decay_groups(rest, weight_decay))]
