"""Weights that went through the codes of a format, as an engine with ``frozen_format`` computes with them."""

import torch
from torch import Tensor

from zeroshard.kernels import dequantise, quantise
from zeroshard.settings.wire_formats import BlockFormat


def roundtrip(values: Tensor, form: BlockFormat) -> Tensor:
    """What the codes of ``values`` stand for, in their shape and dtype."""
    packed, back = torch.empty(form.num_bytes(values.numel()), dtype=torch.uint8), torch.empty_like(values).view(-1)
    quantise(values.detach().reshape(-1), packed, form)
    dequantise(packed, back, form)
    return back.view(values.shape)
