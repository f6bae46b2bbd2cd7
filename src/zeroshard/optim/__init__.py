"""Optimizers, and what a training loop needs beside one: param groups, learning-rate schedule, loss scaling."""

from zeroshard.optim.groups import decay_groups
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.low_bit import AdamW8bit, FlashAdamW, fp32_state_dict
from zeroshard.optim.muon import MuonAdamW, muon_groups
from zeroshard.optim.muon8bit import Muon8bit, MuonAdamW8bit
from zeroshard.optim.schedule import Decay, learning_rate

__all__ = [
    "AdamW8bit",
    "Decay",
    "FlashAdamW",
    "LossScaler",
    "Muon8bit",
    "MuonAdamW",
    "MuonAdamW8bit",
    "decay_groups",
    "fp32_state_dict",
    "learning_rate",
    "muon_groups",
]
