"""One rank's part of a model of ours under tensor parallelism: the shapes that it computes with, and no values.

Products that make heads and the feed-forward layer's inside lose rows, those that lead back into the residual stream
lose columns, and the vocabulary is shared out. Norms and the residual stream stay whole. Shoeybi et al. 2019,
"Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.

An adapter is shared out as `peft` does it (`peft.tuners.lora.tp_layer`): where its layer loses rows, B does and A is
whole; where it loses columns, A does and B is whole. What lies between them, ``rank`` numbers a token, is summed over
ranks: in forward after an A that is shared out, in backward before an A that is whole, whose gradient is then complete.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from zeroshard.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.models.adapters import base_name, is_adapter
from zeroshard.models.gpt2 import GPT2
from zeroshard.models.llama import Llama

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc", "lm_head")
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
    model_ = cast("Any", model)
    table = model_.wte if isinstance(model, GPT2) else model_.embed_tokens
    tied = _base(model_.lm_head).weight is table.weight
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            _cut_product(path, module, ranks)
        elif hasattr(module, "n_head"):
            cast("Any", module).n_head //= ranks
    _shape(table, -(-table.weight.shape[0] // ranks), table.weight.shape[1])
    if tied:
        model_.lm_head.weight = table.weight


def _cut_product(path: str, module: nn.Linear, ranks: int) -> None:
    """Take rows or columns from a matrix at ``path``, of the model or of an adapter."""
    rows, columns = module.out_features, module.in_features
    layer, first = _layer(path), ".lora_A." in path
    if layer in ROWS and not first:
        _shape(module, -(-rows // ranks), columns)
    elif layer in COLUMNS and (first or ".lora_B." not in path):
        _shape(module, rows, columns // ranks)


def _layer(path: str) -> str:
    """The last part of the name that a product, or the one that its adapter belongs to, has without adapters."""
    for word in (".lora_A.", ".lora_B."):
        path = path.partition(word)[0]
    return base_name(f"{path}.").rstrip(".").rpartition(".")[2]


def _base(layer: nn.Module) -> Any:
    """The model's own product, of a layer that may have an adapter."""
    return getattr(layer, "base_layer", layer)


def summed_adapters(model: nn.Module) -> tuple[int, int]:
    """How many adapters' inner numbers the ranks of a tensor sum: in forward, and in backward."""
    inner = [_layer(name) for name, _ in model.named_parameters() if is_adapter(name) and ".lora_A." in name]
    return sum(layer in COLUMNS for layer in inner), sum(layer in ROWS for layer in inner)


def _shape(module: Any, rows: int, columns: int) -> None:
    old = module.weight
    module.weight = nn.Parameter(torch.empty(rows, columns, dtype=old.dtype, device=old.device), old.requires_grad)
    bias = getattr(module, "bias", None)
    if bias is not None and bias.shape[0] != rows:
        module.bias = nn.Parameter(torch.empty(rows, dtype=bias.dtype, device=bias.device), bias.requires_grad)
