"""One rank's part of a model of ours under tensor parallelism: the shapes that it computes with, and no values.

Products that make heads and the feed-forward layer's inside lose rows, those that lead back into the residual stream
lose columns, and the vocabulary is shared out. Norms and the residual stream stay whole. Shoeybi et al. 2019,
"Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from zeroshard.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.models.gpt2 import GPT2
from zeroshard.models.llama import Llama

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc")
COLUMNS = ("o_proj", "down_proj", "c_proj")


def check_cut(model: LanguageModel, field: str, ranks: int) -> None:
    """Raise UserError where a rank's part of ``model`` cannot be made.

    Args:
        model: whole.
        field: the setting to name; empty: none asks for a part.
        ranks: that share each product.
    """
    if not field:
        return
    if not isinstance(model, GPT2 | Llama):
        what = f"a {type(model).__name__} cannot be cut: parts are known of GPT-2 and LLaMA"
        raise UserError(field, what, "leave it out, or plan a preset")
    if model.lora is not None:
        raise UserError(field, "parts are known of models without adapters", "leave it out, or lora")
    config = cast("Any", model.config)
    sizes = {"n_head": config.n_head, "n_kv_head": getattr(config, "n_kv_head", ranks)}
    sizes["ffn_hidden"] = getattr(config, "ffn_width", ranks)
    for name, size in sizes.items():
        if size % ranks:
            raise UserError(field, f"{ranks} does not divide model.{name} = {size}", "choose a divisor")


def cut(model: LanguageModel, ranks: int) -> None:
    """Make ``model``, which has no values, the part of one of ``ranks``; `check_cut` has let it through."""
    if ranks == 1:
        return
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear) and name in ROWS:
            _shape(module, module.out_features // ranks, module.in_features)
        elif isinstance(module, nn.Linear) and name in COLUMNS:
            _shape(module, module.out_features, module.in_features // ranks)
        elif hasattr(module, "n_head"):
            cast("Any", module).n_head //= ranks
    model_ = cast("Any", model)
    table = model_.wte if isinstance(model, GPT2) else model_.embed_tokens
    tied = model_.lm_head.weight is table.weight
    rows = -(-table.weight.shape[0] // ranks)
    _shape(table, rows, table.weight.shape[1])
    _shape(model_.lm_head, rows, model_.lm_head.weight.shape[1])
    if tied:
        model_.lm_head.weight = table.weight


def _shape(module: Any, rows: int, columns: int) -> None:
    old = module.weight
    module.weight = nn.Parameter(torch.empty(rows, columns, dtype=old.dtype, device=old.device), old.requires_grad)
    bias = getattr(module, "bias", None)
    if bias is not None and bias.shape[0] != rows:
        module.bias = nn.Parameter(torch.empty(rows, dtype=bias.dtype, device=bias.device), bias.requires_grad)
