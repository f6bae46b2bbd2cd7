"""`zeroshard` on a CPU without instructions for bf16: products in fp32, each rounded to bf16 once, as a GPU gives them.

    python benchmarks/study/wide_products.py train --optimizer flash-adamw ...

Such a CPU multiplies matrices in bf16 some 80 times slower than in fp32 (0.8 against 67 GFLOP/s on an AMD EPYC with
AVX2). A GPU accumulates products of bf16 in fp32 and rounds the sum; so does this, at the cost of a cast. Attention is
computed in fp32 as a whole, where a GPU's kernel rounds the probabilities before they meet the values. One rank only.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zeroshard.cli import main

_aten = torch.ops.aten
PRODUCTS = {  # with how many of their results are in the dtype of the operands
    _aten.mm.default: 1,
    _aten.addmm.default: 1,
    _aten.bmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 1,  # the other one, sums of exponentials, is fp32
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}


class WideProducts(TorchDispatchMode):
    """Operations of `PRODUCTS` whose first operand is in bf16 compute in fp32 and give bf16."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        wide = tree_map_only(torch.Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, (args, kwargs))
        found = func(*wide[0], **wide[1])
        if isinstance(found, torch.Tensor):
            return found.bfloat16()
        num_rounded = PRODUCTS[func]
        return (*(each.bfloat16() for each in found[:num_rounded]), *found[num_rounded:])


if __name__ == "__main__":
    with WideProducts():
        sys.exit(main())
