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

import torch

from zeroshard.kernels.adamw8bit import chunk_numel, in_one_pass
from zeroshard.lab.predict.buffers import Buffer, own_numel
from zeroshard.zero import MixedPrecision, Offload, ShardingStrategy
from zeroshard.zero.buffers.changed_values import bit_sums_bytes
from zeroshard.zero.core.layout import Piece
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


def state_bytes(
    buffers: Iterable[Buffer],
    strategy: ShardingStrategy,
    rank: int,
    optimizer: OptimizerState,
    precision: MixedPrecision | None = None,
    *,
    whole_optimizer: OptimizerState | None = None,
    num_reductions: int = 1,
    num_replicas: int = 1,
    reproducible: bool = False,
    device_type: str = "cpu",
    offload: Offload | None = None,
) -> dict[str, int]:
    """Resident bytes on ``rank``, by category: what `Zero.memory_bytes` counts between a backward and its step.

    Optimizer states are those after the first step. While a unit runs, its unsharded weights and gradients come on top.

    Args:
        buffers: the model's flat buffers, laid out for the world size, or for the ``shard_size`` if there is one:
            replicas hold the same state. Every trained parameter is assumed to have a gradient.
        strategy: the row of the stage table.
        rank: this rank's number among those that shard together; ranks differ in padding and in where pieces end.
        optimizer: the optimizer's state per parameter.
        precision: the dtype policy.
        whole_optimizer: the state of a second optimizer, for the buffers whose tensors are complete on one rank; None:
            there is no second optimizer.
        num_reductions: number of backwards of a step that reduce gradients; several of them need a second buffer if
            unsharded gradients accumulate, unless one rank is alone and its gradients stay on the device.
        num_replicas: the world size divided by the number of shards.
        reproducible: whether sums are exact, see `zeroshard.zero.transport.exact_sums`.
        device_type: ``"cpu"`` or ``"cuda"``. A replicated optimizer on CPUs updates parameters in pieces that end where
            shards do, and each piece has its own scalars.
        offload: which state is off the device; None: none is.
    """
    precision, buffers = precision or MixedPrecision(), list(buffers)
    away, frozen_away = buffers_away(buffers, offload), frozen_on_host(buffers, strategy, offload)
    total = {"params": 0, "grads": 0, "master": 0, "optimizer": 0}
    if offload is not None:
        total |= dict.fromkeys(_categories_away(offload), 0)
        if on_disk(offload):
            parts = file_parts(
                buffers, strategy, rank, optimizer, offload, precision=precision, whole_optimizer=whole_optimizer
            )
            total[SLOTS] = min(NUM_SLOTS, len(parts)) * max(parts, default=0)
            policies = [(b, strategy, rank, b.policy(precision), offload) for b in buffers if b.name in away]
            grads = [_grads_in_file(*each) for each in policies]
            total[SLOTS] += min(NUM_GRAD_SLOTS, len(grads)) * max(grads, default=0)
    for buffer in buffers:
        updates = (buffer.layout.keeps_tensors_whole and whole_optimizer) or optimizer
        policy = buffer.policy(precision)
        job = buffer, strategy, rank, updates, policy, device_type
        if buffer.name in away:
            assert offload is not None
            found = _away_bytes(*job, num_reductions, offload)
            if reproducible:
                found["grads"] = _wide_bytes(buffer, rank)
                found["host_grads"] = _exact_bytes(buffer, strategy, rank, policy) - found["grads"]
        else:
            found = _here_bytes(*job, num_reductions if buffer.layout.world_size * num_replicas > 1 else 1)
            if reproducible and buffer.trained:
                found["grads"] = _exact_bytes(buffer, strategy, rank, policy)
            if buffer.name in frozen_away:
                on_host = own_numel(buffer.layout, rank) * policy.compute_dtype(buffer.dtype).itemsize
                found |= {HOST["params"]: on_host, "params": found["params"] - on_host}
        for category, num_bytes in found.items():
            total[category] += num_bytes
    return total


def _here_bytes(
    buffer: Buffer,
    strategy: ShardingStrategy,
    rank: int,
    optimizer: OptimizerState,
    precision: MixedPrecision,
    device_type: str,
    num_reductions: int,
) -> dict[str, int]:
    """Bytes of a buffer whose state is on the device, by category."""
    if (codes := buffer.codes(strategy)) is not None:
        own = codes.part(rank if strategy.params is SHARD else 0)
        return {"params": own.stop - own.start}
    found = dict(zip(("params", "master"), _weight_bytes(buffer, strategy, rank, precision), strict=True))
    if buffer.trained:
        owner = rank if _shards_optim(buffer, strategy) else None
        found["grads"] = _grad_bytes(buffer, strategy, rank, precision, num_reductions)
        found["optimizer"] = _optimizer_bytes(buffer, owner, optimizer, device_type)
    return found


def buffers_away(buffers: Sequence[Buffer], offload: Offload | None) -> frozenset[str]:
    """Names of the buffers whose state is off the device: trained ones of the last units of the forward."""
    units = _units_away(buffers, offload)
    return frozenset(buffer.name for buffer in buffers if buffer.trained and buffer.unit in units)


def streamed(buffers: Sequence[Buffer], strategy: ShardingStrategy, offload: Offload | None) -> frozenset[str]:
    """Names of the buffers of which a rank's shard of the weights is off the device, from where gathers bring it."""
    if offload is None or offload.weights == "device" or strategy.params is not SHARD:
        return frozenset()
    units = _units_away(buffers, offload)
    return frozenset(buffer.name for buffer in buffers if buffer.unit in units and buffer.form is None)


def frozen_on_host(buffers: Sequence[Buffer], strategy: ShardingStrategy, offload: Offload | None) -> frozenset[str]:
    """Names of the buffers of frozen weights of which a rank's shard is on the host, from where gathers copy it up."""
    return streamed(buffers, strategy, offload) - {buffer.name for buffer in buffers if buffer.trained}


def _units_away(buffers: Sequence[Buffer], offload: Offload | None) -> frozenset[str]:
    numels: dict[str, int] = {}
    for buffer in buffers:
        numels[buffer.unit] = numels.get(buffer.unit, 0) + buffer.layout.numel
    num_away = 0 if offload is None else offload.units_away(list(numels.values()))
    return frozenset(list(numels)[len(numels) - num_away :])


def on_disk(offload: Offload | None) -> bool:
    """Whether any state goes to a rank's file."""
    return offload is not None and "disk" in (offload.optimizer, offload.master, offload.grads)


def host_bytes(resident: Mapping[str, int]) -> int:
    """Bytes in memory of the host of what left the device, of resident bytes by category."""
    return sum(resident.get(category, 0) for category in (*HOST.values(), SLOTS))


def file_parts(
    buffers: Sequence[Buffer],
    strategy: ShardingStrategy,
    rank: int,
    optimizer: OptimizerState,
    offload: Offload | None,
    *,
    precision: MixedPrecision,
    whole_optimizer: OptimizerState | None = None,
) -> list[int]:
    """Bytes of a rank's file for each buffer with state there: all are read once and written once for each step.

    Args: as `state_bytes` takes them.
    """
    if offload is None or not on_disk(offload):
        return []
    away, parts = buffers_away(buffers, offload), []
    for buffer in (buffer for buffer in buffers if buffer.name in away):
        kept = optimizer if not buffer.layout.keeps_tensors_whole or whole_optimizer is None else whole_optimizer
        num_bytes = 0
        if offload.master == "disk":
            num_bytes += extent_bytes([(_updated_numel(buffer, strategy, rank), buffer.dtype)])
        if offload.optimizer == "disk":
            pieces = _pieces(buffer, rank if _shards_optim(buffer, strategy) else None, "cpu")
            sizes = [(numel, buffer.dtype) for piece in pieces for numel in kept.sizes(piece.shape)]
            num_bytes += extent_bytes(sizes) if sizes else 0
        num_bytes += _grads_in_file(buffer, strategy, rank, buffer.policy(precision), offload)
        parts.append(num_bytes)
    return [num_bytes for num_bytes in parts if num_bytes]


def _grads_in_file(
    buffer: Buffer, strategy: ShardingStrategy, rank: int, precision: MixedPrecision, offload: Offload
) -> int:
    if offload.grads != "disk":
        return 0
    return extent_bytes([(_updated_numel(buffer, strategy, rank), precision.reduced_dtype(buffer.dtype))])


def sends_master(
    buffer: Buffer, strategy: ShardingStrategy, precision: MixedPrecision, offload: Offload, device_type: str
) -> bool:
    """Whether the master on the host is what is gathered: [Note: Host and device in one] in `host_params`."""
    encoded = _shards_optim(buffer, strategy) and _has_format(buffer, precision)
    as_it_is = precision.compute_dtype(buffer.dtype) == buffer.dtype and not encoded
    return as_it_is and device_type == "cpu" and offload.weights == "device" and offload.master != "disk"


def watch_bytes(
    buffers: Sequence[Buffer],
    strategy: ShardingStrategy,
    precision: MixedPrecision,
    offload: Offload | None,
    device_type: str,
) -> int:
    """Bytes of the sums by which writes into unsharded weights are found if their master is elsewhere."""
    away, freed = buffers_away(buffers, offload), streamed(buffers, strategy, offload)
    kept = (b for b in buffers if strategy.params is not SHARD or b.layout.world_size == 1)
    whole = [b for b in kept if b.name in away and b.name not in freed]
    if offload is not None:
        whole = [b for b in whole if not sends_master(b, strategy, b.policy(precision), offload, device_type)]
    widths = [b.policy(precision).compute_dtype(b.dtype).itemsize for b in whole]
    return sum(bit_sums_bytes(b.layout.padded_numel * width) for b, width in zip(whole, widths, strict=True))


def _away_bytes(
    buffer: Buffer,
    strategy: ShardingStrategy,
    rank: int,
    optimizer: OptimizerState,
    precision: MixedPrecision,
    device_type: str,
    num_reductions: int,
    offload: Offload,
) -> dict[str, int]:
    """Bytes of a buffer whose state is off the device, by category."""
    layout, compute = buffer.layout, precision.compute_dtype(buffer.dtype)
    found = dict.fromkeys(("params", "grads", *_categories_away(offload)), 0)
    alone, here = layout.world_size == 1, sends_master(buffer, strategy, precision, offload, device_type)
    whole = strategy.params is not SHARD or (alone and offload.weights == "device")
    if whole:
        found["params"] = layout.padded_numel * compute.itemsize
    else:
        if strategy.secondary_shard_size is not None:
            found["params"] = _copy_bytes(buffer, precision) // strategy.secondary_shard_size
        if (alone or not _has_format(buffer, precision)) and offload.weights != "disk" and not here:
            found["host_params" if offload.weights == "host" else "params"] += (
                own_numel(layout, rank) * compute.itemsize
            )
    masters = DISK if offload.master == "disk" else HOST
    if not (whole and here):
        found[masters["master"]] = _updated_numel(buffer, strategy, rank) * buffer.dtype.itemsize
    reduced = _updated_numel(buffer, strategy, rank) * precision.reduced_dtype(buffer.dtype).itemsize
    if offload.grads == "disk":
        found["disk_grads"] = reduced
    elif device_type == "cpu":  # they stay where they are, which is on the host: all but a local sum of its own
        both = _grad_bytes(buffer, strategy, rank, precision, num_reductions)
        local = layout.padded_numel * precision.gradient_dtype(buffer.dtype).itemsize
        found["grads"] = local if both == local + reduced and not _shards_grads(buffer, strategy) else 0
        found["host_grads"] = both - found["grads"]
    else:
        found["host_grads"] = reduced
    owner = rank if _shards_optim(buffer, strategy) else None
    found[HOST["optimizer"]] = _optimizer_bytes(buffer, owner, optimizer, "cpu")
    if offload.optimizer == "disk":
        scalars = len(_pieces(buffer, owner, "cpu")) * optimizer.num_scalars * SCALAR_BYTES
        found[DISK["optimizer"]] = found[HOST["optimizer"]] - scalars
        found[HOST["optimizer"]] = scalars
    return found


def _categories_away(offload: Offload) -> list[str]:
    """The categories of state that is off the device, without that through which it goes."""
    found = [HOST[kind] for kind in HOST if kind in ("params", "optimizer") or getattr(offload, kind) != "disk"]
    return found + [DISK[kind] for kind in DISK if getattr(offload, kind) == "disk"]


def _weight_bytes(buffer: Buffer, strategy: ShardingStrategy, rank: int, precision: MixedPrecision) -> tuple[int, int]:
    """Bytes of a buffer's weights, and of its master weights if they have another dtype."""
    layout = buffer.layout
    shard_params, shard_optim = strategy.params is SHARD and layout.world_size > 1, _shards_optim(buffer, strategy)
    compute = precision.compute_dtype(buffer.dtype)
    master = buffer.dtype if buffer.trained else compute
    numel, weights = own_numel(layout, rank), 0
    if not shard_params:
        weights += layout.padded_numel * compute.itemsize
    elif strategy.secondary_shard_size is not None:
        weights += _copy_bytes(buffer, precision) // strategy.secondary_shard_size
    if compute != master:
        return weights, _updated_numel(buffer, strategy, rank) * master.itemsize
    if shard_params or (shard_optim and _has_format(buffer, precision)):
        weights += numel * master.itemsize
    return weights, 0


def _shards_optim(buffer: Buffer, strategy: ShardingStrategy) -> bool:
    return strategy.optim is SHARD and buffer.layout.world_size > 1


def _updated_numel(buffer: Buffer, strategy: ShardingStrategy, rank: int) -> int:
    """Elements of a buffer, padding included, that the optimizer of ``rank`` updates."""
    layout = buffer.layout
    return own_numel(layout, rank) if _shards_optim(buffer, strategy) else layout.padded_numel


def _has_format(buffer: Buffer, precision: MixedPrecision) -> bool:
    """Whether weights are sent in a wire format; if so, the weights that compute are not a view of the master."""
    return precision.weights_format(buffer.dtype) is not None


def _copy_bytes(buffer: Buffer, precision: MixedPrecision) -> int:
    """Bytes that an all-gather between nodes receives for a buffer; each rank keeps a part of them as a second copy."""
    layout, form = buffer.layout, precision.weights_format(buffer.dtype)
    if form is None:
        return layout.padded_numel * precision.compute_dtype(buffer.dtype).itemsize
    return layout.world_size * form.num_bytes(layout.shard_numel)


def ema_bytes(buffers: Iterable[Buffer], strategy: ShardingStrategy, rank: int) -> int:
    """Resident bytes on ``rank`` of a moving average of the weights that its optimizer updates, without padding."""
    total = 0
    for buffer in buffers:
        layout = buffer.layout
        sharded = strategy.optim is SHARD and layout.world_size > 1
        numel = sum(piece.numel for piece in layout.owned(rank)) if sharded else layout.numel
        total += numel * buffer.dtype.itemsize
    return total


def _shards_grads(buffer: Buffer, strategy: ShardingStrategy) -> bool:
    return strategy.grads is SHARD and buffer.layout.world_size > 1


def _grad_bytes(
    buffer: Buffer, strategy: ShardingStrategy, rank: int, precision: MixedPrecision, num_reductions: int
) -> int:
    reduce_dtype, reduced_dtype = precision.gradient_dtype(buffer.dtype), precision.reduced_dtype(buffer.dtype)
    reduced = _updated_numel(buffer, strategy, rank) * reduced_dtype.itemsize
    if _shards_grads(buffer, strategy):
        return reduced
    own_memory = num_reductions > 1 or reduce_dtype != reduced_dtype
    return buffer.layout.padded_numel * reduce_dtype.itemsize + (reduced if own_memory else 0)


def _exact_bytes(buffer: Buffer, strategy: ShardingStrategy, rank: int, precision: MixedPrecision) -> int:
    """Bytes of exact sums: those of `_wide_bytes`, and the rounded sum that the optimizer reads."""
    rounded = _updated_numel(buffer, strategy, rank) * precision.reduced_dtype(buffer.dtype).itemsize
    return rounded + _wide_bytes(buffer, rank)


def _wide_bytes(buffer: Buffer, rank: int) -> int:
    """Bytes of two float64 per element of a rank's shard."""
    return own_numel(buffer.layout, rank) * 2 * (16 if buffer.dtype.is_complex else 8)


def _optimizer_bytes(buffer: Buffer, rank: int | None, optimizer: OptimizerState, device_type: str) -> int:
    """Bytes of optimizer state for a buffer; ``rank`` None: the optimizer is replicated."""
    layout = buffer.layout
    if (
        rank is None and not layout.keeps_tensors_whole and device_type == "cpu"
    ):  # computed without a loop over all ranks
        shard_numel = max(layout.part_numel, 1)
        slots = [slot for slot in layout.slots if slot.numel]
        num_pieces = sum(
            (slot.offset + slot.numel - 1) // shard_numel - slot.offset // shard_numel + 1 for slot in slots
        )
        num_bytes = sum(optimizer.num_bytes((slot.numel,), buffer.dtype.itemsize) for slot in slots)
        return num_bytes + num_pieces * optimizer.num_scalars * SCALAR_BYTES
    pieces = _pieces(buffer, rank, device_type)
    num_bytes = sum(optimizer.num_bytes(piece.shape, buffer.dtype.itemsize) for piece in pieces)
    return num_bytes + len(pieces) * optimizer.num_scalars * SCALAR_BYTES


def _pieces(buffer: Buffer, rank: int | None, device_type: str) -> Sequence[Piece]:
    """The pieces that the optimizer of ``rank`` updates; None: of a replicated one."""
    layout = buffer.layout
    if rank is None and (device_type != "cpu" or layout.keeps_tensors_whole):
        return tuple(layout.pieces(0, layout.padded_numel))
    ranks = range(layout.world_size) if rank is None else [rank]
    return tuple(piece for each in ranks for piece in layout.owned(each))
