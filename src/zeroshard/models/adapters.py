"""Which adapters a model is given, and the names that parameters have with them; `zeroshard.models.lora` adds them."""

from __future__ import annotations

from dataclasses import dataclass

ADAPTER = "default"  # the only one; peft's own name for it
_A, _B, _BASE = ".lora_A.", ".lora_B.", ".base_layer."


@dataclass(frozen=True)
class Lora:
    """Which adapters a model is given.

    Attributes:
        rank: of each, r of the paper.
        alpha: they are scaled by ``alpha / rank``; 0: twice the rank.
        dropout: probability that an input of an adapter is dropped in training.
        targets: names of linear layers, or the ends of such names; ``all-linear``: all in the blocks. None: those that
            `peft` takes for the architecture.
    """

    rank: int
    alpha: float = 0.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return (self.alpha or 2 * self.rank) / self.rank


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter."""
    return _A in name or _B in name


def starts_at_zero(name: str) -> bool:
    """Whether a parameter of this name is the second factor of an adapter."""
    return _B in name


def base_name(name: str) -> str:
    """A parameter's name in the model without adapters, from its name in one with them."""
    return name.replace(_BASE, ".")


def adapted_name(name: str) -> str:
    """A parameter's name in a model that has an adapter on its layer, from its name in one without."""
    layer, _, leaf = name.rpartition(".")
    return f"{layer}{_BASE}{leaf}"


def adapters_of(name: str) -> tuple[str, str]:
    """The names of A and B for the adapted weight ``name``, a name with adapters; of others they are no names."""
    layer = name.rpartition(_BASE)[0]
    return f"{layer}{_A}{ADAPTER}.weight", f"{layer}{_B}{ADAPTER}.weight"
