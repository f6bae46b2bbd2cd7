"""`torch.compile` of a model's blocks, with every strategy.

A block's ``forward`` is compiled, not its call: what a strategy hooks on the block (gathering weights, freeing them)
runs eagerly outside of the graph, and inside of it there is only the model. All blocks share one graph for training
and one for evaluation, since weights are inputs of it. ``fullgraph``: what cannot be compiled whole is an error, not a
slow run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zeroshard.errors import UserError
from zeroshard.train.config.config import CompileBackend


def compile_blocks(blocks: Iterable[nn.Module], backend: CompileBackend, device: torch.device) -> None:
    """Have each block's ``forward`` compiled at its first call, in place.

    Args:
        blocks: the repeated part of a model.
        backend: ``inductor`` writes kernels; ``aot_eager`` and ``eager`` trace the same graphs and run them as they
            are, for tests.
        device: where the blocks run.

    Raises:
        UserError: ``inductor`` has no compiler here to write kernels with.
    """
    if backend == "inductor":
        require_compiler(device)
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def require_compiler(device: torch.device) -> None:
    """Raise UserError where `inductor` could not make kernels for ``device``: at once, not at the first step."""
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
