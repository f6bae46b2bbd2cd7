"""Predicts the time of conversions to and from wire formats: what is quantised and dequantised around each collective.

With n elements of a rank's shard, W ranks that shard and R that hold the same shard, `zeroshard.zero.transport.wire`
computes::

    weights     before the all-gather   quantise n, to the nearest
                after it                dequantise W n
                from a second copy      dequantise W n
    gradients   before the all-to-all   quantise (W - 1) n, stochastically
                after it                sum W - 1 received pieces of n
                over M nodes            the same with M in place of W
    replicas    before the all-to-all   quantise (R - 1) n / R, stochastically
                after it                sum R - 1 received pieces of n / R, and quantise the sum
                after its all-gather    dequantise n

Each shard or piece is a separate call. On a GPU the conversion before a collective runs on the collective's own stream,
overlapping with other computation, and the one after it on the compute stream. A CPU does all of them in order.

If `zeroshard bench device` has measured a conversion, it takes a constant per call and a time per element. If not, it
takes the bytes that it reads and writes over the memory's rate, and no less than a kernel: a block's scale and codes
are computed in one pass, and a received piece is dequantised to memory, read, added and written.

Frozen weights that are kept as codes are decoded for each use: on a GPU that nobody measured at `DECODING` of the
memory's rate, on a CPU at `CORE_DECODES_PER_S`. The decode of a unit runs beside the forward of the one before it, and
is taken to slow that by its full duration, as all conversions are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from zeroshard.lab.predict.rates import SUSTAINED
from zeroshard.lab.predict.work import Work, dtype_name
from zeroshard.settings.wire_formats import BlockFormat, Format
from zeroshard.train.profiling.devices import Device

Conversion = Literal["quantise", "quantise stochastically", "dequantise", "sum", "decode"]
CONVERSIONS: tuple[Conversion, ...] = ("quantise", "quantise stochastically", "dequantise", "sum")  # for the wire
# Frozen weights, where nobody measured their decoding: of a GPU's memory rate what our kernels are made for, not
# measured yet; of a core of a CPU what one was measured to decode of nf4, in elements a second.
DECODING, CORE_DECODES_PER_S = 0.7, 0.4e9
WIDE = 4  # bytes of an fp32 number, the dtype that is quantised and summed


@dataclass(frozen=True)
class BufferFormats:
    """The wire formats of one flat buffer, and the number of elements that are converted."""

    # weights, grads: their wire formats; None: weights are sent in the compute dtype, and gradients in the dtype that
    # they accumulate in
    weights: Format | None
    grads: Format | None
    # shard_numel, num_shards: elements of this rank's shard, and the number of shards
    shard_numel: int
    num_shards: int
    compute: torch.dtype  # the dtype that weights are dequantised to

    def beside(
        self, op: str, phase: str, num_ranks: int, *, replicas: bool
    ) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
        """The conversions before a collective is issued, and after it was waited for; see the module's table.

        Args:
            op, phase: operation and phase of the collective's `Message`.
            num_ranks: number of participants; fewer than `num_shards` if weights come from a second copy, and in the
                exchange between nodes.
            replicas: whether the participants hold the same shard.
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
        before = (converted("quantise", form, numel),) if num_ranks == whole else ()
        return before, (converted("dequantise", form, whole * numel, whole, itemsize),)


def across_replicas(
    form: Format, numel: int, num_ranks: int, *, gathers: bool
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """The conversions before and after a collective over replicas for a shard of ``numel`` elements.

    ``gathers``: whether it is the all-gather of the reduced pieces; if not, the all-to-all that exchanges them.
    """
    piece, others = -(-numel // num_ranks), num_ranks - 1
    if not gathers:
        return (converted("quantise stochastically", form, others * piece, others),), ()
    before = converted("sum", form, others * piece, others), converted("quantise stochastically", form, piece)
    return before, (converted("dequantise", form, num_ranks * piece, num_ranks),)


def converted(kind: Conversion, form: Format, numel: int, num_calls: int = 1, itemsize: int = WIDE) -> Work:
    """The `Work` of converting ``numel`` elements in ``num_calls`` calls; ``itemsize``: of a dequantised element."""
    narrow = form.num_bytes(numel)
    wide = {"dequantise": itemsize, "decode": itemsize, "sum": 4 * WIDE}.get(kind, WIDE) * numel
    name = f"{form.name} {kind}" if isinstance(form, BlockFormat) else f"{dtype_name(form.dtype)} {kind}"
    return Work(0, narrow + wide, "float32", conversion=name, numel=numel, num_calls=num_calls)


def conversion_s(work: Work, device: Device) -> float:
    """Seconds of a conversion: from the device's measurements, or else from its bytes and the memory's rate."""
    measured = device.conversions.get(work.conversion)
    if measured is not None:
        call_s, element_s = measured
        return work.num_calls * call_s + work.numel * element_s
    share = SUSTAINED[device.sustained].memory if device.sustained else device.memory_share
    if work.conversion.endswith("decode"):
        if device.device_type == "cpu":
            return work.numel / CORE_DECODES_PER_S
        share = DECODING
    bytes_s, calls_s = work.num_bytes / (device.bytes_per_s * share), work.num_calls * device.kernel_s
    return bytes_s + calls_s if device.device_type == "cpu" else max(bytes_s, calls_s)
