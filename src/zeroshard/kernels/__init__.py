"""Triton kernels for the operations of a language model, each beside its reference in plain PyTorch.

Each operation has one file, in this order: reference, kernels, launchers, `autograd.Function`, public function. Long
kernels and their launchers have a file of their own, such as `norm_kernels`. The reference is the specification;
`zeroshard.kernels.dispatch` chooses the backend of each call.
"""

from typing import NoReturn

from zeroshard.kernels.block_formats import dequantise, dequantised_sum, quantise
from zeroshard.kernels.cross_entropy import cross_entropy
from zeroshard.kernels.dispatch import CHOICES, OPERATIONS, Backend, Choice, Operation, choose, describe, use_kernels
from zeroshard.kernels.linear_cross_entropy import linear_cross_entropy
from zeroshard.kernels.modules import LayerNorm, RMSNorm
from zeroshard.kernels.norm import layer_norm, rms_norm
from zeroshard.kernels.rope import rope
from zeroshard.kernels.swiglu import swiglu

__all__ = [
    "CHOICES",
    "OPERATIONS",
    "Backend",
    "Choice",
    "LayerNorm",
    "Operation",
    "RMSNorm",
    "choose",
    "cross_entropy",
    "dequantise",
    "dequantised_sum",
    "describe",
    "layer_norm",
    "linear_cross_entropy",
    "quantise",
    "rms_norm",
    "rope",
    "swiglu",
    "use_kernels",
]


def __getattr__(name: str) -> NoReturn:
    if name in ("adamw", "AdamWOptions"):
        raise ImportError(f"zeroshard.kernels.{name} has left; use torch.optim.AdamW(..., fused=True)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
