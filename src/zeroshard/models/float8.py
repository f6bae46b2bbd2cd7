"""``--dtype fp8``: `torchao` computes the matrix products of a model's blocks in 8-bit floating point.

    y = fp8(s_x x) fp8(s_w w)^T / (s_x s_w)        s: one scale per tensor, 448 / max |x| (57344 for e5m2)

Inputs and weights are cast to e4m3, gradients of outputs to e5m2. Each product casts its own operands, so parameters
keep names, shapes and dtype: a sharding engine and checkpoints see the parameters of the plain model. Embeddings,
norms, attention and the output head compute in the dtype of their inputs, which the trainer makes bf16. The layers are
`torchao`'s, with the scales that it calls tensorwise: https://docs.pytorch.org/ao, "Quantized Training". The formats:
Micikevicius et al. 2022, "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroshard.errors import UserError
from zeroshard.models.adapters import is_adapter
from zeroshard.models.base import LanguageModel
from zeroshard.models.quiet_import import quiet_import

MULTIPLE = 16  # both sizes of a matrix must be multiples of it: the hardware's fp8 products require that
_FIRST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_AMD = ("gfx94", "gfx95")  # MI300, MI350
_TODO = "use bfloat16, or a GPU that has: H100, H200, B200, L4, L40S, RTX 40 and 50, MI300"


def require_float8(device: torch.device, *, package: bool = True) -> None:
    """Raise UserError if ``device`` cannot multiply 8-bit floats, or (with ``package``) if torchao is not installed."""
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
    """Make the linear layers inside ``model``'s blocks multiply in 8 bits, in place; call it before `torch.compile`.

    Layers whose sizes are not multiples of `MULTIPLE` stay unchanged. So do adapters, whose products are narrow, and
    subclasses of `torch.nn.Linear`, whose weights a parent module may use without calling the layer.

    Args:
        model: a model on any device.
        emulate: multiply the rounded numbers in fp32, on any device: it gives an fp8 product's result, not its speed.

    Raises:
        UserError: no layer can be converted, or `torchao` is not installed.
    """
    float8 = _torchao()
    chosen, _ = float8_layers(model)
    # The weight gradient sums over tokens, whose number need not be a multiple of 16: torchao pads it with zeros.
    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    float8.convert_to_float8_training(model.blocks, module_filter_fn=lambda _, name: name in chosen, config=config)


def float8_layers(model: LanguageModel) -> tuple[frozenset[str], int]:
    """Return the names inside ``model.blocks`` of the layers that `use_float8` converts, and the number of candidates.

    Candidates are all linear layers there that are neither adapters nor of a subclass, whatever their sizes.

    Raises:
        UserError: no layer can be converted.
    """
    modules = model.blocks.named_modules()
    layers = {name: each for name, each in modules if type(each) is nn.Linear and not is_adapter(f"{name}.")}
    chosen = frozenset(name for name, layer in layers.items() if all(n % MULTIPLE == 0 for n in layer.weight.shape))
    if not chosen:
        what = f"fp8 needs linear layers with sizes that are multiples of {MULTIPLE}, and no block has one"
        raise UserError("dtype", what, "use bfloat16, or another width")
    return chosen, len(layers)


def _torchao() -> Any:
    try:
        return quiet_import("torchao.float8")
    except ImportError:
        raise UserError("dtype", "fp8 needs the package torchao", 'pip install "zeroshard[fp8]"') from None
