"""Finds the module that produced the first NaN/Inf: runs a step again and checks the output of every module.

Each check synchronises with the device, so this is done once, when the run is given up. It is collective, because a
forward at stage 3 gathers weights. A submodule returns before the module that contains it, so the first output with a
NaN/Inf belongs to the innermost module that produced it. If all outputs are finite, gradients are searched the same
way, in the order of backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.comm import Communicator
from zeroshard.comm.agree import by_rank, send_bytes


def first_not_finite(model: nn.Module, comm: Communicator, replay: Callable[[], object]) -> str:
    """Describe the module and rank that produced the first NaN/Inf, the same on every rank; collective.

    As ``the output of blocks.3.mlp (Mlp) on rank 1``. ``replay`` repeats a step's forward and backward exactly; the
    caller must clear the gradients that it leaves.
    """
    # Run eagerly: compiled code does not call hooks that were registered after it was compiled. The stance is global to
    # the process, where ranks may be threads: the collective after the replay waits for all, before any restores it.
    torch.compiler.set_stance("force_eager")
    try:
        with _watched(model) as (outputs, gradients):
            replay()
        kinds = by_rank(comm, 2 if outputs else 1 if gradients else 0)
    finally:
        torch.compiler.set_stance("default")
    if not any(kinds):
        return "no module's output or gradient, when the step was run again; a reduction overflowed"
    rank = kinds.index(max(kinds))
    found = outputs or gradients
    return send_bytes(comm, f"{found[0]} on rank {rank}".encode() if comm.rank == rank else b"", src=rank).decode()


@contextmanager
def _watched(model: nn.Module) -> Generator[tuple[list[str], list[str]]]:
    """Collect names of outputs, and of gradients with respect to outputs, that have a NaN/Inf; in order."""
    outputs: list[str] = []
    gradients: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            what = f"{name or 'the model'} ({type(module).__name__})"
            tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
            if not _finite(tensors):
                outputs.append(f"the output of {what}")
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(check_gradient(what))

        return after

    def check_gradient(what: str) -> Callable[[Tensor], None]:
        def check(grad: Tensor) -> None:
            if not _finite([grad]):
                gradients.append(f"the gradient that reached the output of {what}")

        return check

    # DDP and autocast put a prefix before a module's name.
    named = [(re.sub(r"^(module(\.|$))+", "", name), module) for name, module in model.named_modules()]
    handles = [module.register_forward_hook(watch(name)) for name, module in named]
    try:
        yield outputs, gradients
    finally:
        for handle in handles:
            handle.remove()


def _finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)
