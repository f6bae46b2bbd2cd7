"""What a plan asks of a model: a `LanguageModel` answers itself, and `PlainModule` for any other module."""

from __future__ import annotations

from typing import Any

from torch import nn

from zeroshard.kernels import Choice
from zeroshard.models.base import LanguageModel


class PlainModule:
    """Answers for a module that is none of our language models, as `LanguageModel` documents the names.

    It has no configuration (``config`` is None), so it cannot be built anew with other settings, and no ``blocks`` that
    it names itself.
    """

    config: Any = None
    blocks: tuple[nn.Module, ...] = ()
    layers_in_8_bits: tuple[nn.Linear, ...] = ()
    lora = eos_id = None
    matmul = "dtype"
    recomputation = "none"
    has_fused_blocks = False
    num_unread_per_token = 0

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.kernels: Choice = getattr(module, "kernels", "auto")

    def num_flops_per_token(self, seq_len: int) -> int:
        """6 for each parameter that is trained: forward and backward, without recomputation."""
        return 6 * sum(param.numel() for param in self._module.parameters() if param.requires_grad)

    def offloaded_input_bytes(self, num_tokens: int, itemsize: int) -> int:
        """None of its blocks' inputs wait on the host."""
        return 0


def described(model: nn.Module) -> LanguageModel | PlainModule:
    """What answers for ``model``."""
    return model if isinstance(model, LanguageModel) else PlainModule(model)
