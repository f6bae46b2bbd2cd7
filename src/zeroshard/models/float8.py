"""Matrix products of a model's blocks in 8-bit floating point, by `torchao`: what ``--dtype fp8`` means.

    y = fp8(s_x x) fp8(s_w w)^T / (s_x s_w)        s: one scale a tensor, 448 / max |x| (57344 for e5m2)

Inputs and weights are e4m3, gradients of outputs e5m2, and every product is cast for itself, so that nothing of it
stays: parameters keep names, shapes and dtype, a sharding engine sees those of the plain model, and so do checkpoints.
Embeddings, norms, attention and the output head compute in the dtype that they are given, which the trainer makes bf16.
The layers are `torchao`'s own, with the scales that it calls tensorwise: https://docs.pytorch.org/ao, "Quantized
Training". The formats: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroshard.errors import UserError
from zeroshard.models.adapters import is_adapter
from zeroshard.models.base import LanguageModel
from zeroshard.models.quiet_import import quiet_import

MULTIPLE = 16  # of both sizes of a matrix: what the hardware's products take
_FIRST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_AMD = ("gfx94", "gfx95")  # MI300, MI350
_TODO = "use bfloat16, or a GPU that has: H100, H200, B200, L4, L40S, RTX 40 and 50, MI300"


def require_float8(device: torch.device, *, package: bool = True) -> None:
    """Raise UserError where ``device`` has no 8-bit floating-point products, or the ``package`` torchao is missing."""
    if device.type != "cuda":
        raise UserError("dtype", f"fp8 needs a GPU with products of 8-bit floats, and the device is {device}", _TODO)
    if not _has_products(device):
        name = torch.cuda.get_device_name(device)
        raise UserError("dtype", f"fp8 needs products of 8-bit floats, and a {name} has none", _TODO)
    if package:
        _torchao()


def _has_products(device: torch.device) -> bool:
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(_AMD)
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def use_float8(model: LanguageModel, *, emulate: bool = False) -> None:
    """Have linear layers inside ``model``'s blocks multiply in 8 bits, in place; before anything compiles the blocks.

    Those whose sizes are no multiples of `MULTIPLE` stay as they are, and so do adapters, whose products are narrow,
    and subclasses of `torch.nn.Linear`, of which nobody knows whether they call themselves.

    Args:
        model: on any device.
        emulate: multiply the rounded numbers in fp32, on any device: what a product comes to, and none of its speed.

    Raises:
        UserError: there is no such layer, or `torchao` is not installed.
    """
    float8 = _torchao()
    chosen, _ = float8_layers(model)
    # Tokens are summed over in the weight's gradient, and 16 need not divide them: the rest is zeros.
    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    float8.convert_to_float8_training(model.blocks, module_filter_fn=lambda _, name: name in chosen, config=config)


def float8_layers(model: LanguageModel) -> tuple[frozenset[str], int]:
    """The linear layers that `use_float8` takes, by their names inside ``model.blocks``, and of how many.

    Raises:
        UserError: there is none.
    """
    modules = model.blocks.named_modules()
    layers = {name: each for name, each in modules if type(each) is nn.Linear and not is_adapter(f"{name}.")}
    chosen = frozenset(name for name, layer in layers.items() if all(n % MULTIPLE == 0 for n in layer.weight.shape))
    if not chosen:
        what = f"fp8 multiplies linear layers of blocks whose sizes are multiples of {MULTIPLE}, and there are none"
        raise UserError("dtype", what, "use bfloat16, or another width")
    return chosen, len(layers)


def _torchao() -> Any:
    try:
        return quiet_import("torchao.float8")
    except ImportError:
        raise UserError("dtype", "fp8 needs the package torchao", 'pip install "zeroshard[fp8]"') from None
