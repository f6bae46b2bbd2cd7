"""Matrix products in 8 bits (``--matmul fp8``): torchao's linear layers in the place of the blocks' own.

Each product's factors are rounded to e4m3, with a scale for each row or column (torchao's recipe ``rowwise``), in
forward and in both products of backward. Parameters stay what and where they were, so sharding, checkpoints and
exports know nothing of it. A layer takes part if both of its sizes are multiples of 16, as the kernels demand; a router
(``gate``) does not. On a CPU torchao emulates the products, which is slow and for trials.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zeroshard.host.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.models.quiet_import import quiet_import
from zeroshard.train.config.config import TrainConfig

_FIRST_WITH_FP8 = (8, 9)  # compute capability: Ada


def check_products(config: TrainConfig, device: torch.device) -> None:
    """Raise UserError if products in 8 bits were asked for, and cannot be had on ``device`` in this dtype."""
    if config.matmul != "fp8":
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        what = f"a {torch.cuda.get_device_name(device)} has no products in 8 bits: they begin with sm_89"
        raise UserError("matmul", what, "leave it out")
    if device.type == "cuda" and config.dtype != "bfloat16":
        raise UserError("matmul", f"fp8 multiplies for bfloat16 alone, and dtype is {config.dtype}", "change one")
    _float8()


def multiply_in_8_bits(model: LanguageModel, device: torch.device) -> None:
    """Replace linear layers of the blocks, in place; ``model`` may be on the meta device.

    Raises:
        UserError: torchao is not installed, or no layer can be replaced.
    """
    layers = set(model.layers_in_8_bits)
    if not layers:
        what = f"no linear layer in a block of a {type(model).__name__} has two sizes that are multiples of 16"
        raise UserError("matmul", what, "leave it out")
    float8 = _float8()
    config = replace(float8.Float8LinearConfig.from_recipe_name("rowwise"), emulate=device.type == "cpu")
    chosen = lambda layer, name: layer in layers  # noqa: E731
    float8.convert_to_float8_training(model.blocks, config=config, module_filter_fn=chosen)


def products_in_8_bits_in_words(model: nn.Module, config: TrainConfig, device: torch.device) -> str:
    """Say which layers multiply in 8 bits; empty if none do."""
    if config.matmul != "fp8":
        return ""
    num = len(model.layers_in_8_bits) if isinstance(model, LanguageModel) else 0
    how = "" if config.compile == "on" else ", faster with compile"
    if device.type == "cpu":
        how = ", emulated: slow, for trials"
    return f"fp8 in {num:,} linear layers of the blocks{how}"


def _float8() -> Any:
    try:
        return quiet_import("torchao.float8")
    except ImportError:
        raise UserError("matmul", "fp8 needs torchao", "pip install 'zeroshard[fp8]', or leave it out") from None
