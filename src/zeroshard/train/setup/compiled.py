"""`torch.compile` of a model's blocks, with every strategy.

A block's ``forward`` is compiled, not its ``__call__``. So a strategy's hooks on the block (unshard, reshard) run
eagerly outside the graph, which contains only the model. All blocks share one graph for training and one for
evaluation, because weights are inputs of the graph. With ``fullgraph`` a graph break is an error instead of a slow run.
If ranks share sequences, attention is not compiled: a block is the graph before it and the graph after it. Torch's
compiler does not cut a recomputation in two, so that one then runs these graphs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from zeroshard.errors import UserError
from zeroshard.models.recompute import change_forward, change_recomputed
from zeroshard.train.config.config import CompileBackend


def compile_blocks(
    blocks: Iterable[nn.Module], backend: CompileBackend, device: torch.device, *, fullgraph: bool = True
) -> None:
    """Replace each block's ``forward`` by one that is compiled at its first call.

    ``fullgraph``: whether a block must be one graph.

    Raises:
        UserError: ``inductor`` lacks a compiler that it needs for its kernels.
    """
    if backend == "inductor":
        require_compiler(device)
    change = change_forward if fullgraph else change_recomputed
    for block in blocks:
        change(block, partial(torch.compile, backend=backend, fullgraph=fullgraph))


def require_compiler(device: torch.device) -> None:
    """Raise UserError now, rather than at the first step, if `inductor` cannot compile kernels for ``device``."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    todo = "use --no-compile or --compile-backend aot_eager"
    if device.type == "cuda" and not has_triton():
        raise UserError(
            "compile", "kernels for CUDA are written in Triton, which is not here", f"install it, or {todo}"
        )
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError("compile", "no C++ compiler works here", f"install g++ or name one in CXX, or {todo}") from None
