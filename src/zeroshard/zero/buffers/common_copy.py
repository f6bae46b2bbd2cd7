"""Weights that travel as differences to what every rank has already, in few bits.

Where unsharded weights outlive a step (stages 1 and 2), every rank has the *common copy*: what it computes with, the
same bits everywhere. After a step an owner quantises the difference between its shard of the masters and its shard of
the common copy; the codes are gathered, and every rank, the owner too, adds what they stand for:

    difference = master - common        at the owner, in fp32
    codes      = quantise(difference)   gathered
    common    += dequantise(codes)      on every rank, rounded to the dtype that computes

What one step's codes miss is in the next step's difference, so errors do not add up, and a difference of one step is
small: so is its block's scale. The sum and the rounding are one operation of IEEE 754 on the same numbers, so the
copies stay the same bits on all ranks, in bf16 too, whose own rounding is part of the next difference.

The owner keeps its shard of the common copy beside the master: S c bytes. That tells what somebody has written into
weights ([Note: Changes in place] in `differences`), brings them back where that is to be forgotten, and is what a
checkpoint needs to go on with the same bits.

Jia et al. 2024, "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM Training",
https://arxiv.org/abs/2410.15526, section 3.1.

[Note: One copy]
    Who writes into weights writes the same on every rank; nothing else could make the copies differ, and nothing would
    make them alike again. So on a CPU an owner sends a fingerprint of its shard with its codes, 16 bytes, and a rank
    that has another one raises.

[Note: The whole copy]
    The codes alone are of use only to a rank that has the copy. Where it may not (after a load, a change of stage, or
    when what was written into weights is to be forgotten) the next gather brings the common copy itself, as it is after
    the owner has added its codes. So how a copy came changes no bit of it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work, empty_for
from zeroshard.wire_formats import Format
from zeroshard.zero.buffers import wire

HEADER_BYTES = 16  # behind an owner's codes; a multiple, so that the next rank's scales are aligned

Replaced = Literal["for good", "for now", "back", "by nothing"]
"""What has come into the masters' place: other weights, weights that only visit, those from before; the same ones."""


class CommonCopy:
    """This rank's shard of what every rank has.

    Args:
        name: of the buffer.
        form: what differences travel in.
        own: ``[n]`` in the dtype that computes: its values now.

    Attributes:
        shard: ``[n]``.
        behind: whether the masters have changed since.
        whole_due: whether ranks may lack the copy: [Note: The whole copy].
    """

    def __init__(self, name: str, form: Format, own: Tensor) -> None:
        self.shard, self.behind, self.whole_due = own.clone(), False, False
        self._name, self._form = name, form
        self._aside: tuple[Tensor, bool] | None = None

    def gather(self, comm: Communicator, full: Tensor, master: Tensor) -> PackedDifferences | None:
        """What the next gather sends so that ``full [world_size * n]`` is current; None: `shard` itself, unpacked.

        The difference to ``master [n]`` is read here and not any more.
        """
        behind, whole, self.behind, self.whole_due = self.behind, self.whole_due, False, False
        if not behind:
            return None
        packed = PackedDifferences(self._name, comm, self._form, full)
        codes, header = packed.row(comm.rank)
        header.fill_(_fingerprint(self.shard))
        self._advance(self.shard, master, codes)
        return None if whole else packed

    def current(self, master: Tensor) -> Tensor:
        """``[n]``, a new tensor: the shard as it will be when the next gather is over."""
        shard = self.shard.clone()
        if self.behind:
            packed = torch.empty(self._form.num_bytes(shard.numel()), dtype=torch.uint8, device=shard.device)
            self._advance(shard, master, packed)
        return shard

    def _advance(self, shard: Tensor, master: Tensor, packed: Tensor) -> None:
        _finite(shard)
        difference = (master - shard).to(torch.float32)
        wire.quantise(difference, packed, self._form)
        wire.dequantise(packed, difference, self._form)
        shard.add_(difference)

    def replace(self, master: Tensor, how: Replaced) -> None:
        """Follow masters that have changed outside of a step. What only visits leaves no trace in later bits."""
        if how == "for now":
            self._aside = self.shard.clone(), self.behind
        if how in ("for good", "for now"):
            self.shard.copy_(master)
            self.behind = False
        elif how == "back":
            assert self._aside is not None
            (shard, self.behind), self._aside = self._aside, None
            self.shard.copy_(shard)
        self.whole_due = True

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept now."""
        return [self.shard] if self._aside is None else [self.shard, self._aside[0]]


class PackedDifferences:
    """The all-gather of differences, as `zeroshard.zero.buffers.wire.PackedGather` has it.

    Args:
        name: of the buffer.
        comm: the ranks that hold the shards.
        form: what travels.
        full: ``[world_size * n]``: this rank's common copy; moved on by `deliver`.

    Attributes:
        packed: ``[world_size, bytes]``: what is gathered; this rank's row is for the caller to fill.
    """

    def __init__(self, name: str, comm: Communicator, form: Format, full: Tensor) -> None:
        self._name, self._comm, self._form, self._full = name, comm, form, full
        self._code_bytes = form.num_bytes(full.numel() // comm.world_size)
        num_bytes = self._code_bytes + HEADER_BYTES
        packed = empty_for(comm, comm.world_size * num_bytes, torch.uint8, full.device)
        self.packed = packed.view(comm.world_size, num_bytes)

    def row(self, rank: int) -> tuple[Tensor, Tensor]:
        """A rank's codes, and the fingerprint of the shard that they are added to, [2] int64."""
        row = self.packed[rank]
        return row[: self._code_bytes], row[self._code_bytes :].view(torch.int64)

    def gather(self) -> Work:
        """Issue the collective."""
        return self._comm.all_gather(self.packed.view(-1), self.packed[self._comm.rank])

    def deliver(self) -> None:
        """Add the differences, once it is done.

        Raises:
            RuntimeError: [Note: One copy].
        """
        shards = self._full.view(self._comm.world_size, -1)
        difference = torch.empty(shards.shape[1], dtype=torch.float32, device=shards.device)
        for rank, (_, shard) in enumerate(wire.by_rank(self.packed, shards)):
            codes, header = self.row(rank)
            known = _fingerprint(shard)
            if known and known != int(header[0]):
                raise RuntimeError(
                    f"{self._name}: weights of rank {rank}'s shard are others here than there, to which differences "
                    "were to be added; write into weights on every rank alike, or gather in int4"
                )
            wire.dequantise(codes, difference, self._form)
            _finite(shard).add_(difference)
        wire.read_here(self.packed)


def _fingerprint(shard: Tensor) -> int:
    """Of its bits, as a signed 64-bit number; 0 where nobody looks: a GPU is not waited for."""
    found = wire.seen(shard) or 0
    return found - 2**64 if found >= 2**63 else found


def _finite(values: Tensor) -> Tensor:
    """Zeros where a block arrived as NaN, so that it is well again when the masters are; changed in place."""
    return values.nan_to_num_(0.0, 0.0, 0.0)
