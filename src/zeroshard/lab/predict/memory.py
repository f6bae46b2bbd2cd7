"""Computes the bytes of training state on a rank from shapes and a row of the stage table.

With N elements of a buffer, padded to P = W * S for W shards of S elements, and itemsizes c (compute), m (master), g
(reduction), h (reduced gradients: m, or g if that is bfloat16):

    params      unsharded P c; sharded S m if compute and master have the same dtype, else nothing between uses
                at stages 1 and 2 with a wire format, S m more if compute and master have the same dtype
                coded frozen weights: the bytes of their codes, sharded with the params column
                P c / n more for a second copy over n ranks, or W q(S) / n with a wire format in which a shard has
                q(S) bytes
    master      P m or S m by the `optim` column if compute has another dtype and the parameters are trained; else 0,
                because the weights are the master
    grads       sharded S h; unsharded P g, and the reduced gradients that the optimizer reads if they are not a view
    optimizer   state per element of the pieces that the rank owns, without padding; and scalars per piece; with 8-bit
                states a scale per block of a piece, and S is a multiple of the block

State that is off the device (`zeroshard.zero.Offload`) is counted under categories of its own, `HOST` or `DISK`. Its
master is then a tensor of its own in any case, and at stage 3 a shard of S c stays on the device, or, streamed, on the
host; ``weights="disk"`` has none. Then, and where weights are streamed, a shard of frozen weights is on the host too.
One rank alone shards its weights only if they are streamed.
What is in a rank's file is no memory; that through which it goes is `SLOTS`: up to three times the largest unit's part
of the file, and up to twice its gradients there.

If an optimizer needs every tensor complete on one rank, S is the longest shard, and P may be much larger than N.

Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054, section 3.1: the 16 bytes for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from zeroshard.kernels.adamw8bit import chunk_numel, in_one_pass
from zeroshard.lab.predict.actions import Settings
from zeroshard.lab.predict.buffers import Buffer, own_numel
from zeroshard.zero import MixedPrecision, Offload, ShardingStrategy
from zeroshard.zero.buffers.changed_values import bit_sums_bytes
from zeroshard.zero.core.layout import FlatLayout, Piece
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.offload.disk import NUM_SLOTS, extent_bytes
from zeroshard.zero.offload.grad_slots import NUM_GRAD_SLOTS
from zeroshard.zero.state_formats.formats import FORMATS, STATES, StateFormat

# category of a kind of state -> that of the same kind on the host
HOST = {"params": "host_params", "master": "host_master", "grads": "host_grads", "optimizer": "host_optimizer"}
# those of what is in a rank's file; scalars stay on the host
DISK = {"master": "disk_master", "grads": "disk_grads", "optimizer": "disk_optimizer"}
SLOTS = "host_slots"
SCALAR_BYTES = 4  # torch keeps a parameter's step count as one fp32 number
WIDE_BYTES = 4  # fp32, in which 8-bit states are updated
SCALE_BYTES = 4  # the scale of a block of 8-bit states is an fp32 number


@dataclass(frozen=True)
class OptimizerState:
    """The state that an optimizer keeps for a parameter.

    Attributes:
        num_per_element: number of tensors as large as the parameter.
        num_scalars: number of scalars.
        factored: whether, for a parameter of two dimensions or more, the last of those tensors is replaced by two
            smaller ones, without the last and without the last but one dimension (Shazeer and Stern 2018, Adafactor,
            https://arxiv.org/abs/1804.04235, section 3).
        itemsize: bytes of each element of those tensors; 0: of the parameter's master.
        block: consecutive elements that have a common fp32 scale in each of those tensors, and that no shard cuts; 1:
            there are no scales.
        num_widened: number of those tensors that a step needs in fp32 and that are kept in fewer bits: they are widened
            for it unit by unit.
        by_unit: whether the engine runs the class's step unit by unit if it copies gradients to another dtype: it does
            that for classes of `torch.optim`, and for those that declare that it may. Others are shown copies of all
            gradients at once.
        corrects: whether a master in bfloat16 has a byte more of each element, without scales.
    """

    num_per_element: int
    num_scalars: int = 0
    factored: bool = False
    itemsize: int = 0
    block: int = 1
    by_unit: bool = True
    num_widened: int = 0
    corrects: bool = False

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of state, without scalars, for a parameter or piece of ``shape`` whose master has ``itemsize``."""
        num_blocks = -(-math.prod(shape) // self.block) if self.block > 1 else 0
        kept = self.numel(shape) * (self.itemsize or itemsize) + self.num_per_element * num_blocks * SCALE_BYTES
        return kept + math.prod(shape) * self.correction_bytes(itemsize)

    def correction_bytes(self, itemsize: int) -> int:
        """Bytes of each element's further bits, if its master of ``itemsize`` is in bfloat16."""
        return int(self.corrects and itemsize == torch.bfloat16.itemsize)

    def chunk_bytes(self, numel: int, itemsize: int, device_type: str) -> int:
        """Bytes that an update of a piece of ``numel`` elements allocates at a time; ``itemsize``: of its
        master.

        8-bit states are updated in one pass, without any. Where there is neither a compiler nor Triton, those of a
        chunk are widened to fp32, with scratch tensors, and so is the gradient if it is narrow:
        `zeroshard.kernels.adamw8bit`.
        """
        if self.block == 1 or in_one_pass(device_type):
            return 0
        num_wide = self.num_per_element + (3 if itemsize >= WIDE_BYTES else 4) + self.correction_bytes(itemsize)
        chunk = min(numel, chunk_numel(device_type))
        chunk = chunk // self.block * self.block or chunk  # a shorter block at the end has a turn of its own
        return num_wide * WIDE_BYTES * chunk

    def bytes_per_element(self, itemsize: int) -> float:
        """Bytes of state for each element of a large parameter whose master has ``itemsize``."""
        scales = SCALE_BYTES / self.block if self.block > 1 else 0.0
        return self.num_per_element * ((self.itemsize or itemsize) + scales) + self.correction_bytes(itemsize)

    def step_bytes(self, itemsize: int) -> float:
        """Bytes of state that a step reads and writes for each element; those that are widened it passes once more."""
        return 2 * self.bytes_per_element(itemsize) + 4 * self.num_widened * WIDE_BYTES

    @property
    def cpu_factor(self) -> float:
        """Time of an update on a CPU over that of its bytes; of codes divisions and roots are the bottleneck.

        Measured by ``benchmarks/claims/low_bit_step.py``: 1.3 of fused AdamW's time for 16 of 28 bytes, and 1.5 for 12.
        """
        if self.block == 1 or self.num_widened:
            return 1.0
        return 3.5 if self.corrects else 2.3

    def kept_in(self, form: StateFormat) -> OptimizerState:
        """The same, kept in a format between steps."""
        itemsize = next(iter(form.kept.values())).itemsize
        return replace(self, itemsize=itemsize, block=form.block, num_widened=self.num_per_element)

    def numel(self, shape: tuple[int, ...]) -> int:
        """Elements of state, without scalars, for a parameter or piece of ``shape``."""
        return sum(self.sizes(shape))

    def sizes(self, shape: tuple[int, ...]) -> list[int]:
        """Elements of each tensor of state, without scalars, for a parameter or piece of ``shape``."""
        numel = math.prod(shape)
        if not self.factored or len(shape) < 2:
            return [numel] * self.num_per_element
        return [numel] * (self.num_per_element - 1) + [numel // shape[-1], numel // shape[-2]]


OPTIMIZER_STATES: dict[str, OptimizerState] = {
    "AdamW": OptimizerState(2, 1),
    "AdamW8bit": OptimizerState(2, 1, itemsize=1, block=256),  # `zeroshard.optim.AdamW8bit`
    # `zeroshard.optim.FlashAdamW`
    "FlashAdamW": OptimizerState(2, 1, itemsize=1, block=256, corrects=True),
    "Adam": OptimizerState(2, 1),
    "Adamax": OptimizerState(2, 1),
    "NAdam": OptimizerState(2, 2),
    "RAdam": OptimizerState(2, 1),
    "RMSprop": OptimizerState(1, 1),
    "Adagrad": OptimizerState(1, 1),
    "Adadelta": OptimizerState(2, 1),
    "SGD": OptimizerState(0),
    "SGD with momentum": OptimizerState(1),
    "Muon": OptimizerState(1),
    "Adafactor": OptimizerState(1, 1, factored=True),
    # Chen et al. 2023, https://arxiv.org/abs/2302.06675: only momentum.
    "Lion": OptimizerState(1, by_unit=False),
}
_FORMATTED = {cls.__name__ for cls in STATES}
OPTIMIZER_STATES |= {
    f"{name} in {form.name}": state.kept_in(form)
    for form in filter(None, FORMATS.values())
    for name, state in OPTIMIZER_STATES.items()
    if name.split()[0] in _FORMATTED and state.num_per_element
}  # `Zero.optimizer(..., state_format=)`


@dataclass(frozen=True)
class RankBuffer:
    """A flat buffer as one rank has it under an engine's settings."""

    buffer: Buffer
    settings: Settings

    @property
    def layout(self) -> FlatLayout:
        """The buffer's."""
        return self.buffer.layout

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters, and so of their master weights."""
        return self.buffer.dtype

    @cached_property
    def policy(self) -> MixedPrecision:
        """The part of the dtype policy that holds for it."""
        return self.buffer.policy(self.settings.precision)

    @property
    def compute(self) -> torch.dtype:
        """That of forward and backward."""
        return self.policy.compute_dtype(self.dtype)

    @property
    def shards_params(self) -> bool:
        """Whether the rank keeps a shard of the weights alone between uses."""
        return self.settings.strategy.params is SHARD and self.layout.world_size > 1

    @property
    def shards_grads(self) -> bool:
        """Whether gradients of micro-batches accumulate as a shard."""
        return self.settings.strategy.grads is SHARD and self.layout.world_size > 1

    @property
    def owner(self) -> int | None:
        """The rank whose pieces its optimizer updates; None: the optimizer is replicated."""
        shards = self.settings.strategy.optim is SHARD and self.layout.world_size > 1
        return self.settings.rank if shards else None

    @property
    def own_numel(self) -> int:
        """Elements of the rank's shard, padding included."""
        return own_numel(self.layout, self.settings.rank)

    @property
    def updated_numel(self) -> int:
        """Elements that the rank's optimizer updates, padding included."""
        return self.layout.padded_numel if self.owner is None else self.own_numel

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the reduced gradients that its optimizer reads."""
        return self.updated_numel * self.policy.reduced_dtype(self.dtype).itemsize

    @property
    def has_format(self) -> bool:
        """Whether weights are sent in a wire format; if so, those that compute are not a view of the master."""
        return self.policy.weights_format(self.dtype) is not None

    @property
    def copy_bytes(self) -> int:
        """Bytes of the rank's part of a second copy in its node, of what a gather between nodes receives; 0: none."""
        num_ranks, form = self.settings.strategy.secondary_shard_size, self.policy.weights_format(self.dtype)
        if num_ranks is None:
            return 0
        if form is None:
            return self.layout.padded_numel * self.compute.itemsize // num_ranks
        return self.layout.world_size * form.num_bytes(self.layout.shard_numel) // num_ranks

    def grad_bytes(self, num_reductions: int) -> int:
        """Bytes of gradients between the last of several backwards that reduce and the step: sums, and their mean."""
        if self.shards_grads:
            return self.reduced_bytes
        reduce_dtype, reduced_dtype = self.policy.gradient_dtype(self.dtype), self.policy.reduced_dtype(self.dtype)
        own_memory = num_reductions > 1 or reduce_dtype != reduced_dtype
        return self.layout.padded_numel * reduce_dtype.itemsize + (self.reduced_bytes if own_memory else 0)

    @property
    def wide_bytes(self) -> int:
        """Bytes of exact sums: two float64 per element of the rank's shard."""
        return self.own_numel * 2 * (16 if self.dtype.is_complex else 8)

    @property
    def sends_master(self) -> bool:
        """Whether the master on the host is what is gathered: [Note: Host and device in one] in `host_params`."""
        offload = self.settings.offload or Offload()
        as_it_is = self.compute == self.dtype and (self.owner is None or not self.has_format)
        on_cpu = self.settings.device_type == "cpu"
        return as_it_is and on_cpu and offload.weights == "device" and offload.master != "disk"

    def pieces(self, device_type: str) -> Sequence[Piece]:
        """The pieces that its optimizer updates; a replicated one on CPUs updates those of all ranks."""
        layout = self.layout
        if self.owner is None and (device_type != "cpu" or layout.keeps_tensors_whole):
            return tuple(layout.pieces(0, layout.padded_numel))
        ranks = range(layout.world_size) if self.owner is None else [self.owner]
        return tuple(piece for each in ranks for piece in layout.owned(each))

    def optimizer_bytes(self, optimizer: OptimizerState, device_type: str) -> int:
        """Bytes of the optimizer's state."""
        layout, itemsize = self.layout, self.dtype.itemsize
        if self.owner is None and not layout.keeps_tensors_whole and device_type == "cpu":  # without a loop over ranks
            shard_numel = max(layout.part_numel, 1)
            slots = [slot for slot in layout.slots if slot.numel]
            num_pieces = sum(
                (slot.offset + slot.numel - 1) // shard_numel - slot.offset // shard_numel + 1 for slot in slots
            )
            num_bytes = sum(optimizer.num_bytes((slot.numel,), itemsize) for slot in slots)
            return num_bytes + num_pieces * optimizer.num_scalars * SCALAR_BYTES
        pieces = self.pieces(device_type)
        num_bytes = sum(optimizer.num_bytes(piece.shape, itemsize) for piece in pieces)
        return num_bytes + len(pieces) * optimizer.num_scalars * SCALAR_BYTES


def state_bytes(
    buffers: Iterable[Buffer],
    strategy: ShardingStrategy,
    rank: int,
    optimizer: OptimizerState,
    precision: MixedPrecision | None = None,
    **settings: Any,
) -> dict[str, int]:
    """`resident_bytes` of the engine with this row, dtype policy and further fields of `Settings`, on ``rank``."""
    return resident_bytes(buffers, Settings(strategy, precision or MixedPrecision(), rank=rank, **settings), optimizer)


def resident_bytes(
    buffers: Iterable[Buffer],
    settings: Settings,
    optimizer: OptimizerState,
    whole_optimizer: OptimizerState | None = None,
) -> dict[str, int]:
    """Resident bytes of a rank, by category: what `Zero.memory_bytes` counts between a backward and its step.

    Optimizer states are those after the first step. While a unit runs, its unsharded weights and gradients come on top.

    Args:
        buffers: the model's flat buffers, laid out for the world size, or for the ranks of a replica if there are
            several: replicas hold the same state. Every trained parameter is assumed to have a gradient.
        settings: the engine's, and the rank's number among those that shard together: ranks differ in padding and in
            where pieces end. Several reductions in a step need a second buffer if unsharded gradients accumulate,
            unless one rank is alone and its gradients stay on the device. A replicated optimizer on CPUs updates
            parameters in pieces that end where shards do, and each piece has its own scalars.
        optimizer: the optimizer's state per parameter.
        whole_optimizer: the state of a second optimizer, for the buffers whose tensors are complete on one rank; None:
            there is no second optimizer.
    """
    buffers, offload = list(buffers), settings.offload
    away, frozen_away = buffers_away(buffers, offload), frozen_on_host(buffers, settings)
    total = {"params": 0, "grads": 0, "master": 0, "optimizer": 0}
    if offload is not None:
        total |= dict.fromkeys(_categories_away(offload), 0)
        if on_disk(offload):
            parts = file_parts(buffers, settings, optimizer, whole_optimizer)
            total[SLOTS] = min(NUM_SLOTS, len(parts)) * max(parts, default=0)
            grads = [_grads_in_file(RankBuffer(buffer, settings)) for buffer in buffers if buffer.name in away]
            total[SLOTS] += min(NUM_GRAD_SLOTS, len(grads)) * max(grads, default=0)
    exact = settings.reproducible is not None
    for buffer in buffers:
        part = RankBuffer(buffer, settings)
        updates = (buffer.layout.keeps_tensors_whole and whole_optimizer) or optimizer
        if buffer.name in away:
            assert offload is not None
            found = _away_bytes(part, updates, offload)
            if exact:
                found |= {"grads": part.wide_bytes, "host_grads": part.reduced_bytes}
        else:
            found = _here_bytes(part, updates)
            if exact and buffer.trained:
                found["grads"] = part.reduced_bytes + part.wide_bytes
            if buffer.name in frozen_away:
                on_host = part.own_numel * part.compute.itemsize
                found |= {HOST["params"]: on_host, "params": found["params"] - on_host}
        for category, num_bytes in found.items():
            total[category] += num_bytes
    return total


def _here_bytes(part: RankBuffer, optimizer: OptimizerState) -> dict[str, int]:
    """Bytes of a buffer whose state is on the device, by category."""
    buffer, settings = part.buffer, part.settings
    if (codes := buffer.codes(settings.strategy)) is not None:
        own = codes.part(settings.rank if settings.strategy.params is SHARD else 0)
        return {"params": own.stop - own.start}
    found = dict(zip(("params", "master"), _weight_bytes(part), strict=True))
    if buffer.trained:
        alone = part.layout.world_size * settings.num_replicas == 1
        found["grads"] = part.grad_bytes(1 if alone else settings.num_reductions)
        found["optimizer"] = part.optimizer_bytes(optimizer, settings.device_type)
    return found


def buffers_away(buffers: Sequence[Buffer], offload: Offload | None) -> frozenset[str]:
    """Names of the buffers whose state is off the device: trained ones of the last units of the forward."""
    units = _units_away(buffers, offload)
    return frozenset(buffer.name for buffer in buffers if buffer.trained and buffer.unit in units)


def streamed(buffers: Sequence[Buffer], settings: Settings) -> frozenset[str]:
    """Names of the buffers of which a rank's shard of the weights is off the device, from where gathers bring it."""
    offload = settings.offload
    if offload is None or offload.weights == "device" or settings.strategy.params is not SHARD:
        return frozenset()
    units = _units_away(buffers, offload)
    return frozenset(buffer.name for buffer in buffers if buffer.unit in units and buffer.form is None)


def frozen_on_host(buffers: Sequence[Buffer], settings: Settings) -> frozenset[str]:
    """Names of the buffers of frozen weights of which a rank's shard is on the host, from where gathers copy it up."""
    return streamed(buffers, settings) - {buffer.name for buffer in buffers if buffer.trained}


def _units_away(buffers: Sequence[Buffer], offload: Offload | None) -> frozenset[str]:
    numels = unit_numels(buffers)
    num_away = 0 if offload is None else offload.units_away(list(numels.values()))
    return frozenset(list(numels)[len(numels) - num_away :])


def unit_numels(buffers: Sequence[Buffer]) -> dict[str, int]:
    """Elements of each unit, in the order of the forward."""
    numels: dict[str, int] = {}
    for buffer in buffers:
        numels[buffer.unit] = numels.get(buffer.unit, 0) + buffer.layout.numel
    return numels


def on_disk(offload: Offload | None) -> bool:
    """Whether any state goes to a rank's file."""
    return offload is not None and "disk" in (offload.optimizer, offload.master, offload.grads)


def host_bytes(resident: Mapping[str, int]) -> int:
    """Bytes in memory of the host of what left the device, of resident bytes by category."""
    return sum(resident.get(category, 0) for category in (*HOST.values(), SLOTS))


def file_parts(
    buffers: Sequence[Buffer],
    settings: Settings,
    optimizer: OptimizerState,
    whole_optimizer: OptimizerState | None = None,
) -> list[int]:
    """Bytes of a rank's file for each buffer with state there: all are read once and written once for each step.

    Args: as `resident_bytes` takes them.
    """
    offload = settings.offload
    if offload is None or not on_disk(offload):
        return []
    away, parts = buffers_away(buffers, offload), []
    for part in (RankBuffer(buffer, settings) for buffer in buffers if buffer.name in away):
        kept = (part.layout.keeps_tensors_whole and whole_optimizer) or optimizer
        num_bytes = 0
        if offload.master == "disk":
            num_bytes += extent_bytes([(part.updated_numel, part.dtype)])
        if offload.optimizer == "disk":
            sizes = [(numel, part.dtype) for piece in part.pieces("cpu") for numel in kept.sizes(piece.shape)]
            num_bytes += extent_bytes(sizes) if sizes else 0
        parts.append(num_bytes + _grads_in_file(part))
    return [num_bytes for num_bytes in parts if num_bytes]


def _grads_in_file(part: RankBuffer) -> int:
    offload = part.settings.offload
    if offload is None or offload.grads != "disk":
        return 0
    return extent_bytes([(part.updated_numel, part.policy.reduced_dtype(part.dtype))])


def watch_bytes(buffers: Sequence[Buffer], settings: Settings) -> int:
    """Bytes of the sums by which writes into unsharded weights are found if their master is elsewhere."""
    names = buffers_away(buffers, settings.offload) - streamed(buffers, settings)
    parts = [RankBuffer(buffer, settings) for buffer in buffers if buffer.name in names]
    whole = [part for part in parts if not part.shards_params and not part.sends_master]
    return sum(bit_sums_bytes(part.layout.padded_numel * part.compute.itemsize) for part in whole)


def _away_bytes(part: RankBuffer, optimizer: OptimizerState, offload: Offload) -> dict[str, int]:
    """Bytes of a buffer whose state is off the device, by category."""
    layout, settings, compute = part.layout, part.settings, part.compute
    found = dict.fromkeys(("params", "grads", *_categories_away(offload)), 0)
    alone, here = layout.world_size == 1, part.sends_master
    whole = settings.strategy.params is not SHARD or (alone and offload.weights == "device")
    if whole:
        found["params"] = layout.padded_numel * compute.itemsize
    else:
        found["params"] = part.copy_bytes
        if (alone or not part.has_format) and offload.weights != "disk" and not here:
            found["host_params" if offload.weights == "host" else "params"] += part.own_numel * compute.itemsize
    if not (whole and here):
        found[(DISK if offload.master == "disk" else HOST)["master"]] = part.updated_numel * part.dtype.itemsize
    if offload.grads == "disk":
        found["disk_grads"] = part.reduced_bytes
    elif settings.device_type == "cpu":  # they stay where they are, on the host: all but a local sum of its own
        local = layout.padded_numel * part.policy.gradient_dtype(part.dtype).itemsize
        both = part.grad_bytes(settings.num_reductions)
        found["grads"] = local if both == local + part.reduced_bytes and not part.shards_grads else 0
        found["host_grads"] = both - found["grads"]
    else:
        found["host_grads"] = part.reduced_bytes
    found[HOST["optimizer"]] = part.optimizer_bytes(optimizer, "cpu")
    if offload.optimizer == "disk":
        scalars = len(part.pieces("cpu")) * optimizer.num_scalars * SCALAR_BYTES
        found[DISK["optimizer"]] = found[HOST["optimizer"]] - scalars
        found[HOST["optimizer"]] = scalars
    return found


def _categories_away(offload: Offload) -> list[str]:
    """The categories of state that is off the device, without that through which it goes."""
    found = [HOST[kind] for kind in HOST if kind in ("params", "optimizer") or getattr(offload, kind) != "disk"]
    return found + [DISK[kind] for kind in DISK if getattr(offload, kind) == "disk"]


def _weight_bytes(part: RankBuffer) -> tuple[int, int]:
    """Bytes of a buffer's weights, and of its master weights if they have another dtype."""
    master = part.dtype if part.buffer.trained else part.compute
    weights = part.copy_bytes if part.shards_params else part.layout.padded_numel * part.compute.itemsize
    if part.compute != master:
        return weights, part.updated_numel * master.itemsize
    if part.shards_params or (part.owner is not None and part.has_format):
        weights += part.own_numel * master.itemsize
    return weights, 0


def ema_bytes(buffers: Iterable[Buffer], settings: Settings) -> int:
    """Resident bytes of a moving average of the weights that a rank's optimizer updates, without padding."""
    total = 0
    for part in (RankBuffer(buffer, settings) for buffer in buffers):
        owned = None if part.owner is None else part.layout.owned(part.owner)
        total += (part.layout.numel if owned is None else sum(piece.numel for piece in owned)) * part.dtype.itemsize
    return total
