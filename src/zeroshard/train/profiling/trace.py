"""A Chrome trace of each rank, with spans named after the model's units.

Open it in https://ui.perfetto.dev or chrome://tracing. torch's profiler stamps events by the host's wall clock.

[Note: Names of units]
    Hooks on a module mark the begin and end of its forward; a hook on the gradient of its output marks the begin of its
    backward. A backward span ends where the next one begins. So the spans cover the backward pass without gaps, in
    autograd's order, whether or not a unit's inputs need gradients.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from zeroshard.host.torch_internals import at_end_of_backward, in_backward, tree_leaves


@contextmanager
def named_units(units: Iterable[tuple[str, nn.Module]]) -> Generator[None]:
    """Inside, each unit's forward and backward are spans in torch's profiler. See [Note: Names of units]."""
    spans = _Spans()
    handles: list[Any] = []
    for name, module in units:
        handles.append(module.register_forward_pre_hook(spans.forward_begins(name), prepend=True))
        handles.append(module.register_forward_hook(spans.forward_ends(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        spans.end_all()


class _Spans:
    """The profiler spans that are open now, the innermost last."""

    def __init__(self) -> None:
        self._forward: list[Any] = []
        self._backward: Any = None

    def forward_begins(self, name: str) -> Any:
        """Return a forward pre-hook, for the module called ``name`` in the trace."""

        def hook(module: nn.Module, args: Any) -> None:
            if not in_backward():
                self._forward.append(_opened(f"forward {name}"))

        return hook

    def forward_ends(self, name: str) -> Any:
        """Return a forward hook for that module; its backward span begins when its output's gradient is computed."""

        def backward_begins(grad: Tensor) -> None:
            if self._backward is None:
                at_end_of_backward(self._end_backward)
            self._end_backward()
            self._backward = _opened(f"backward {name}")

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward() or not self._forward:
                return
            self._forward.pop().__exit__(None, None, None)
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for leaf in outputs[:1]:
                leaf.register_hook(backward_begins)

        return hook

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None

    def end_all(self) -> None:
        """Close all spans that are open."""
        self._end_backward()
        while self._forward:  # a forward that an exception ended has left them open
            self._forward.pop().__exit__(None, None, None)


def _opened(name: str) -> record_function:
    span = record_function(name)
    span.__enter__()
    return span


class RankTrace:
    """Runs torch's profiler for some steps of one rank.

    Args:
        units: names and modules of the units, for the spans.
        device: the rank's device; if it is a CUDA device, its kernels are traced too.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._names = named_units(units)

    def start(self) -> None:
        """Start recording."""
        self._profile.__enter__()
        self._names.__enter__()

    def stop(self, path: Path) -> None:
        """Stop recording, and write this rank's events to ``path``."""
        self._names.__exit__(None, None, None)
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(path))
