"""Mixed precision: the dtype of computation, the dtypes and wire formats of collectives, the dtype of master weights.

Micikevicius et al. 2018, "Mixed Precision Training", https://arxiv.org/abs/1710.03740, section 3.1: weights and
activations may be 16 bits wide if a 32-bit master copy of the weights takes the updates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.wire_formats import BLOCK, check_has_range
from zeroshard.wire_policy import WirePolicy


@dataclass(frozen=True)
class MixedPrecision(WirePolicy):
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
            With a ``shard_size`` only sums between replicas use it. None: ``reduce_dtype``. Stages 1, 2 and 3.
        block: elements that share a scale in a block format.
        node_size: number of ranks of a node, all neighbours. Ranks then sum gradients inside each node in
            ``reduce_dtype``, and send only these sums between nodes, in ``reduce``: see
            `zeroshard.zero.transport.node_reduce`. None: each rank sends its gradients to every other in ``reduce``.
        rounding_seed: seed of the noise by which gradients are rounded stochastically.

    Parameters with one dimension or none (norm weights, biases) or fewer than 4,096 elements are sent without a wire
    format, in flat buffers of their own: there are few of them, and a block's largest element sets its scale.

    Raises:
        ValueError: a dtype that is not a floating-point one; no such format; a block that does not pack; a
            ``node_size`` below 2, or without ``reduce``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    gather: torch.dtype | str | None = None
    reduce: torch.dtype | str | None = None
    block: int = BLOCK
    rounding_seed: int = 0
    node_size: int | None = None

    def __post_init__(self) -> None:
        self.check_wire()
        if not isinstance(self.cast_forward_inputs, bool):
            raise ValueError(f"cast_forward_inputs: {self.cast_forward_inputs!r} is not a bool; give True or False")
        for field, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{field}: {dtype!r} is not a torch.dtype; use torch.bfloat16 or torch.float32")
            check_has_range(field, dtype)
            if not dtype.is_floating_point:
                raise ValueError(f"{field}: {dtype} is not a floating-point dtype; use torch.bfloat16 or torch.float32")

    def compute_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype of unsharded weights whose master has dtype ``master``."""
        return self.param_dtype if self.param_dtype is not None and master.is_floating_point else master

    def gradient_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of weights with that master dtype accumulate and are reduced."""
        return self.reduce_dtype if self.reduce_dtype is not None and master.is_floating_point else master

    def reduced_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which reduced gradients of weights with that master dtype wait for the optimizer.

        Gradients that are reduced in bfloat16 stay bfloat16, which has the range of fp32, and so need no wider buffer.
        Others are cast to the master's dtype: float16 too, because a `GradScaler` divides gradients by its scale.
        """
        reduce = self.gradient_dtype(master)
        return reduce if reduce == torch.bfloat16 else master
