"""What travels between ranks, as data: a dtype, or a block format and its bytes.

`zeroshard.kernels.block_formats` computes them; here is what needs neither torch nor Triton to be imported.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from zeroshard.errors import UserError

if TYPE_CHECKING:
    import torch

FormatName = Literal["int8", "int4", "e4m3"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
SAME_AS: dict[str, FormatName] = {"fp8": "e4m3"}
"""Other names of formats."""
DIFFERENCES: dict[str, FormatName] = {"int4-delta": "int4"}
"""Formats of weights alone, by the one that differences to what every rank has travel in."""
LARGEST = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0}
BLOCK = 256
BLOCK_STEP, MOST_IN_BLOCK = 16, 4096
SCALE_BYTES = 4
ROW_BYTES = 16  # packed tensors are multiples of it, so that those which lie end to end stay aligned


@dataclass(frozen=True)
class BlockFormat:
    """A block format.

    Attributes:
        name: ``"int8"``, ``"int4"`` or ``"e4m3"``, which may be given as ``"fp8"``.
        block: elements that share a scale.

    Raises:
        UserError: a ValueError; no such format, or a block that does not pack into whole words of 16 elements.
    """

    name: FormatName
    block: int = BLOCK

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", SAME_AS.get(self.name, self.name))
        if self.name not in FORMATS:
            raise UserError("format", f"{self.name!r} is no block format", f"choose one of {', '.join(FORMATS)}")
        check_block("block", self.block)

    def num_blocks(self, numel: int) -> int:
        """Blocks of ``numel`` elements; the last may be shorter."""
        return -(-numel // self.block)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` elements."""
        return -(-numel // 2) if self.name == "int4" else numel

    def num_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` elements: 4 for each block, 1 (int4: 1/2) for each element, to a multiple of 16."""
        return -(-(SCALE_BYTES * self.num_blocks(numel) + self.code_bytes(numel)) // ROW_BYTES) * ROW_BYTES


@dataclass(frozen=True)
class DtypeFormat:
    """An ordinary dtype as what travels: every element by itself, to the nearest; ``dtype``: a floating-point one."""

    dtype: torch.dtype

    def num_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` elements, to a multiple of 16."""
        return -(-numel * self.dtype.itemsize // ROW_BYTES) * ROW_BYTES


Format = BlockFormat | DtypeFormat


def check_block(name: str, block: int) -> None:
    """Raise UserError, a ValueError, for a block size that does not pack."""
    fits = isinstance(block, int) and not isinstance(block, bool) and BLOCK_STEP <= block <= MOST_IN_BLOCK
    if not fits or block % BLOCK_STEP:
        what = f"blocks of {block!r} elements do not pack"
        raise UserError(name, what, f"give a multiple of {BLOCK_STEP} from {BLOCK_STEP} to {MOST_IN_BLOCK}")


def check_has_range(name: str, wire: torch.dtype | str | None) -> None:
    """Raise UserError, a ValueError, for a dtype of 8 bits or fewer, which is none without a scale."""
    if wire is not None and not isinstance(wire, str) and wire.is_floating_point and wire.itemsize < 2:
        what = f"{wire} has no scale, and most numbers are zero or too large in it"
        raise UserError(name, what, "choose 'e4m3', which has one for each block, or torch.bfloat16")


def rounding_key(seed: int, step: int, unit: str, rank: int, part: int = 0) -> int:
    """The key of the noise of one tensor, another for each (seed, step, unit, rank, part).

    What follows from it: [Note: Noise] in `zeroshard.kernels.block_formats`.
    """
    word = f"{seed}/{step}/{rank}/{part}/{unit}".encode()
    digest = int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")
    return digest & (2**62 - 1) | 2**62  # always a 64-bit number to a compiler, and never a negative one
