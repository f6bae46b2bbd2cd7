"""The sum of squares of a flat shard in one pass, for the global gradient norm.

Two stages in a fixed order: up to `MAX_PROGRAMS` programs each sum their blocks, per lane in fp32, then over lanes in
fp64; one program adds the programs' sums. So the bits do not depend on the device's number of multiprocessors. A lane
adds numel / (1024 x 4096) squares, a few hundred for billions of elements: the relative error stays below 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.kernels.checks import check_floating
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.kernels.launch import accumulator, jit, opaque, tl

BLOCK = 4096
MAX_PROGRAMS = 1024

# ---------------------------------------------------------------------------------------------------- reference


def sum_of_squares_reference(flat: Tensor) -> Tensor:
    """`sum_of_squares` in PyTorch, in float64 throughout."""
    return torch.linalg.vector_norm(flat, dtype=torch.float64).square()


# ------------------------------------------------------------------------------------------------------ kernels


@jit
def _partial_sums(flat_ptr, sums_ptr, numel, num_blocks, BLOCK: tl.constexpr, ACC: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), ACC)
    for block in range(program, num_blocks, tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        if block * BLOCK + BLOCK <= numel:  # a full block needs no mask, and its loads are vectors
            x = tl.load(flat_ptr + offsets).to(ACC)
            total += x * x
        else:
            x = tl.load(flat_ptr + offsets, mask=offsets < numel, other=0.0).to(ACC)
            total += x * x
    tl.store(sums_ptr + program, tl.sum(total.to(tl.float64), axis=0))


@jit
def _add_sums(sums_ptr, out_ptr, num_sums, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(sums_ptr + offsets, mask=offsets < num_sums, other=0.0), axis=0))


# ---------------------------------------------------------------------------------------------------- launchers


@opaque("sum_of_squares", "out")
def _launch(flat: Tensor, out: Tensor) -> None:
    """flat [numel] contiguous; out 0-dim float64."""
    num_blocks = -(-flat.numel() // BLOCK)  # the kernel's 32-bit arithmetic would overflow for numel just below 2^31
    num_programs = min(MAX_PROGRAMS, num_blocks)
    sums = torch.empty(num_programs, dtype=torch.float64, device=flat.device)
    sizes, acc = (flat.numel(), num_blocks), accumulator(flat.dtype)
    _partial_sums[(num_programs,)](flat, sums, *sizes, BLOCK=BLOCK, ACC=acc, num_warps=8)
    _add_sums[(1,)](sums, out, num_programs, BLOCK=MAX_PROGRAMS)


# ------------------------------------------------------------------------------------------------------- public


@torch.no_grad()
def sum_of_squares(flat: Tensor, *, kernels: Choice | None = None) -> Tensor:
    """Return the sum of the squares of all elements, with the same bits each time.

    Args:
        flat: contiguous, any shape, fp16, bf16, fp32 or fp64.
        kernels: backend; see `zeroshard.kernels.use_kernels`.

    Returns:
        0-dim, float64, on the same device: the host does not wait for it.

    Raises:
        ValueError: an invalid argument; the message begins with its name.
    """
    check_floating("flat", flat)
    if not flat.is_contiguous():
        raise ValueError(f"flat: strides {flat.stride()} leave gaps; give a contiguous tensor")
    if choose("sum_of_squares", flat.device, kernels) == "reference":
        return sum_of_squares_reference(flat)
    if not flat.numel():
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    out = torch.empty((), dtype=torch.float64, device=flat.device)
    _launch(flat, out)
    return out
