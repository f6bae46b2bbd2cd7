"""LoRA settings, and parameter names in a model with adapters; `zeroshard.models.lora` adds the adapters."""

from __future__ import annotations

from dataclasses import dataclass

ADAPTER = "default"  # name of our only adapter: `peft`'s default
_A, _B, _BASE = ".lora_A.", ".lora_B.", ".base_layer."


@dataclass(frozen=True)
class Lora:
    """Settings of a model's LoRA adapters.

    Attributes:
        rank: rank of each adapter, r of the paper.
        alpha: numerator of the adapters' scale, ``alpha / rank``; 0: twice the rank.
        dropout: probability that an input of an adapter is dropped in training.
        targets: names of linear layers, or the last parts of such names; ``all-linear``: all linear layers in the
            blocks. Empty: `peft`'s default targets for the architecture.
    """

    rank: int
    alpha: float = 0.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return (self.alpha or 2 * self.rank) / self.rank


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return _A in name or _B in name


def starts_at_zero(name: str) -> bool:
    """Whether the parameter of this name is an adapter's B, whose initial value is zero."""
    return _B in name


def base_name(name: str) -> str:
    """Turn a parameter's name in a model with adapters into its name in the model without adapters."""
    return name.replace(_BASE, ".")


def adapted_name(name: str) -> str:
    """Turn a parameter's name in a model without adapters into its name if its layer has an adapter."""
    layer, _, leaf = name.rpartition(".")
    return f"{layer}{_BASE}{leaf}"


def adapters_of(name: str) -> tuple[str, str]:
    """Return the names of A and B of the adapted weight ``name``, which is a name in the model with adapters.

    For a parameter whose layer has no adapter, there are no parameters of the returned names.
    """
    layer = name.rpartition(_BASE)[0]
    return f"{layer}{_A}{ADAPTER}.weight", f"{layer}{_B}{ADAPTER}.weight"
