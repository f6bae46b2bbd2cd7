"""Optimizers, and what a training loop needs beside one: param groups, learning-rate schedule, loss scaling."""

from typing import NoReturn

from zeroshard.optim.groups import decay_groups
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.low_bit import AdamW8bit, FlashAdamW, fp32_state_dict
from zeroshard.optim.muon import MuonAdamW, muon_groups
from zeroshard.optim.schedule import Decay, learning_rate

__all__ = [
    "AdamW8bit",
    "Decay",
    "FlashAdamW",
    "LossScaler",
    "MuonAdamW",
    "decay_groups",
    "fp32_state_dict",
    "learning_rate",
    "muon_groups",
]


def __getattr__(name: str) -> NoReturn:
    if name in ("Muon8bit", "MuonAdamW8bit"):
        raise ImportError(f"zeroshard.optim.{name} has left; use MuonAdamW, or AdamW8bit")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
