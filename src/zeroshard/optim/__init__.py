"""What a training loop needs around an optimizer: parameter groups and the learning-rate schedule."""

from zeroshard.optim.fused_adamw import FusedAdamW
from zeroshard.optim.groups import decay_groups
from zeroshard.optim.schedule import Decay, learning_rate

__all__ = ["Decay", "FusedAdamW", "decay_groups", "learning_rate"]
