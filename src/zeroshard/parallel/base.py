"""One interface over every way to train data-parallel, ours and PyTorch's.

The training loop and the checkpoints know this and nothing more; a new strategy is one file here and one line in
the table of `zeroshard.parallel.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.zero.engine import Accumulate
from zeroshard.zero.optimizers.ema import Ema
from zeroshard.zero.replicas.local_steps import LocalSteps
from zeroshard.zero.state.named_shards import NamedShard, ShardReader


@dataclass(frozen=True)
class Setup:
    """What every strategy is built from.

    Attributes:
        model: the module to train; with ``init`` it may lie on the meta device, where weights are not kept whole by
            the strategy (`StrategyEntry.from_meta`).
        units: modules whose parameters travel together, in the order in which they run: embedding, blocks, head.
        comm: the ranks; None for ``torch.distributed`` where initialised, else this process alone.
        optimizer_cls: any ``torch.optim`` optimizer.
        param_groups: from the model to the optimizer's groups of its parameters. A function, because a strategy that
            makes the parameters of a model on the meta device makes new ones.
        optimizer_kwargs: the optimizer's defaults (``lr``, ``betas``, ...).
        compute_dtype: dtype of forward and backward; masters, optimizer states and reductions stay fp32.
        init: fills parameter ``name`` of a model on the meta device; as `zeroshard.Zero` takes it.
        device: where the parameters are placed; None leaves them where they are.
        shard_size: over how many neighbouring ranks state is sharded; None for all (ZeRO strategies only).
        reshard_after_forward: where weights are sharded, free the unsharded ones between forward and backward; False
            keeps them: less traffic, more memory.
        find_unused_parameters: for those that stand on DDP, which must be told where some parameters may take no part
            in a forward, and then walks the graph after each; ours and FSDP2 need not be.
        reduce_dtype: dtype in which gradients add up and travel; None: the masters' (ZeRO strategies only).
        accumulate, prefetch: as `zeroshard.Zero` takes them (ZeRO strategies only).
        wire: what travels in another form than it computes in: arguments of `zeroshard.zero.MixedPrecision` (ZeRO
            strategies only).
        secondary_shard_size: over how many neighbouring ranks a second copy of sharded weights lies; None: there is
            none (stage 3 alone).
        replicas: how groups of ``shard_size`` ranks that take local steps meet; None: all ranks take each step together
            (ZeRO strategies only).
        leaves: the most ranks that may ever train it, with the same bits on any number; None: no matter (ZeRO
            strategies only).
        ema_decay: of a moving average of the weights; None for no average.
    """

    model: nn.Module
    units: Sequence[nn.Module]
    comm: Communicator | None
    optimizer_cls: type[torch.optim.Optimizer]
    param_groups: Callable[[nn.Module], list[dict[str, Any]]]
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    compute_dtype: torch.dtype = torch.float32
    init: Callable[[str, Tensor], None] | None = None
    device: torch.device | None = None
    shard_size: int | None = None
    reshard_after_forward: bool = True
    find_unused_parameters: bool = False
    ema_decay: float | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate: Accumulate | None = None
    prefetch: int = 1
    wire: Mapping[str, Any] = field(default_factory=dict)
    secondary_shard_size: int | None = None
    replicas: LocalSteps | None = None
    leaves: int | None = None


class Strategy(Protocol):
    """A model and its optimizer, spread over ranks in some way."""

    @property
    def model(self) -> nn.Module:
        """What the loop calls: ``model(tokens_BT, targets_BT)``."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """A real torch optimizer: step it, zero it, edit its ``param_groups``."""
        ...

    @property
    def ema(self) -> Ema | None:
        """The moving average of the weights, saved and loaded with them; None where `Setup` asked for none."""
        ...

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Around forward and backward: accumulate gradients without communication."""
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one of a step's micro-batches; communicates when the strategy must."""
        ...

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the averaged gradients by their global norm; returns the norm before clipping, 0-dim, fp32."""
        ...

    def tied_names(self) -> dict[str, str]:
        """Each further name of a tied tensor -> the name that it is saved under."""
        ...

    def named_shards(self) -> Iterable[NamedShard]:
        """What this rank saves; over all ranks every tensor is tiled exactly once."""
        ...

    def named_param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups as JSON can hold them, ``params`` by their ordinary names; on every rank."""
        ...

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read this rank's part of every saved tensor."""
        ...

    def full_params(self) -> AbstractContextManager[None]:
        """Unsharded weights under their ordinary names inside the context."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights, on the CPU, with ordinary names; collective."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes of this rank by category: params, grads, master, optimizer, and ema where there is one."""
        ...
