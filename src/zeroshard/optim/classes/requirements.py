"""What may an optimizer be given: any pieces of tensors, whole blocks, whole tensors, or nothing less than all of them?

Three sources answer, in this order:

| source                            | for which classes                                                 |
|-----------------------------------|-------------------------------------------------------------------|
| the class itself, by `zero_reach` | those that declare their reach, which is not checked              |
| a table, `OF_TORCH`               | those of `torch.optim`                                            |
| an experiment, `probe`            | all others, subclasses of torch's too: tiny tensors, on the CPU,  |
|                                   | once for a class and its settings                                 |

How a class declares its reach: `zeroshard.optim.classes.reach`.

Nobody checks a declaration: if an optimizer is declared element-wise and is not, its updates are silently wrong.
`zeroshard.optim.classes.answers.found_by_probe` makes the experiment with any class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.optim.classes.answers import found_by_probe
from zeroshard.optim.classes.reach import OF_TORCH, OptimizerKind, Reach, declared

__all__ = ["OptimizerKind", "Reach", "classify"]


def classify(
    optimizer_cls: type[Optimizer],
    settings: Mapping[str, Any] | None = None,
    group: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> OptimizerKind:
    """Return how far the gradient of one element reaches in a step of ``optimizer_cls(params, **settings)``.

    The answer is what the class declares by its attribute ``zero_reach`` (a `Reach`, its value, an `OptimizerKind`, or
    a function of the settings that returns one of them), unchecked. For torch's own classes it is in a table. Else it
    is found by experiment on the CPU, whose result is cached if settings are plain values.

    Args:
        settings: keyword arguments for it.
        group: settings of the param group in question, which override them.
        device: where the parameters live; some settings work on some devices only.
        dtype: of the weights that it updates.

    Raises:
        ValueError: ``zero_reach`` is none of the above.
        Exception: whatever the class itself raises when it is built with these settings for any tensor; a class that
            declares its reach, or is torch's own, is not built.
    """
    device, settings = torch.device(device), settings or {}
    options = {key: value for key, value in (group or {}).items() if key != "params"}
    own = declared(optimizer_cls, {**settings, **options})
    if own:
        return own
    if optimizer_cls in OF_TORCH and optimizer_cls.__module__.startswith("torch.optim"):  # its names may be replaced
        return OF_TORCH[optimizer_cls]
    return found_by_probe(optimizer_cls, settings, options, device, dtype)
