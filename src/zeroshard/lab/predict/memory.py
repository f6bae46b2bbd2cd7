"""Computes the bytes of training state on a rank from shapes and a row of the stage table.

With N elements of a buffer, padded to P = W * S for W shards of S elements, and itemsizes c (compute), m (master), g
(reduction), h (reduced gradients: m, or g if that is bfloat16):

    params      unsharded P c; sharded S m if compute and master have the same dtype, else nothing between uses
                at stages 1 and 2 with a wire format, S m more if compute and master have the same dtype
                P c / n more for a second copy over n ranks, or W q(S) / n with a wire format in which a shard has
                q(S) bytes
    master      P m or S m by the `optim` column if compute has another dtype and the parameters are trained; else 0,
                because the weights are the master
    grads       sharded S h; unsharded P g, and the reduced gradients that the optimizer reads if they are not a view
    optimizer   state per element of the pieces that the rank owns, without padding; and scalars per piece

If an optimizer needs every tensor complete on one rank, S is the longest shard, and P may be much larger than N.

Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054, section 3.1: the 16 bytes for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from zeroshard.lab.predict.buffers import Buffer
from zeroshard.zero import MixedPrecision, ShardingStrategy
from zeroshard.zero.core.strategy import SHARD

SCALAR_BYTES = 4  # torch keeps a parameter's step count as one fp32 number


@dataclass(frozen=True)
class OptimizerState:
    """The state that an optimizer keeps for a parameter, in its master's dtype.

    Attributes:
        num_per_element: number of tensors as large as the parameter.
        num_scalars: number of scalars.
        factored: whether, for a parameter of two dimensions or more, the last of those tensors is replaced by two
            smaller ones, without the last and without the last but one dimension (Shazeer and Stern 2018, Adafactor,
            https://arxiv.org/abs/1804.04235, section 3).
    """

    num_per_element: int
    num_scalars: int = 0
    factored: bool = False

    def numel(self, shape: tuple[int, ...]) -> int:
        """Elements of state, without scalars, for a parameter or piece of ``shape``."""
        numel = math.prod(shape)
        if not self.factored or len(shape) < 2:
            return self.num_per_element * numel
        return (self.num_per_element - 1) * numel + numel // shape[-1] + numel // shape[-2]


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
    # Chen et al. 2023, https://arxiv.org/abs/2302.06675: only momentum.
    "Lion": OptimizerState(1),
}


def state_bytes(
    buffers: Iterable[Buffer],
    strategy: ShardingStrategy,
    rank: int,
    optimizer: OptimizerState,
    precision: MixedPrecision | None = None,
    *,
    whole_optimizer: OptimizerState | None = None,
    num_reductions: int = 1,
    reproducible: bool = False,
    device_type: str = "cpu",
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
            unsharded gradients accumulate.
        reproducible: whether sums are exact, see `zeroshard.zero.transport.exact_sums`.
        device_type: ``"cpu"`` or ``"cuda"``. A replicated optimizer on CPUs updates parameters in pieces that end where
            shards do, and each piece has its own scalars.
    """
    precision = precision or MixedPrecision()
    total = {"params": 0, "grads": 0, "master": 0, "optimizer": 0}
    for buffer in buffers:
        weights, masters = _weight_bytes(buffer, strategy, rank, precision)
        total["params"] += weights
        total["master"] += masters
        if buffer.trained:
            if reproducible:
                total["grads"] += _exact_bytes(buffer, strategy, rank, precision)
            else:
                total["grads"] += _grad_bytes(buffer, strategy, rank, precision, num_reductions)
            kept = optimizer if not buffer.layout.keeps_tensors_whole or whole_optimizer is None else whole_optimizer
            owner = rank if _shards_optim(buffer, strategy) else None
            total["optimizer"] += _optimizer_bytes(buffer, owner, kept, device_type)
    return total


def _weight_bytes(buffer: Buffer, strategy: ShardingStrategy, rank: int, precision: MixedPrecision) -> tuple[int, int]:
    """Bytes of a buffer's weights, and of its master weights if they have another dtype."""
    layout = buffer.layout
    shard_params, shard_optim = strategy.params is SHARD and layout.world_size > 1, _shards_optim(buffer, strategy)
    compute = precision.compute_dtype(buffer.dtype)
    master = buffer.dtype if buffer.trained else compute
    own_numel, weights = layout.own_numel(rank), 0
    if not shard_params:
        weights += layout.padded_numel * compute.itemsize
    elif strategy.secondary_shard_size is not None:
        weights += _copy_bytes(buffer, precision) // strategy.secondary_shard_size
    if compute != master:
        return weights, _updated_numel(buffer, strategy, rank) * master.itemsize
    if shard_params or (shard_optim and _has_format(buffer, precision)):
        weights += own_numel * master.itemsize
    return weights, 0


def _shards_optim(buffer: Buffer, strategy: ShardingStrategy) -> bool:
    return strategy.optim is SHARD and buffer.layout.world_size > 1


def _updated_numel(buffer: Buffer, strategy: ShardingStrategy, rank: int) -> int:
    """Elements of a buffer, padding included, that the optimizer of ``rank`` updates."""
    layout = buffer.layout
    return layout.own_numel(rank) if _shards_optim(buffer, strategy) else layout.padded_numel


def _has_format(buffer: Buffer, precision: MixedPrecision) -> bool:
    """Whether weights are sent in a wire format; if so, the weights that compute are not a view of the master."""
    return not buffer.exact and precision.weights_format(buffer.dtype) is not None


def _copy_bytes(buffer: Buffer, precision: MixedPrecision) -> int:
    """Bytes that an all-gather between nodes receives for a buffer; each rank keeps a part of them as a second copy."""
    layout, form = buffer.layout, precision.weights_format(buffer.dtype)
    if buffer.exact or form is None:
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
    """Bytes of exact sums: two float64 per element of a rank's shard, and the rounded sum that the optimizer reads."""
    reduced_dtype = precision.reduced_dtype(buffer.dtype)
    wide_bytes = 16 if buffer.dtype.is_complex else 8
    rounded = _updated_numel(buffer, strategy, rank) * reduced_dtype.itemsize
    return rounded + buffer.layout.own_numel(rank) * 2 * wide_bytes


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
        num_bytes = sum(optimizer.numel((slot.numel,)) for slot in slots) * buffer.dtype.itemsize
        return num_bytes + num_pieces * optimizer.num_scalars * SCALAR_BYTES
    if rank is None and (device_type != "cpu" or layout.keeps_tensors_whole):
        pieces = layout.tensors()
    else:
        ranks = range(layout.world_size) if rank is None else [rank]
        pieces = tuple(piece for each in ranks for piece in layout.owned(each))
    num_bytes = sum(optimizer.numel(piece.shape) for piece in pieces) * buffer.dtype.itemsize
    return num_bytes + len(pieces) * optimizer.num_scalars * SCALAR_BYTES
