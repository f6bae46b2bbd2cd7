"""Muon for the matrices inside a model's blocks and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the update of a matrix. This suits
matrices that map activations to activations, but not embeddings, output heads or vectors. So a run with Muon needs two
update rules, while schedule, loss scaler and checkpoint expect one optimizer. Both rules are torch's:
`torch.optim.AdamW` steps on the param groups and the state of this optimizer, and matrices step as by
`torch.optim.Muon`, in batches.

[Note: Products in fp32]
    `torch.optim.Muon` orthogonalises in bfloat16. A CPU without instructions for it (AVX2 alone, say) multiplies
    matrices in bfloat16 25 to 75 times slower than in fp32: the demo's step took 0.48 s in place of 0.07 s. There
    the same iteration runs in fp32, so the last bits of an update depend on the kind of CPU.

[Note: Products of batches]
    GPT-2 124M has 48 matrices in blocks, of four shapes. A GPU runs one product of 12 matrices faster than 12 products,
    and the host queues a twelfth of the kernels. On a CPU a batch has the bits of its matrices one by one (but for
    matrices of some dozen elements). cuBLAS may choose another kernel for another number of matrices; where torch's
    deterministic algorithms are asked for, matrices are multiplied one by one. A batch has at
    most `BATCH_NUMEL` elements, so that a large model's step needs little memory beside its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from zeroshard.optim.groups import decay_groups

BATCH_NUMEL = 2**26  # 128 MiB of bfloat16
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
        self._rules = {True: muon, False: AdamW(_STAND_IN, lr, betas, eps, weight_decay, fused=fused)}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, MATRICES: False})

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
            if matrices:
                for group in groups:
                    _step_matrices(group, self.state)
            else:
                rule.state, rule.param_groups = self.state, groups
                rule.step()
        return loss


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are fast on ``device``: on a CPU, whether oneDNN has kernels for them."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def product_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the iteration's products on ``device``: [Note: Products in fp32]."""
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def _step_matrices(group: dict[str, Any], state: MutableMapping[Tensor, Any]) -> None:
    """Step as `torch.optim.Muon` does, with all matrices of one shape in one product: [Note: Products of batches]."""
    by_kind: dict[Any, list[Tensor]] = {}
    for param in (param for param in group["params"] if param.grad is not None):
        if param.is_complex() or param.grad.is_sparse:
            raise RuntimeError("Muon takes no complex parameters and no sparse gradients; give these to AdamW")
        if "momentum_buffer" not in state[param]:
            state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
        by_kind.setdefault((param.shape, param.device, param.grad.dtype), []).append(param)
    momentum = group["momentum"]
    for (shape, device, _), alike in by_kind.items():
        at_once = 1 if torch.are_deterministic_algorithms_enabled() else max(1, BATCH_NUMEL // max(1, shape.numel()))
        for params in (alike[first : first + at_once] for first in range(0, len(alike), at_once)):
            grads = [param.grad for param in params if param.grad is not None]
            buffers = [state[param]["momentum_buffer"] for param in params]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
            take_updates(params, updates, group, product_dtype(device))


def take_updates(
    params: Sequence[Tensor], updates: Sequence[Tensor], group: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Decay ``params [rows, columns]`` of one shape and subtract ``updates``, orthogonalised in ``dtype``, scaled."""
    stacked = torch.stack([update.to(dtype) for update in updates])
    found = _orthogonalised(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
    rows, columns = params[0].shape
    matches_adamw, lr = group["adjust_lr_fn"] == "match_rms_adamw", float(group["lr"])
    scale = 0.2 * sqrt(max(rows, columns)) if matches_adamw else sqrt(max(1, rows / columns))
    torch._foreach_mul_(list(params), 1 - lr * group["weight_decay"])
    torch._foreach_add_(list(params), list(found.unbind()), alpha=-lr * scale)


def _orthogonalised(stacked: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Return ``stacked [matrices, rows, columns]`` with all singular values near 1: Jordan et al.'s Newton-Schulz."""
    a, b, c = coefficients
    tall = stacked.size(1) > stacked.size(2)
    x = stacked / torch.linalg.vector_norm(stacked, dim=(1, 2), keepdim=True).clamp(min=eps)
    x = x.mT if tall else x
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


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
