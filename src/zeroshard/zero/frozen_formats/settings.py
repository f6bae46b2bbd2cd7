"""`FrozenFormat`: in which format frozen weights are kept, and which of them. Checks alone, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, cast

from zeroshard.host.errors import UserError
from zeroshard.host.lazily import loaded
from zeroshard.settings.wire_formats import SAME_AS, WEIGHT_FORMATS, BlockFormat

if TYPE_CHECKING:
    from torch import Tensor

    from zeroshard.zero.buffers.plain import Members
    from zeroshard.zero.core.units import UnitSpec

FrozenName = Literal["nf4", "int8", "int4", "e4m3"]
_BLOCKS = {"nf4": 64, "int4": 64, "int8": 256, "e4m3": 256}


@dataclass(frozen=True)
class FrozenFormat:
    """Frozen weights as codes and scales, decoded for each use; an argument of `zeroshard.Zero`.

    It applies to parameters that are frozen when the engine is built, have two or more dimensions and belong to a unit,
    but not to embeddings, the head (``lm_head``, or what a model of transformers says) or
    `MixedPrecision.keep_in_fp32_modules`: for adapters on a base that is not trained (QLoRA: Dettmers et al. 2023,
    https://arxiv.org/abs/2305.14314).

    Attributes:
        name: ``"nf4"``, ``"int8"``, ``"int4"`` or ``"e4m3"``; see `zeroshard.kernels.block_formats`.
        block: elements that share a scale; None: 64 with 4 bits, 256 with 8. A block never has elements of two
            parameters, so codes are the same at each stage and on any number of ranks.
        double: whether scales are kept as codes of 8 bits themselves: 0.516 bytes an element with nf4, not 0.563.
        only: patterns of names, such as ``["*.mlp.*"]``; None: as above. What they match may be an embedding too, or
            belong to no unit but the root.

    Raises:
        UserError: (a ValueError) an unknown format or a block of another size.
    """

    name: FrozenName = "nf4"
    block: int | None = None
    double: bool = False
    only: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if SAME_AS.get(self.name, self.name) not in WEIGHT_FORMATS:
            what = f"{self.name!r} is no format of frozen weights"
            raise UserError("frozen_format", what, f"choose one of {', '.join(WEIGHT_FORMATS)}")
        if isinstance(self.only, str):
            raise UserError("frozen_format.only", f"{self.only!r} is one text", f"give a list: [{self.only!r}]")
        object.__setattr__(self, "only", None if self.only is None else tuple(self.only))
        _ = self.form

    @property
    def form(self) -> BlockFormat:
        """The block format."""
        name = SAME_AS.get(self.name, self.name)
        return BlockFormat(name, _BLOCKS[name] if self.block is None else self.block, self.double)

    def matches(self, name: str) -> bool:
        """Whether ``only`` names this parameter."""
        return any(fnmatchcase(name, pattern) for pattern in self.only or ())

    def members(
        self, specs: Sequence[UnitSpec], others: Sequence[Members], kept: frozenset[Tensor] = frozenset()
    ) -> Sequence[Members]:
        """Return each unit's members, the root's first, instead of these ``others``.

        Args:
            specs: the units.
            others: what their members would be.
            kept: the parameters that mixed precision leaves in fp32, which get no codes unless ``only`` names them.

        Raises:
            UserError: (a ValueError) there is no parameter to apply the format to.
        """
        return loaded("zeroshard.zero.frozen_formats.coded", "members_of")(self, specs, others, kept)


def frozen_format_of(given: Any) -> FrozenFormat | None:
    """Return the format that an argument of `zeroshard.Zero` names: None, a name, or a `FrozenFormat`.

    Raises:
        TypeError: it is something else.
        UserError: as `FrozenFormat`.
    """
    if given is None or isinstance(given, FrozenFormat):
        return given
    if not isinstance(given, str):
        raise TypeError(f"frozen_format: {given!r} is no format; give 'nf4', or zeroshard.zero.FrozenFormat(...)")
    return FrozenFormat(cast(FrozenName, given))
