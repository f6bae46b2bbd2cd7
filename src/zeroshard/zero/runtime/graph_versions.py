"""Autograd is told which weights a graph was made of, where other weights come into their place.

A graph refers to parameters, and autograd compares their versions with those that it saw in forward. So versions move
on where weights are replaced, and a backward through a forward of the weights from before raises. Where weights only
visit (averages, anchors), the versions from before come back with the weights from before: an evaluation may lie
between a forward and its backward, and a backward of the evaluation's own forward raises after it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C._autograd import _unsafe_set_version_counter

from zeroshard.zero.buffers.common_copy import Replaced

_FAR = 1 << 20  # versions of visitors: further than steps move one while somebody still holds their graph


class GraphVersions:
    """The versions of the parameters of one engine."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, int]] = []

    def replaced(self, params: Iterable[Tensor], how: Replaced) -> None:
        """Other values are about to come into the place of ``params``."""
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
