"""Version counters of parameters, so that autograd raises in a backward through a graph of weights that were replaced.

A graph refers to parameters, and autograd compares their versions with those that it saw in forward. So the engine
increments versions when it replaces weights, and a backward through an earlier forward raises. If weights are replaced
for the length of a block only (by averages or anchors), their versions are restored with them: an evaluation may come
between a forward and its backward, while a backward through the evaluation's own forward raises after the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch._C._autograd import _unsafe_set_version_counter

Replaced = Literal["for good", "for now", "back"]
"""How weights were replaced outside of a step: by others; by weights that are there for a block only (averages,
anchors); by the weights from before such a block."""

_FAR = 1 << 20  # added to versions in such a block: more than steps add while a graph from the block is still alive


class GraphVersions:
    """Changes the version counters of one engine's parameters, and remembers those that will be restored."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, int]] = []

    def replaced(self, params: Iterable[Tensor], how: Replaced) -> None:
        """Set the versions of ``params``, whose values are being replaced; ``how``: see `Replaced`."""
        params = [param for param in params if not param.is_inference()]
        if how == "back":
            _set(self._before)
            self._before = []
        elif how == "for now":
            self._before = [(param, param._version) for param in params]
            _set([(param, version + _FAR) for param, version in self._before])
        elif how == "for good":
            torch.autograd.graph.increment_version(params)


def _set(versions: list[tuple[Tensor, int]]) -> None:
    params, numbers = tuple(param for param, _ in versions), tuple(number for _, number in versions)
    _unsafe_set_version_counter(params, numbers)
