"""Memory that an operation on a GPU allocates and frees inside itself, and that no trace of its tensors shows.

    attention, backward     the gradient of queries in fp32, in which blocks of keys add up
    sum over rows           partial sums of all thread blocks: 1 MiB for each multiprocessor if rows are many

Biases' gradients are such sums: with GPT-2 124M and 8 rows of 1,024 tokens, the partial sums of one are 132 MiB of an
H100, more than a block's own temporaries.

Dao 2023, FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.1; cuDNN's kernels do the same. PyTorch,
``aten/src/ATen/native/cuda/Reduce.cuh``, ``setReduceConfig`` and ``global_memory_size``.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.lab.predict.work import Work

NUM_MULTIPROCESSORS = 132  # of an H100 and an H200; an A100 has 108, a B200 148
THREADS = 2048  # of a multiprocessor
VECTOR, WARP, WARPS = 4, 32, 4  # outputs of a thread; a thread block has 32 x 4 threads
LEAST_VALUES, MOST_VALUES = 16, 256  # that a thread adds up


def scratch_bytes(work: Work, func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a call of the operator ``func`` allocates for its duration, beside its results."""
    if work.attention and work.backward:
        heads, queries, _, width = work.shape
        return 4 * heads * queries * width
    if func is torch.ops.aten.sum.dim_IntList and args[0].is_floating_point():
        width = args[0].shape[-1] if args[0].dim() else 1
        dims = {dim % args[0].dim() for dim in args[1] or range(args[0].dim())}
        if dims == set(range(args[0].dim() - 1)):
            return sum_over_rows_bytes(args[0].numel() // max(width, 1), width)
    return 0


def sum_over_rows_bytes(rows: int, width: int) -> int:
    """Bytes of partial sums, in fp32, of ``width`` sums over ``rows`` numbers each; 0 if one thread block adds them."""
    if width % VECTOR or width < VECTOR * WARP:
        return 0
    values = -(-rows // WARPS)  # of a thread, before the rows are split over thread blocks
    grid = -(-width // (VECTOR * WARP))
    most = NUM_MULTIPROCESSORS * THREADS // (WARP * WARPS)  # thread blocks at the same time
    if values < MOST_VALUES or grid > most:
        return 0
    blocks = max(min(-(-most // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return 4 * width * blocks * WARP * VECTOR if blocks > 1 else 0
