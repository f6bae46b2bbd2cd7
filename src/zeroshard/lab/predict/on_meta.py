"""Our own models on the meta device as they would run on the CPU: what torch's fake tensors do, in half the time.

`FakeTensorMode` checks much that our models never do. They ask the device for one thing only: which attention kernel to
use. On the meta device torch takes the one that keeps all weights, where the CPU's and a GPU's are fused. So attention
is given to the CPU's fused kernel by name, and all else runs as it is. `FakeTensorMode` stays the specification: tests
compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeroshard.models import GPT2, LanguageModel, Llama
from zeroshard.zero import MixedPrecision


def serves(model: LanguageModel, precision: MixedPrecision, device_type: str) -> bool:
    """Whether a trace on the meta device is a trace with fake tensors, for what a model of ours does.

    Of other models nothing is known: they may ask the device for more. Of ours it is not one with a mask, with dropout,
    with blocks that run again in backward, or where torch's own LayerNorm computes in a narrow dtype: the CPU's keeps
    its statistics in that dtype, and the meta device's in fp32.
    """
    if type(model) not in (GPT2, Llama):
        return False
    config: Any = model.config
    if model.eos_id is not None or getattr(config, "dropout", 0.0) or config.activation_checkpointing != "none":
        return False
    own_kernels = device_type == "cuda" and model.kernels != "reference"
    return own_kernels or precision.param_dtype is None or "layer_norm" not in model.operations


@contextmanager
def on_meta() -> Generator[None]:
    """Tensors that are made in this block lie on the meta device; attention is the CPU's fused kernel."""
    with torch.device("meta"), _FusedAttention():
        yield


class _FusedAttention(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` where `serves` holds."""
    assert attn_mask is None
    assert dropout_p == 0.0
    assert enable_gqa or query.shape[1] == key.shape[1]
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal)[0]
