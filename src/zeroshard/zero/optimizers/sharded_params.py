"""`ShardedParams`: the parameters of an engine's model, each of which one optimizer may claim."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.optimizer import Homes


class ShardedParams:
    """The parameters of one engine; ``homes``: the flat group and the slot of each."""

    def __init__(self, groups: Iterable[FlatGroup]) -> None:
        self.homes: Homes[FlatGroup] = {}
        self._claimed: set[nn.Parameter] = set()
        self.locate(groups)

    def locate(self, groups: Iterable[FlatGroup]) -> None:
        """Record in which group and slot each parameter is now."""
        for group in groups:
            for slot, param in enumerate(group.params.params):
                self.homes[param] = (group, slot)

    def claim(self, given: Mapping[str, Any]) -> list[nn.Parameter]:
        """Return the parameters of a param group, and refuse them to any other group from now on.

        Raises:
            TypeError: ``params`` is a set or holds something that is no tensor.
            ValueError: a parameter that is not the model's, or that another group has.
        """
        members = given["params"]
        if isinstance(members, Tensor):
            members = [members]
        if isinstance(members, set):
            raise TypeError("params: a set has no order, and ranks must agree on one; give a list")
        chosen: list[nn.Parameter] = []
        for member in members:
            param = member[1] if isinstance(member, tuple) else member  # named_parameters() gives pairs
            if not isinstance(param, Tensor):
                raise TypeError(f"params: a {type(param).__name__} is no parameter; give the model's parameters")
            if param not in self.homes:
                raise ValueError(
                    f"params: a tensor of shape {tuple(param.shape)} is no parameter of the model; "
                    "take parameters from the model after Zero(model) was built"
                )
            if param in self._claimed:
                raise ValueError(
                    f"params: a parameter of shape {tuple(param.shape)} is in two groups, or another optimizer of this "
                    "engine has it; name it once, and to begin anew clear that one's state (optimizer.state.clear())"
                )
            self._claimed.add(param)
            chosen.append(param)
        return chosen

    def name(self, param: nn.Parameter) -> str:
        """A parameter's ordinary name."""
        group, slot = self.homes[param]
        return group.params.layout.slots[slot].name

    def present(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``params`` that have not left the model."""
        return [param for param in params if param not in self.homes[param][0].params.absent]

    def has_all(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether each rank updates all of these parameters."""
        return not any(self.homes[param][0].params.shard_optim for param in params)

    def cut_inside(self, blocks: Mapping[nn.Parameter, int]) -> dict[nn.Parameter, int]:
        """Those of these parameters whose layout may cut a block of so many elements, with that number."""
        return {p: block for p, block in blocks.items() if not self.homes[p][0].keeps_blocks(block)}

    @contextmanager
    def all_or_none(self) -> Generator[None]:
        """If this block fails, let other groups have the parameters that `claim` returned in it."""
        before = set(self._claimed)
        try:
            yield
        except BaseException:
            self._claimed = before
            raise
