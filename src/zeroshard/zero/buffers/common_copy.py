"""Weight all-gathers that send quantised differences to a copy of the weights that every rank has.

If unsharded weights outlive a step (stages 1 and 2), the weights that ranks compute with are a *common copy*, with the
same bits on every rank. After a step each owner quantises the difference between its shard of the master weights and
its shard of the common copy; the codes are gathered, and every rank, the owner too, adds the decoded differences:

    difference = master - common        at the owner, in fp32
    codes      = quantise(difference)   gathered
    common    += dequantise(codes)      on every rank, rounded to the compute dtype

The error of one step's codes is part of the next step's difference, so errors do not accumulate. The difference of one
step is small, and so is the scale of its blocks. Sum and rounding are one IEEE 754 operation on the same numbers, so
all ranks' copies keep the same bits, in bf16 too, whose own rounding error is part of the next difference.

The owner also keeps its shard of the common copy: S c bytes for S elements of a compute dtype of c bytes. With it the
owner detects values that a user has written into weights ([Note: Changes in place] in `differences`), or undoes them. A
checkpoint saves it, so that a resumed run has the same bits.

Jia et al. 2024, "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM Training",
https://arxiv.org/abs/2410.15526, section 3.1.

[Note: One copy]
    A user who writes into weights must write the same values on every rank. Otherwise the copies would differ, and
    would never become equal again. So on a CPU an owner sends a fingerprint of its shard with its codes (16 bytes), and
    a rank whose copy has another fingerprint raises.

[Note: The whole copy]
    A rank can use codes only if it has the copy. If it may not (after a load, after a change of stage, or if values
    written into weights are to be dropped), the next gather sends the common copy itself, as it is after the owner has
    added its codes. So a rank gets the same bits in either way.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work, empty_for
from zeroshard.wire_formats import Format
from zeroshard.zero.buffers import wire

HEADER_BYTES = 16  # of the fingerprint after an owner's codes; a multiple of 16 keeps the next rank's scales aligned

Replaced = Literal["for good", "for now", "back", "by nothing"]
"""How the master weights were replaced outside of a step: by other weights; by weights that are there for a block only
(averages, anchors); by the weights from before such a block; not at all, but ranks may lack the copy."""


class CommonCopy:
    """This rank's shard of the common copy.

    Args:
        name: name of the buffer.
        form: wire format of differences.
        own: ``[n]`` in the compute dtype: the current values of the shard.

    Attributes:
        shard: ``[n]``: the shard of the common copy.
        is_stale: whether the master weights have changed since the last gather.
        whole_due: whether ranks may lack the copy: [Note: The whole copy].
    """

    def __init__(self, name: str, form: Format, own: Tensor) -> None:
        self.shard, self.is_stale, self.whole_due = own.clone(), False, False
        self._name, self._form = name, form
        self._aside: tuple[Tensor, bool] | None = None

    def gather(self, comm: Communicator, full: Tensor, master: Tensor) -> PackedDifferences | None:
        """Return the gather that makes ``full [world_size * n]`` current; None: `shard` itself must be gathered.

        ``master [n]`` is read here, not later.
        """
        behind, whole, self.is_stale, self.whole_due = self.is_stale, self.whole_due, False, False
        if not behind:
            return None
        packed = PackedDifferences(self._name, comm, self._form, full)
        codes, header = packed.row(comm.rank)
        header.fill_(_fingerprint(self.shard))
        self._advance(self.shard, master, codes)
        return None if whole else packed

    def current(self, master: Tensor) -> Tensor:
        """Return the shard ``[n]``, a new tensor, as it will be after the next gather."""
        shard = self.shard.clone()
        if self.is_stale:
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
        """Follow master weights that were replaced outside of a step; ``"back"`` undoes ``"for now"`` to the bit."""
        if how == "for now":
            self._aside = self.shard.clone(), self.is_stale
        if how in ("for good", "for now"):
            self.shard.copy_(master)
            self.is_stale = False
        elif how == "back":
            assert self._aside is not None
            (shard, self.is_stale), self._aside = self._aside, None
            self.shard.copy_(shard)
        self.whole_due = True

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are resident now."""
        return [self.shard] if self._aside is None else [self.shard, self._aside[0]]


class PackedDifferences:
    """An all-gather of differences, with the interface of `zeroshard.zero.buffers.wire.PackedGather`.

    Args:
        name: name of the buffer.
        comm: the ranks that hold the shards.
        form: wire format of the differences.
        full: ``[world_size * n]``: this rank's common copy, to which `deliver` adds the differences.

    Attributes:
        packed: ``[world_size, bytes]``: the buffer of the all-gather; the caller fills this rank's row.
    """

    def __init__(self, name: str, comm: Communicator, form: Format, full: Tensor) -> None:
        self._name, self._comm, self._form, self._full = name, comm, form, full
        self._code_bytes = form.num_bytes(full.numel() // comm.world_size)
        num_bytes = self._code_bytes + HEADER_BYTES
        packed = empty_for(comm, comm.world_size * num_bytes, torch.uint8, full.device)
        self.packed = packed.view(comm.world_size, num_bytes)

    def row(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's codes, and the fingerprint, [2] int64, of the shard to which they are added."""
        row = self.packed[rank]
        return row[: self._code_bytes], row[self._code_bytes :].view(torch.int64)

    def gather(self) -> Work:
        """Issue the collective."""
        return self._comm.all_gather(self.packed.view(-1), self.packed[self._comm.rank])

    def deliver(self) -> None:
        """Add the differences to the common copy, once the collective is done.

        Raises:
            RuntimeError: an owner's copy differs from this rank's: [Note: One copy].
        """
        shards = self._full.view(self._comm.world_size, -1)
        difference = torch.empty(shards.shape[1], dtype=torch.float32, device=shards.device)
        for rank, (_, shard) in enumerate(wire.by_rank(self.packed, shards)):
            codes, header = self.row(rank)
            known = _fingerprint(shard)
            if known and known != int(header[0]):
                raise RuntimeError(
                    f"{self._name}: this rank's copy of rank {rank}'s shard differs from that shard, so differences "
                    "cannot be added to it; write the same values into weights on every rank, or gather in int4"
                )
            wire.dequantise(codes, difference, self._form)
            _finite(shard).add_(difference)
        wire.record_read(self.packed)


def _fingerprint(shard: Tensor) -> int:
    """Return a fingerprint of the shard's bits as a signed 64-bit number; 0 on a GPU, because the host would block."""
    found = wire.seen(shard) or 0
    return found - 2**64 if found >= 2**63 else found


def _finite(values: Tensor) -> Tensor:
    """Replace NaN and Inf by zero, in place, so that the copy recovers from them as soon as the master weights do."""
    return values.nan_to_num_(0.0, 0.0, 0.0)
