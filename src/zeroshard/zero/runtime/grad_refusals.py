"""Errors for gradients that a user must not read now: they say why these are not averaged, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

from zeroshard.zero.buffers.unit import FlatGroup, Unit
from zeroshard.zero.runtime.backward_pass import BackwardPass


def require_usable(
    what: str, backward: BackwardPass | None, *, removed: bool, has_graph: bool, unreduced: bool
) -> None:
    """Raise RuntimeError if gradients are gone, incomplete, not reduced yet, or were never reduced.

    Args:
        what: the call or attribute that needs gradients; the message begins with it.
        backward: the backward pass that is running, or that an exception has ended; else None.
        removed: whether `Zero.remove` has made the model an ordinary one again.
        has_graph: whether backward ran with ``create_graph`` and grad mode is on: ``.grad`` would need a graph.
        unreduced: whether gradients were accumulated under `no_sync` and never reduced.
    """
    if removed:
        raise RuntimeError(
            f"{what}: zero.remove() has detached the engine, so this has no effect on the model; "
            "make an optimizer over model.parameters()"
        )
    if backward is not None and backward.failed:
        raise RuntimeError(
            f"{what}: the last backward ended in an exception, and its gradients are incomplete; "
            "call zero_grad() and take the step again"
        )
    if backward is not None:
        raise RuntimeError(
            f"{what}: inside backward a gradient is this rank's own and not yet reduced over ranks; "
            "use it after backward()"
        )
    if has_graph and what.endswith(".grad"):
        raise RuntimeError(
            f"{what}: it has no graph of its own after backward(create_graph=True); "
            "use torch.autograd.grad(), or read it under torch.no_grad()"
        )
    if unreduced:
        raise RuntimeError(
            f"{what}: gradients accumulated under no_sync() were never reduced; "
            "run the last backward of a step outside no_sync()"
        )


def refuse_stale_reads(group: FlatGroup, read_while_stale: Iterable[Unit]) -> None:
    """Raise RuntimeError if forward may have read stale weights of the group's unit."""
    unit = next((unit for unit in read_while_stale if group in unit.groups), None)
    if unit is not None:
        raise RuntimeError(
            f"{unit.name}: its parameters have gradients, but neither it nor a module in it was called, so nothing "
            "waited for their gather and forward may have read weights from before the step; call the module, or leave "
            "it out of Zero(units=...)"
        )
