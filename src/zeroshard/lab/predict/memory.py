"""Bytes of training state on a rank, from shapes and a row of the stage table alone.

With N elements of a buffer, padded to P = W * S, and itemsizes c (compute), m (master), g (reduction), h (reduced
gradients: m, or g where that is bfloat16):

    params      P c, whole;  S m, sharded, where c is m's dtype, and else nothing between uses; both where weights
                travel in a wire format and c is m's dtype;  S c more where differences travel;  P c / n of a second
                copy over n ranks, W q(S) / n of a packed one
    master      P m or S m by the `optim` column, where compute has another dtype and they are trained; else the weights
    grads       S h, sharded;  P g, whole, and what the optimizer sees beside it where that is no view of it
    optimizer   per element of the pieces that the rank owns, without padding; and scalars per piece

Where an optimizer needs whole tensors, S is the longest shard, and P may be much more than N.

Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054, section 3.1: the 16 bytes for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from zeroshard.lab.predict.buffers import Buffer
from zeroshard.zero import MixedPrecision, ShardingStrategy
from zeroshard.zero.strategy import SHARD

SCALAR_BYTES = 4  # torch keeps a parameter's step count as one fp32 number


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer remembers of a parameter, in its master's dtype.

    Attributes:
        num_per_element: tensors as large as the parameter.
        num_scalars: single numbers.
        factored: whether the last of those tensors is kept as two, with the last dimension and the last but one gone,
            where the parameter has two dimensions or more (Shazeer and Stern 2018, Adafactor,
            https://arxiv.org/abs/1804.04235, section 3).
        bits: of an element of those tensors where they are quantised in blocks; 0: they have the master's dtype.
        block: elements that share a scale of 4 bytes.
        least_quantised: elements of the smallest parameter that is quantised.
    """

    num_per_element: int
    num_scalars: int = 0
    factored: bool = False
    bits: int = 0
    block: int = 256
    least_quantised: int = 4096

    def numel(self, shape: tuple[int, ...]) -> int:
        """Elements, without scalars, for a parameter or piece of ``shape``."""
        numel = math.prod(shape)
        if not self.factored or len(shape) < 2:
            return self.num_per_element * numel
        return (self.num_per_element - 1) * numel + numel // shape[-1] + numel // shape[-2]

    def num_bytes(self, shape: tuple[int, ...], itemsize: int, of: int | None = None) -> int:
        """Bytes, without scalars, for a parameter or piece of ``shape`` whose master has ``itemsize`` bytes each.

        ``of``: elements of the parameter that it is a piece of; None: it is all of it.
        """
        numel = math.prod(shape)
        if not self.bits or (numel if of is None else of) < self.least_quantised:
            return self.numel(shape) * itemsize
        return self.num_per_element * (-(-numel * self.bits // 8) + 4 * -(-numel // self.block))

    def bytes_per_element(self, itemsize: int) -> float:
        """Of a large parameter, on average."""
        each = self.bits / 8 + 4 / self.block if self.bits else itemsize
        return self.num_per_element * each


OPTIMIZER_STATES: dict[str, OptimizerState] = {
    "AdamW": OptimizerState(2, 1),
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
    # Chen et al. 2023, https://arxiv.org/abs/2302.06675: momentum alone.
    "Lion": OptimizerState(1),
    # Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861; blocks and
    # the smallest parameter as in bitsandbytes (blocksize 256, min_8bit_size 4096) and in torchao (4 bits: 128).
    "AdamW8bit": OptimizerState(2, 1, bits=8),
    "AdamW4bit": OptimizerState(2, 1, bits=4, block=128),
}
QUANTISED = tuple(name for name, state in OPTIMIZER_STATES.items() if state.bits)


def state_bytes(
    buffers: Iterable[Buffer],
    strategy: ShardingStrategy,
    rank: int,
    optimizer: OptimizerState,
    precision: MixedPrecision | None = None,
    *,
    whole_optimizer: OptimizerState | None = None,
    num_reductions: int = 1,
    leaves: bool = False,
    device_type: str = "cpu",
) -> dict[str, int]:
    """Resident bytes on ``rank``, by category: what `Zero.memory_bytes` counts between a backward and its step.

    Optimizer states are those after the first step. While a unit runs, its full weights and gradients come on top.

    Args:
        buffers: of the model, laid out for the world size in question, or the ``shard_size`` where there is one:
            replicas hold the same. Every trained parameter has a gradient.
        strategy: the row.
        rank: which, among those that shard together; ranks differ where padding and borders of parameters fall.
        optimizer: what it keeps.
        precision: the dtype policy.
        whole_optimizer: what another one keeps, of the buffers that keep tensors whole; None: there is no other.
        num_reductions: how many backwards of a step reduced their gradients; several, where whole gradients
            accumulate, need a second buffer.
        leaves: whether sums are exact, see `zeroshard.zero.buffers.leaves`.
        device_type: ``"cpu"`` or ``"cuda"``: where the optimizer is replicated, parameters are cut at shards on CPUs
            only, and each piece has scalars of its own.
    """
    precision = precision or MixedPrecision()
    total = {"params": 0, "grads": 0, "master": 0, "optimizer": 0}
    for buffer in buffers:
        weights, masters = _weight_bytes(buffer, strategy, rank, precision)
        total["params"] += weights
        total["master"] += masters
        if buffer.trained:
            if leaves:
                total["grads"] += _exact_bytes(buffer, strategy, rank, precision)
            else:
                total["grads"] += _grad_bytes(buffer, strategy, rank, precision, num_reductions)
            kept = optimizer if buffer.layout.longest is None or whole_optimizer is None else whole_optimizer
            owner = rank if _shards_optim(buffer, strategy) else None
            total["optimizer"] += _optimizer_bytes(buffer, owner, kept, device_type)
    return total


def _weight_bytes(buffer: Buffer, strategy: ShardingStrategy, rank: int, precision: MixedPrecision) -> tuple[int, int]:
    """Of a buffer's weights, and of its masters where these have another dtype than the weights."""
    layout = buffer.layout
    shard_params, shard_optim = strategy.params is SHARD and layout.world_size > 1, _shards_optim(buffer, strategy)
    compute = precision.compute_dtype(buffer.dtype)
    master = buffer.dtype if buffer.trained else compute
    own_numel, weights = layout.own_numel(rank), 0
    if not shard_params:
        weights += layout.padded_numel * compute.itemsize
    elif strategy.secondary_shard_size is not None:
        weights += _copy_bytes(buffer, precision) // strategy.secondary_shard_size
    if shard_optim and _has_format(buffer, precision) and precision.gathers_differences:
        weights += own_numel * compute.itemsize
    if compute != master:
        return weights, _updated_numel(buffer, strategy, rank) * master.itemsize
    if shard_params or (shard_optim and _has_format(buffer, precision)):
        weights += own_numel * master.itemsize
    return weights, 0


def _shards_optim(buffer: Buffer, strategy: ShardingStrategy) -> bool:
    return strategy.optim is SHARD and buffer.layout.world_size > 1


def _updated_numel(buffer: Buffer, strategy: ShardingStrategy, rank: int) -> int:
    """Elements of a buffer, with padding, that the optimizer of ``rank`` updates."""
    layout = buffer.layout
    return layout.own_numel(rank) if _shards_optim(buffer, strategy) else layout.padded_numel


def _has_format(buffer: Buffer, precision: MixedPrecision) -> bool:
    """Whether the weights travel in a wire format: what computes is then no view of the masters."""
    return not buffer.exact and precision.weights_format(buffer.dtype) is not None


def _copy_bytes(buffer: Buffer, precision: MixedPrecision) -> int:
    """What a gather between nodes brings of a buffer, of which a second copy keeps a part."""
    layout, form = buffer.layout, precision.weights_format(buffer.dtype)
    if buffer.exact or form is None:
        return layout.padded_numel * precision.compute_dtype(buffer.dtype).itemsize
    return layout.world_size * form.num_bytes(layout.shard_numel)


def ema_bytes(buffers: Iterable[Buffer], strategy: ShardingStrategy, rank: int) -> int:
    """Resident bytes on ``rank`` of a moving average: one number for each that the optimizer updates, unpadded."""
    total = 0
    for buffer in buffers:
        layout = buffer.layout
        sharded = strategy.optim is SHARD and layout.world_size > 1
        numel = sum(piece.numel for piece in layout.owned(rank)) if sharded else layout.numel
        total += numel * buffer.dtype.itemsize
    return total


def _grad_bytes(
    buffer: Buffer, strategy: ShardingStrategy, rank: int, precision: MixedPrecision, num_reductions: int
) -> int:
    reduce_dtype, reduced_dtype = precision.gradient_dtype(buffer.dtype), precision.reduced_dtype(buffer.dtype)
    reduced = _updated_numel(buffer, strategy, rank) * reduced_dtype.itemsize
    if strategy.grads is SHARD and buffer.layout.world_size > 1:
        return reduced
    own_memory = num_reductions > 1 or reduce_dtype != reduced_dtype
    return buffer.layout.padded_numel * reduce_dtype.itemsize + (reduced if own_memory else 0)


def _exact_bytes(buffer: Buffer, strategy: ShardingStrategy, rank: int, precision: MixedPrecision) -> int:
    """Two float64 for each element of a rank's shard, and what they are rounded to, where the optimizer reads it."""
    reduced_dtype = precision.reduced_dtype(buffer.dtype)
    wide_bytes = 16 if buffer.dtype.is_complex else 8
    rounded = _updated_numel(buffer, strategy, rank) * reduced_dtype.itemsize
    return rounded + buffer.layout.own_numel(rank) * 2 * wide_bytes


def _optimizer_bytes(buffer: Buffer, rank: int | None, optimizer: OptimizerState, device_type: str) -> int:
    """``rank`` None: replicated."""
    layout = buffer.layout
    if rank is None and layout.longest is None and device_type == "cpu":  # without a loop over the world
        shard_numel = max(layout.part_numel, 1)
        slots = [slot for slot in layout.slots if slot.numel]
        num_pieces = sum(
            (slot.offset + slot.numel - 1) // shard_numel - slot.offset // shard_numel + 1 for slot in slots
        )
        num_bytes = sum(optimizer.num_bytes((slot.numel,), buffer.dtype.itemsize) for slot in slots)
        return num_bytes + num_pieces * optimizer.num_scalars * SCALAR_BYTES
    if rank is None and (device_type != "cpu" or layout.longest is not None):
        pieces = layout.tensors()
    else:
        ranks = range(layout.world_size) if rank is None else [rank]
        pieces = tuple(piece for each in ranks for piece in layout.owned(each))
    slots, itemsize = layout.slots, buffer.dtype.itemsize
    num_bytes = sum(optimizer.num_bytes(piece.shape, itemsize, slots[piece.slot].numel) for piece in pieces)
    return num_bytes + len(pieces) * optimizer.num_scalars * SCALAR_BYTES
