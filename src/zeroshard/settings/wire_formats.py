"""Wire formats, in which tensors are sent between ranks: a dtype, or a block format, its bytes, and keys of rounding.

`zeroshard.kernels.block_formats` converts tensors; this module imports neither torch nor Triton.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from zeroshard.host.errors import UserError

if TYPE_CHECKING:
    import torch

FormatName = Literal["int8", "int4", "e4m3"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
WEIGHT_FORMATS = ("nf4", *FORMATS)
"""Formats in which frozen weights may be kept: those of the wire, and one for normally distributed numbers."""
SAME_AS: dict[str, FormatName] = {"fp8": "e4m3"}
"""Aliases: other name -> format."""
LARGEST = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0, "nf4": 1.0}
BLOCK = 256
BLOCK_STEP, MOST_IN_BLOCK = 16, 4096
SCALE_BYTES = 4
SCALES_IN_GROUP = 256  # scales that share a scale themselves, where they are kept as codes of 8 bits
ROW_BYTES = 16  # the size of a packed tensor is a multiple of it, so that adjacent packed tensors stay aligned


@dataclass(frozen=True)
class BlockFormat:
    """A block format: low-precision codes, with one fp32 scale for each block of elements.

    Raises:
        UserError: (a ValueError) there is no such format, or ``block`` is not a multiple of 16 from 16 to 4096.
    """

    name: FormatName | Literal["nf4"]  # one of `WEIGHT_FORMATS`; ``"e4m3"`` may be given as ``"fp8"``
    block: int = BLOCK  # number of elements that share a scale
    double: bool = False  # scales are kept as codes of 8 bits themselves (Dettmers et al. 2023, section 3)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", SAME_AS.get(self.name, self.name))
        if self.name not in WEIGHT_FORMATS:
            raise UserError("format", f"{self.name!r} is no block format", f"choose one of {', '.join(WEIGHT_FORMATS)}")
        check_block("block", self.block)

    def num_blocks(self, numel: int) -> int:
        """Number of blocks of ``numel`` elements; the last block may be shorter."""
        return -(-numel // self.block)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` elements."""
        return -(-numel // 2) if self.name in ("int4", "nf4") else numel

    def head_bytes(self, numel: int) -> int:
        """Bytes before the codes of ``numel`` elements: their scales, or their scales' offset and scales."""
        blocks = self.num_blocks(numel)
        return SCALE_BYTES * (1 + -(-blocks // SCALES_IN_GROUP) if self.double else blocks)

    def num_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` packed elements, rounded up to 16.

        1 per element (int4, nf4: 1/2), and 4 per block; ``double``: 1 per block, 4 per 256 blocks, and 4.
        """
        filled = self.head_bytes(numel) + self.code_bytes(numel) + (self.num_blocks(numel) if self.double else 0)
        return -(-filled // ROW_BYTES) * ROW_BYTES


@dataclass(frozen=True)
class DtypeFormat:
    """An ordinary floating-point dtype as a wire format: each element is rounded to the nearest, without scales."""

    dtype: torch.dtype

    def num_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` elements, rounded up to a multiple of 16."""
        return -(-numel * self.dtype.itemsize // ROW_BYTES) * ROW_BYTES


Format = BlockFormat | DtypeFormat


def check_block(name: str, block: int) -> None:
    """Raise UserError, a ValueError, unless ``block`` is a multiple of 16 from 16 to 4096."""
    fits = isinstance(block, int) and not isinstance(block, bool) and BLOCK_STEP <= block <= MOST_IN_BLOCK
    if not fits or block % BLOCK_STEP:
        what = f"blocks of {block!r} elements do not pack"
        raise UserError(name, what, f"give a multiple of {BLOCK_STEP} from {BLOCK_STEP} to {MOST_IN_BLOCK}")


def check_has_range(name: str, wire: torch.dtype | str | None) -> None:
    """Raise UserError, a ValueError, for a floating-point dtype of 8 bits or fewer: without a scale it is useless."""
    if wire is not None and not isinstance(wire, str) and wire.is_floating_point and wire.itemsize < 2:
        what = f"{wire} has no scale, and most numbers are zero or too large in it"
        raise UserError(name, what, "choose 'e4m3', which has one for each block, or torch.bfloat16")


def check_travels(field: str, wire: torch.dtype | str | None) -> None:
    """Raise UserError, a ValueError, unless ``wire`` is None, a floating-point dtype or a wire format."""
    if wire is None or wire in (*FORMATS, *SAME_AS):
        return
    if isinstance(wire, str) or not getattr(wire, "is_floating_point", False):
        todo = f"choose a floating-point dtype, or {', '.join(FORMATS)}"
        raise UserError(field, f"{wire!r} is not a wire format", todo)
    check_has_range(field, wire)


def format_of(wire: torch.dtype | str | None, block: int) -> Format | None:
    """The format that a policy names by a dtype, or by a block format and its ``block``."""
    if wire is None:
        return None
    return BlockFormat(cast(FormatName, wire), block) if isinstance(wire, str) else DtypeFormat(wire)


def rounding_key(seed: int, step: int, unit: str, rank: int, part: int = 0) -> int:
    """The key of one tensor's rounding noise, different for each (seed, step, unit, rank, part).

    See [Note: Noise] in `zeroshard.kernels.block_formats`.
    """
    word = f"{seed}/{step}/{rank}/{part}/{unit}".encode()
    digest = int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")
    return digest & (2**62 - 1) | 2**62  # a compiler always sees a 64-bit integer, and never a negative one


class Rounding:
    """The random keys of one buffer's stochastic rounding: each reduction of each step has keys of its own.

    Args:
        rank: this rank among all ranks.

    Attributes:
        step: number of optimizer steps so far; `zeroshard.Zero.resume_at` may set it.
    """

    def __init__(self, seed: int, unit: str, rank: int) -> None:
        self._seed, self._unit, self._rank = seed, unit, rank
        self.step = self._num_reductions = 0
        self._over = self._is_loaded = False

    @property
    def next_step(self) -> int:
        """The step that begins when gradients are cleared."""
        return self.step + (self._num_reductions > 0)

    def end_step(self) -> None:
        """Record that gradients are cleared: the next reduction belongs to the next step."""
        self._over = self._over or self._num_reductions > 0

    def resume_at(self, step: int) -> None:
        """Let the next reduction belong to this step."""
        self.step, self._num_reductions, self._over = step, 0, False

    def loaded(self, step: int) -> None:
        """As `resume_at`, with this buffer's own step from a checkpoint, which may lag behind the run's."""
        self.resume_at(step)
        self._is_loaded = True

    def begin_at(self, step: int) -> None:
        """As `resume_at`, with the run's step, unless a checkpoint had one of this buffer (`loaded`)."""
        if not self._is_loaded:
            self.resume_at(step)
        self._is_loaded = False

    def keys(self, num_parts: int) -> list[int]:
        """Return the keys of the next reduction, one for each of ``num_parts`` parts."""
        if self._over:
            self.resume_at(self.step + 1)
        first = self._num_reductions * num_parts
        self._num_reductions += 1
        fixed = self._seed, self.step, self._unit, self._rank
        return [rounding_key(*fixed, first + part) for part in range(num_parts)]
