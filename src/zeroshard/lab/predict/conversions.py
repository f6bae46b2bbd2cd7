"""The time that quantising takes: which numbers are quantised and dequantised, before and after which collective.

With n elements of a rank's shard, W ranks that shard and R that hold the same shard, `zeroshard.zero.buffers.wire`
computes::

    weights     before the gather       quantise n, to the nearest; of differences: and dequantise n
                after it                dequantise W n; of differences: and add them up
                                        at stages 1 and 2 on a CPU two fingerprints of n; of differences also
                                        one of n before the gather, and of W n after it
                from a second copy      dequantise W n
    gradients   before the exchange     quantise (W - 1) n, stochastically
                after it                sum of W - 1 pieces of n that were received
                over M nodes            M in the place of W
    replicas    before the exchange     quantise (R - 1) n / R, stochastically
                after it                sum of R - 1 pieces of n / R, and quantise the sum
                after its gather        dequantise n

Each row or piece is a call of its own. On a GPU what comes before a collective is computed on the collective's own
stream, beside what else is computed; what comes after it, on the stream that computes. A CPU does all of it in order.

A call takes a constant and each element a time, where `zeroshard bench device` has measured them. Where nobody has, the
bytes that are read and written over the memory's rate, and no less than a kernel takes: a block's scale and codes are
found in one pass, and a received piece is written out, read, added and written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from zeroshard.lab.predict.rates import SUSTAINED
from zeroshard.lab.predict.work import Work, dtype_name
from zeroshard.profiling.devices import Device
from zeroshard.wire_formats import BlockFormat, Format

Conversion = Literal["quantise", "quantise stochastically", "dequantise", "sum"]
FINGERPRINT = "fingerprint"
CONVERSIONS: tuple[Conversion, ...] = ("quantise", "quantise stochastically", "dequantise", "sum")
WIDE = 4  # bytes of the fp32 numbers that become codes, and that are added up


@dataclass(frozen=True)
class BufferFormats:
    """The wire formats of one flat buffer, and how many elements are converted.

    Attributes:
        weights, grads: the format; None: they are sent in the dtype that computes, or accumulates.
        shard_numel, num_shards: elements of this rank's shard, and how many shards there are.
        compute: the dtype that weights are dequantised to.
        differences: whether weights travel as differences to what every rank has.
        compared: whether the engine takes fingerprints to notice writes into unsharded weights.
    """

    weights: Format | None
    grads: Format | None
    shard_numel: int
    num_shards: int
    compute: torch.dtype
    differences: bool = False
    compared: bool = False

    def beside(
        self, op: str, phase: str, num_ranks: int, *, replicas: bool
    ) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
        """What is converted before a collective is issued, and after it was waited for; see the module's table.

        Args:
            op, phase: of its `Message`.
            num_ranks: that take part; fewer than `num_shards` where weights come from a second copy, and in the
                exchange between nodes.
            replicas: whether they hold the same shard.
        """
        numel, others = self.shard_numel, num_ranks - 1
        if phase == "weights":
            return self._of_weights(num_ranks) if self.weights is not None and op == "all_gather" else ((), ())
        if self.grads is None or op not in ("all_to_all", "all_gather"):
            return (), ()
        if not replicas:
            before = converted("quantise stochastically", self.grads, others * numel, others)
            return (before,), (converted("sum", self.grads, others * numel, others),)
        return across_replicas(self.grads, numel, num_ranks, gathers=op == "all_gather")

    def _of_weights(self, num_ranks: int) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
        form, numel, whole, itemsize = self.weights, self.shard_numel, self.num_shards, self.compute.itemsize
        assert form is not None
        wide = WIDE if self.differences else itemsize
        after = [converted("dequantise", form, whole * numel, whole, wide)]
        if self.differences:  # NaN is looked for, and they are added, in place
            after.append(Work(0, whole * numel * (4 * itemsize + WIDE), "float32", num_calls=2 * whole))
        if self.compared:
            after.append(fingerprinted(numel, itemsize, 3 + whole if self.differences else 2))
        before = [converted("quantise", form, numel)] if num_ranks == whole else []
        before += [converted("dequantise", form, numel)] if self.differences else []
        return tuple(before), tuple(after)


def across_replicas(
    form: Format, numel: int, num_ranks: int, *, gathers: bool
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """What is converted before and after the exchange of pieces of ``numel`` elements; ``gathers``: their gather's."""
    piece, others = -(-numel // num_ranks), num_ranks - 1
    if not gathers:
        return (converted("quantise stochastically", form, others * piece, others),), ()
    before = converted("sum", form, others * piece, others), converted("quantise stochastically", form, piece)
    return before, (converted("dequantise", form, num_ranks * piece, num_ranks),)


def converted(kind: Conversion, form: Format, numel: int, num_calls: int = 1, itemsize: int = WIDE) -> Work:
    """``numel`` elements in ``num_calls`` calls; ``itemsize``: of what codes become."""
    narrow = form.num_bytes(numel)
    wide = {"dequantise": itemsize, "sum": 4 * WIDE}.get(kind, WIDE) * numel
    name = f"{form.name} {kind}" if isinstance(form, BlockFormat) else f"{dtype_name(form.dtype)} {kind}"
    return Work(0, narrow + wide, "float32", conversion=name, numel=numel, num_calls=num_calls)


def fingerprinted(numel: int, itemsize: int, times: int) -> Work:
    """``times`` fingerprints of a shard of ``numel`` weights, by which the engine notices writes into them.

    A rank takes one of its own shard after a gather and one before the next. Where weights travel as differences it
    also takes one of its own shard before it subtracts, and one of every shard before it adds.
    """
    numel *= times
    return Work(0, numel * itemsize, "float32", conversion=FINGERPRINT, numel=numel, num_calls=times)


def conversion_s(work: Work, device: Device) -> float:
    """Seconds of a conversion: as measured, else its bytes over the memory's rate."""
    measured = device.conversions.get(work.conversion)
    if measured is not None:
        call_s, element_s = measured
        return work.num_calls * call_s + work.numel * element_s
    share = SUSTAINED[device.sustained].memory if device.sustained else device.memory_share
    bytes_s, calls_s = work.num_bytes / (device.bytes_per_s * share), work.num_calls * device.kernel_s
    return bytes_s + calls_s if device.device_type == "cpu" else max(bytes_s, calls_s)
