"""Optimizers, and what a training loop needs beside one: param groups, learning-rate schedule, loss scaling.

Names are loaded on first use: what the engine asks of an optimizer's class (`zeroshard.optim.classes`) needs no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.optim.groups import decay_groups as decay_groups
    from zeroshard.optim.loss_scale import LossScaler as LossScaler
    from zeroshard.optim.low_bit import AdamW8bit as AdamW8bit
    from zeroshard.optim.low_bit import FlashAdamW as FlashAdamW
    from zeroshard.optim.low_bit import fp32_state_dict as fp32_state_dict
    from zeroshard.optim.muon import MuonAdamW as MuonAdamW
    from zeroshard.optim.muon import muon_groups as muon_groups
    from zeroshard.optim.schedule import Decay as Decay
    from zeroshard.optim.schedule import learning_rate as learning_rate

_load, __dir__, __all__ = lazy_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in ("Muon8bit", "MuonAdamW8bit"):
        raise ImportError(f"zeroshard.optim.{name} has left; use MuonAdamW, or AdamW8bit")
    return _load(name)
