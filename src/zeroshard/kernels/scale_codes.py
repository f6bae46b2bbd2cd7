"""Scales of blocks as codes of 8 bits: what they differ from their mean by, in groups of 256 that share a scale.

QLoRA's double quantisation (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, section 3) of the scales of
`zeroshard.kernels.block_formats`: 9 bits a block in place of 32. The codes are those of the dynamic tree data type
(Dettmers 2016, https://arxiv.org/abs/1511.04561): a sign, an exponent in unary, and the bits that are left as a linear
fraction, so that numbers near zero have a small error of their own.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from zeroshard.settings.wire_formats import SCALES_IN_GROUP

_SMALLEST = 1e-38  # of the largest magnitude in a group, so that its reciprocal is finite


def encode(scales: Tensor, head: Tensor, codes: Tensor) -> None:
    """Write ``head [1 + ceil(n / 256)]`` fp32 (the mean, then each group's largest magnitude) and ``codes [n]`` uint8.

    scales: ``[n]`` fp32.
    """
    mean = scales.mean()
    left = torch.zeros(_whole(len(scales)), device=scales.device)
    torch.sub(scales, mean, out=left[: len(scales)])
    groups = left.view(-1, SCALES_IN_GROUP)
    largest = groups.abs().amax(1, keepdim=True)
    head[0], head[1:] = mean, largest.view(-1)
    halfway = tree_numbers(scales.device)
    halfway = (halfway[:-1] + halfway[1:]) / 2
    found = torch.bucketize(groups * largest.clamp(min=_SMALLEST).reciprocal(), halfway, out_int32=True)
    codes.copy_(found.view(-1)[: len(scales)])


def decode(head: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the scales ``[n]`` fp32 that ``head`` and ``codes`` stand for."""
    of_groups = head[1:].repeat_interleave(SCALES_IN_GROUP)[: len(codes)]
    torch.mul(tree_numbers(codes.device)[codes.int()], of_groups, out=scales)
    scales.add_(head[0])


def _whole(num_scales: int) -> int:
    return -(-num_scales // SCALES_IN_GROUP) * SCALES_IN_GROUP


@cache
def tree_numbers(device: torch.device) -> Tensor:
    """Return the 256 numbers of the dynamic tree data type between -1 and 1, ascending, ``[256]`` fp32."""
    positive: list[float] = []
    for bits in range(7):  # of the fraction; the exponent has the others
        edges = torch.linspace(0.1, 1, 2**bits + 1)
        positive += (10.0 ** (bits - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    numbers = [0.0, 1.0, *positive, *(-number for number in positive)]
    return torch.tensor(sorted(numbers), device=device)
