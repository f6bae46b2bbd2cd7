"""`torch.compile` of a model, with every strategy.

The model's ``forward`` is compiled, not its ``__call__``, as `torch.compile` of the model does: hooks of the root unit
(or of a wrapper) run outside of the graphs. A graph ends where hooks of a unit must issue or await a collective, at a
block whose input goes to the host, and around the attention of sequences that ranks share. All blocks then have one
code for training and one for evaluation, because weights are inputs of a graph. Where nothing ends it the model is one
graph, with its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroshard.host.errors import UserError, shortened
from zeroshard.models.config import inputs_wait_on_host
from zeroshard.train.config.config import CompileBackend, TrainConfig

# On the host of an H100 the first step of GPT-2 124M took 22.8 s as one graph of 12 blocks, and 9.0 s with one code for
# all blocks (benchmarks/gpu/results, warm_up_s).
SECONDS_OF_A_BLOCK, SECONDS_OF_PIECES = 2, 10


def compile_model(model: nn.Module, backend: CompileBackend, device: torch.device) -> None:
    """Replace the model's ``forward`` by one that is compiled at its first call.

    Raises:
        UserError: ``inductor`` lacks a compiler that it needs for its kernels; the forward raises it if the model
            cannot be compiled.
    """
    if backend == "inductor" and (missing := missing_compiler(device)):
        what, todo = missing
        raise UserError("compile", what, f"{todo}, or use --compile off or --compile-backend aot_eager")
    model.forward = _said_in_a_line(torch.compile(model.forward, backend=backend))


def _said_in_a_line(compiled: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            said = " ".join(filter(None, str(error).splitlines()[:2]))  # the backend, and what it raised
            what = f"torch.compile cannot compile this model ({type(error).__name__}: {shortened(said, 200)})"
            raise UserError("compile", what, "use --compile off") from error

    return forward


def missing_compiler(device: torch.device) -> tuple[str, str] | None:
    """What `inductor` lacks to compile kernels for ``device``, and what to do; None: nothing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda" and not has_triton():
        return "kernels for CUDA are written in Triton, which is not here", "install it"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler works here", "install g++ or name one in CXX"
    return None


def with_compile(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Return ``config`` with the setting compile ``auto`` replaced by on or off."""
    if config.compile != "auto":
        return config
    return config.resolved(compile="off" if why_off(config, device) else "on")


def why_off(config: TrainConfig, device: torch.device) -> str:
    """Why ``auto`` does not compile a run on ``device``; "": it does."""
    if device.type != "cuda":
        return "on a GPU alone"
    recomputation = config.model.activation_checkpointing
    if beside := config.left_uncompiled_with(recomputation):
        return f"not with {beside}"
    missing = missing_compiler(device) if config.compile_backend == "inductor" else None
    return missing[0] if missing else ""


def in_one_graph(config: TrainConfig, world_size: int) -> bool:
    """Whether nothing ends the graph of a compiled model: no collective, and nothing that comes from the host."""
    alone = world_size == 1 and not (config.keeps_state_away or config.has_exact_sums)
    return alone and config.strategy != "fsdp2" and not inputs_wait_on_host(config.model.activation_checkpointing)


def compiled_in_words(config: TrainConfig, device: torch.device, world_size: int, num_blocks: int) -> str:
    """Say what of a run's model is compiled, and how long that may take; "" if nothing is, as was asked for."""
    chosen = "compile" not in config.model_fields_set
    if config.compile != "on":
        return f"off (auto: {why_off(config, device)})" if chosen else ""
    if in_one_graph(config, world_size):
        what, seconds = "the model is one graph", max(SECONDS_OF_A_BLOCK * num_blocks, SECONDS_OF_PIECES)
    else:
        what, seconds = "one code for all blocks, and graphs before and after them", SECONDS_OF_PIECES
        if config.shares_sequences:
            what += "; attention of shared sequences is not compiled"
    auto = " (auto)" if chosen else ""
    return f"on{auto}: {what}" + f"; the first step may take {seconds} s" * (config.compile_backend == "inductor")
