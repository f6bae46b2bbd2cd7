"""Muon for the matrices inside a model's blocks and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the update of a matrix. This suits
matrices that map activations to activations, but not embeddings, output heads or vectors. So a run with Muon needs two
update rules, while schedule, loss scaler and checkpoint expect one optimizer. Both rules are torch's own:
`torch.optim.Muon` and `torch.optim.AdamW` step on the param groups and the state of this optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from zeroshard.optim.groups import decay_groups

_MARK = "matrices"


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
        matrix, vector = [nn.Parameter(torch.empty(1, 1))], [nn.Parameter(torch.empty(1))]
        muon = Muon(matrix, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
        adamw = AdamW(vector, lr, betas, eps, weight_decay, fused=fused)
        self._rules: dict[bool, Optimizer] = {True: muon, False: adamw}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, _MARK: False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and complete it by its rule's defaults; the rule is Muon if it has ``"matrices": True``."""
        rule = self._rules[bool(param_group.get(_MARK, False))]
        super().add_param_group({**rule.defaults, **self.defaults, **param_group})
        if isinstance(rule, Muon):
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
            rule.state = self.state
            rule.param_groups = [group for group in self.param_groups if group[_MARK] is matrices]
            rule.step()
        return loss


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
    matrices = [{**group, _MARK: True} for group in decay_groups(inner, weight_decay)] if inner else []
    taken = {id(param) for _, param in inner}
    rest = [pair for pair in named if id(pair[1]) not in taken]
    return [*matrices, *({**group, _MARK: False} for group in decay_groups(rest, weight_decay))]
