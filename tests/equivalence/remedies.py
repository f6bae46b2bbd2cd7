"""Columns of the conformance matrix for what sends less: a wire format, a second copy near by, local steps.

    zero2, bf16 weights     weights travel in bfloat16, and every rank computes in fp32 with what arrives. The reference
                            rounds its matrices at each use; gradients travel in fp32, by the exchange of wire formats.
    zero3, node copy        four ranks, two of a node: weights are gathered again from the node. The plain reference.
    zero1, local steps      each rank is a replica; an outer step every second step. The reference has a model and an
                            optimizer for each, and torch's SGD with Nesterov momentum over the mean of what they have
                            changed (Douillard et al. 2023, https://arxiv.org/abs/2311.08105, algorithm 1).

Block formats have no such reference: what they round depends on where shards begin. Their bits are held against each
other, stage by stage, in `tests/zero/transport/test_wire.py`, and their errors against bounds in `tests/kernels`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.parallel import STRATEGIES, Setup, Strategy
from zeroshard.zero import LocalSteps
from zeroshard.zero import precision as precision_module

WIRE, COPY, LOCAL = "zero2, bf16 weights", "zero3, node copy", "zero1, local steps"
NODE = 2
EVERY_SECOND = LocalSteps(every=2)


def with_wire(setup: Setup) -> Strategy:
    """`WIRE`; of so small a model every matrix would travel as it is."""
    precision_module.EXACT_NUMEL = 1
    return STRATEGIES["zero2"](replace(setup, wire={"gather": torch.bfloat16, "reduce": torch.float32}))


def with_copy(setup: Setup) -> Strategy:
    """`COPY`; one rank has nothing to copy."""
    alone = setup.comm is None or setup.comm.world_size == 1
    return STRATEGIES["zero3"](replace(setup, secondary_shard_size=None if alone else NODE))


def with_local_steps(setup: Setup) -> Strategy:
    """`LOCAL`."""
    return STRATEGIES["zero1"](replace(setup, shard_size=1, local_steps=EVERY_SECOND))


def count_step(strategy: Strategy) -> None:
    """Tell replicas that take local steps that a step is done."""
    zero = getattr(strategy, "zero", None)
    if zero is not None and zero.local_steps is not None:
        zero.local_steps.step()


class Rounded(torch.autograd.Function):
    """A weight as it arrives in bfloat16; its gradient is that of what arrived."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """``weight``, rounded, in its own dtype."""
        return weight.to(torch.bfloat16).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient as it is."""
        return grads[0]


class Replicas:
    """Models that train apart and take outer steps, in one process: algorithm 1 of DiLoCo, by fragments.

    Args:
        nets: alike when they begin; the global weights have the names of ``nets[0]``.
        settings: when they take outer steps, and the outer optimizer, which is torch's SGD.
        fragments: how the names of each fragment's parameters begin.
    """

    def __init__(
        self,
        nets: Sequence[nn.Module],
        settings: LocalSteps = EVERY_SECOND,
        fragments: Sequence[Sequence[str]] = (("",),),
    ) -> None:
        self._nets, self._settings, self._num_steps = nets, settings, 0
        trained = {name: param for name, param in nets[0].named_parameters() if param.requires_grad}
        self.global_weights = {name: param.detach().clone().requires_grad_() for name, param in trained.items()}
        self._members = [[name for name in trained if name.startswith(tuple(begin))] for begin in fragments]
        lr, momentum = settings.outer_lr, settings.outer_momentum
        self._outer = [
            torch.optim.SGD(
                [self.global_weights[name] for name in names], lr=lr, momentum=momentum, nesterov=momentum > 0
            )
            for names in self._members
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Every net has taken a step: the fragment whose turn it is takes an outer step."""
        self._num_steps += 1
        every, by_net = self._settings.every, [dict(net.named_parameters()) for net in self._nets]
        for f, names in enumerate(self._members):
            if (self._num_steps - (f + 1) * every // self._settings.fragments) % every == 0:
                for name in names:
                    apart = torch.stack([self.global_weights[name] - local[name] for local in by_net])
                    self.global_weights[name].grad = apart.sum(0) / len(by_net)
                self._outer[f].step()
                for name, local in ((name, local) for name in names for local in by_net):
                    local[name].copy_(self.global_weights[name])
