"""Cuts one of our models to one rank's part under tensor parallelism: the shapes that it computes with, without values.

Linear layers that make heads and the feed-forward layer's hidden features are split by rows, those that lead back into
the residual stream by columns, and the vocabulary is split too. Norms and the residual stream are not. Shoeybi et al.
2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.

An adapter is split as in `peft` (`peft.tuners.lora.tp_layer`): B is split if its layer is split by rows, and A if it is
split by columns; the other one is replicated. The activations between A and B, ``rank`` numbers per token, are summed
over ranks: in forward after a split A; in backward before a replicated A, whose gradient is then complete.
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
    """Raise UserError if ``model`` cannot be cut to one rank's part.

    Args:
        model: the model, not yet cut.
        field: the setting that the error names; empty: nothing asks for a part, and nothing is checked.
        ranks: number of ranks that share each linear layer.
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
    """Cut ``model``, which has no values, to the part of one of ``ranks`` in place; call `check_cut` before."""
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
    """Cut the rows or columns of the linear layer at ``path``, which is the model's or an adapter's."""
    rows, columns = module.out_features, module.in_features
    layer, first = _layer(path), ".lora_A." in path
    if layer in ROWS and not first:
        _shape(module, -(-rows // ranks), columns)
    elif layer in COLUMNS and (first or ".lora_B." not in path):
        _shape(module, rows, columns // ranks)


def _layer(path: str) -> str:
    """The layer's own name, such as ``q_proj``, for the path of a linear layer or of an adapter's A or B."""
    for word in (".lora_A.", ".lora_B."):
        path = path.partition(word)[0]
    return base_name(f"{path}.").rstrip(".").rpartition(".")[2]


def _base(layer: nn.Module) -> Any:
    """The model's own linear layer, inside a layer that may have an adapter."""
    return getattr(layer, "base_layer", layer)


def summed_adapters(model: nn.Module) -> tuple[int, int]:
    """Number of adapters whose inner activations are summed over tensor-parallel ranks: in forward, and in backward."""
    inner = [_layer(name) for name, _ in model.named_parameters() if is_adapter(name) and ".lora_A." in name]
    return sum(layer in COLUMNS for layer in inner), sum(layer in ROWS for layer in inner)


def _shape(module: Any, rows: int, columns: int) -> None:
    old = module.weight
    module.weight = nn.Parameter(torch.empty(rows, columns, dtype=old.dtype, device=old.device), old.requires_grad)
    bias = getattr(module, "bias", None)
    if bias is not None and bias.shape[0] != rows:
        module.bias = nn.Parameter(torch.empty(rows, dtype=bias.dtype, device=bias.device), bias.requires_grad)
