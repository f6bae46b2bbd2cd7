"""`MixedPrecision`: the dtypes of a run, and which of its tensors are sent in a wire format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from zeroshard.host.errors import UserError
from zeroshard.settings import rules
from zeroshard.settings.wire_formats import BLOCK, Format, check_block, check_travels, format_of
from zeroshard.zero.core.precision import Precision

EXACT_NUMEL = 4096
"""Elements of the smallest parameter that is sent in a wire format: a smaller one has few bytes to save."""
Exemption = Literal["", "wire", "dtypes"]
"""From what parts of a policy a parameter is exempt: nothing, wire formats, or these and other dtypes than its own."""


@dataclass(frozen=True)
class MixedPrecision(Precision):
    """A dtype policy. The default changes nothing: parameters compute and are sent in the dtype that they have.

    Attributes:
        param_dtype: the compute dtype, of weights in forward and backward. Master weights, which the optimizer updates,
            keep the parameter's own dtype. None: the parameter's own dtype, without a second copy. A parameter that is
            frozen when the engine is built is kept in this dtype alone, rounded, until it is trained.
        reduce_dtype: the dtype in which gradients accumulate and are reduced. None: the master's dtype. Reduced
            gradients wait for the optimizer in the master's dtype, except bfloat16, which has the range of fp32.
        cast_forward_inputs: whether floating-point tensors given to the model are cast to ``param_dtype``.

        gather: wire format of weights: a dtype, or a block format (``"int8"``, ``"int4"``, ``"e4m3"`` alias ``"fp8"``).
            Each rank sends its shard of the fp32 master weights in it, and every rank computes with the decoded values,
            in ``param_dtype``. None: ``param_dtype``. Stages 1, 2 and 3.
        reduce: wire format of gradients, as for ``gather``; they are summed in fp32 and accumulate in ``reduce_dtype``.
            With several replicas only sums between replicas use it. None: ``reduce_dtype``. Stages 1, 2 and 3.
        block: elements that share a scale in a block format.
        node_size: number of ranks of a node, all neighbours. Ranks then sum gradients inside each node in
            ``reduce_dtype``, and send only these sums between nodes, in ``reduce``: see
            `zeroshard.zero.transport.node_reduce`. None: each rank sends its gradients to every other in ``reduce``.
        rounding_seed: seed of the noise by which gradients are rounded stochastically.
        keep_in_fp32_modules: modules whose parameters compute and are sent in fp32 all the same, without a wire format:
            classes, their names, and paths in the model or ends of paths (``"wo"``, ``"mlp.gate"``). Their inputs are
            cast to fp32, and their outputs back: see `zeroshard.zero.kept_modules`.

    Parameters with one dimension or none (norm weights, biases) or fewer than `EXACT_NUMEL` elements are sent without a
    wire format, in flat buffers of their own: there are few of them, and a block's largest element sets its scale.

    Raises:
        ValueError: a dtype that is not a floating-point one; no such format; a block that does not pack; a
            ``node_size`` below 2, or without ``reduce``; something to keep in fp32 that is no name and no class.
    """

    gather: torch.dtype | str | None = None
    reduce: torch.dtype | str | None = None
    block: int = BLOCK
    rounding_seed: int = 0
    node_size: int | None = None
    keep_in_fp32_modules: Sequence[str | type[nn.Module]] = ()

    def __post_init__(self) -> None:
        check_block("block", self.block)
        if self.node_size is not None:
            rules.check_count("node_size", self.node_size, at_least=2)
            if self.reduce is None:
                what = f"{self.node_size} is given, and gradients have no wire format"
                raise UserError("node_size", what, "add reduce='int8', or leave it out")
        if isinstance(self.rounding_seed, bool) or not isinstance(self.rounding_seed, int):
            raise ValueError(f"rounding_seed: {self.rounding_seed!r} is not a whole number; give an int")
        object.__setattr__(self, "keep_in_fp32_modules", _named(self.keep_in_fp32_modules))
        check_travels("gather", self.gather)
        check_travels("reduce", self.reduce)
        super().__post_init__()

    @property
    def has_wire(self) -> bool:
        """Whether weights or gradients have a wire format."""
        return self.gather is not None or self.reduce is not None

    def weights_format(self, master: torch.dtype) -> Format | None:
        """The wire format of weights with that master dtype; None: they are sent in the compute dtype."""
        return format_of(self.gather, self.block) if master.is_floating_point else None

    def gradients_format(self, master: torch.dtype) -> Format | None:
        """The wire format of gradients of weights with that master dtype; None: the dtype in which they accumulate."""
        return format_of(self.reduce, self.block) if master.is_floating_point else None

    def exemption(self, shape: Sequence[int], *, kept: bool) -> Exemption:
        """Return from what a parameter of that shape is exempt; ``kept``: it is in one of `keep_in_fp32_modules`."""
        small = len(shape) < 2 or math.prod(shape) < EXACT_NUMEL
        return "dtypes" if kept else "wire" if self.has_wire and small else ""

    def exempt(self, exemption: Exemption) -> MixedPrecision:
        """Return the policy of parameters with that exemption."""
        if exemption == "dtypes":
            return MixedPrecision()
        return replace(self, gather=None, reduce=None, node_size=None) if exemption else self


def _named(chosen: Any) -> tuple[str | type[nn.Module], ...]:
    several = tuple(chosen) if isinstance(chosen, Iterable) and not isinstance(chosen, str) else (chosen,)
    for each in several:
        if not (isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module))):
            raise ValueError(
                f"keep_in_fp32_modules: {each!r} is no class of modules and no name; give names or classes"
            )
    return several
