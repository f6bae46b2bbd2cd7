"""The interface of model configurations (`ModelConfig`), and the checks that each runs when it is created.

A wrong size raises a UserError here, one line that names the field, before any tensor is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from zeroshard.host.errors import UserError

if TYPE_CHECKING:
    from zeroshard.kernels import Choice

# Upper limits: above the sizes of any model, and small enough that the elements of a model can be counted in 64 bits.
MOST: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 2**27,
        "seq_len": 2**27,
        "n_layer": 2**13,
        "n_head": 2**20,
        "n_kv_head": 2**20,
        "n_embd": 2**20,
        "ffn_hidden": 2**22,
    }
)


class ModelConfig(Protocol):
    """Interface of every model's configuration: a frozen dataclass that checks itself when it is created."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, V."""

    @property
    def seq_len(self) -> int:
        """Largest number of tokens in a sequence."""

    @property
    def n_layer(self) -> int:
        """Number of blocks."""

    @property
    def n_head(self) -> int:
        """Number of query heads in each block."""

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""

    @property
    def activation_checkpointing(self) -> str:
        """Which blocks recompute activations in backward instead of keeping them: see `zeroshard.models.recompute`."""

    @property
    def tiles(self) -> str:
        """How feed-forward layers are cut along the sequence: see `zeroshard.models.tiles`."""

    def build(self, seed: int = 0, kernels: Choice = "auto") -> Any:
        """Build the `LanguageModel` of this configuration on the default device; arguments: see its attributes."""


def check_most(config: ModelConfig, name: str) -> None:
    """Raise UserError if a field of ``config`` is above its limit in `MOST`."""
    value, most = getattr(config, name), MOST[name]
    if value > most:
        raise UserError(f"model.{name}", f"{value} is above {most:,}", "give a size that a model has")


def check_divides(config: ModelConfig, divisor: str, dividend: str) -> None:
    """Raise UserError if one field of ``config`` does not divide another, and name values that would."""
    part, whole = getattr(config, divisor), getattr(config, dividend)
    if whole % part:
        fitting = [n for n in range(1, whole + 1) if whole % n == 0]
        nearest = sorted(sorted(fitting, key=lambda n: abs(n - part))[:2])
        todo = f"take {' or '.join(map(str, nearest))}, or change {dividend}"
        raise UserError(f"model.{divisor}", f"{part} does not divide {dividend} {whole}", todo)


def check_recomputation(how: str) -> None:
    """Raise UserError unless ``how`` is none, full, offload, selective, selective:2, or every:N with N from 1."""
    if not re.fullmatch(r"none|full|offload|selective(:2)?|every:[1-9]\d*", how):
        todo = "choose none, full, offload, selective, selective:2, or every:N for every N-th block"
        raise UserError("model.activation_checkpointing", f"{how!r} is not a choice", todo)


def inputs_wait_on_host(recomputation: str) -> bool:
    """Whether inputs of recomputed blocks wait on the host for backward."""
    return recomputation == "offload"


def check_tiles(how: str, recomputation: str) -> None:
    """Raise UserError unless ``how`` is none, or auto or a number of tiles of blocks that are recomputed."""
    if how == "none":
        return
    if how != "auto" and not re.fullmatch(r"[1-9]\d{0,5}", how):
        raise UserError("tiles", f"{how!r} is not a choice", "choose none, auto, or a number of tiles")
    if recomputation not in ("full", "offload"):
        what = f"{how} with activation_checkpointing {recomputation!r}, which keeps what tiles would not"
        raise UserError("tiles", what, "recompute blocks: --model.activation-checkpointing full or offload")


def check_types(config: ModelConfig) -> None:
    """Raise UserError for a field of ``config`` whose value is not of its declared type: int, float, bool or str.

    An int is accepted for a float. A bool is accepted for neither an int nor a float.
    """
    for field in fields(config):  # ty: ignore[invalid-argument-type]
        value, wanted = getattr(config, field.name), str(field.type)
        fits = {
            "bool": isinstance(value, bool),
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": isinstance(value, int | float) and not isinstance(value, bool),
            "str": isinstance(value, str),
        }
        if not fits[wanted]:
            raise UserError(f"model.{field.name}", f"{value!r} is of the wrong type", f"give one {wanted}")
