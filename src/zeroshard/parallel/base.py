"""One interface for every data-parallel strategy, ours and PyTorch's.

The training loop and the checkpoints use only this interface. To add a strategy, write one file here and add one row to
the table in `zeroshard.parallel.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.optim.named_shards import NamedShard, ShardReader
from zeroshard.settings.engine import EngineSettings
from zeroshard.zero.ema.average import Ema


@dataclass(frozen=True)
class Setup(EngineSettings):
    """The arguments from which every strategy is built; those of `EngineSettings` are for ZeRO strategies only.

    Attributes:
        model: the module to train. With ``init`` it may be on the meta device, if the strategy can allocate its
            parameters (`StrategyEntry.from_meta`).
        units: modules whose parameters are communicated together, in the order in which they run: embedding, blocks,
            head.
        comm: the communicator; None: ``torch.distributed`` if it is initialised, else this process alone.
        optimizer_cls: any ``torch.optim`` optimizer.
        param_groups: function from the model to the optimizer's param groups. It is called after the strategy has
            built its model, because a strategy may replace the parameters of a model on the meta device.
        optimizer_kwargs: the optimizer's defaults (``lr``, ``betas``, ...).
        compute_dtype: dtype of forward and backward; master weights and optimizer states stay fp32, and so do
            reductions unless ``reduce_dtype`` says otherwise.
        init: fills parameter ``name`` of a model on the meta device; as in `zeroshard.Zero`.
        device: where the parameters are placed; None leaves them where they are.
        reshard_after_forward: if weights are sharded, whether to free the unsharded ones between forward and backward;
            False keeps them: less traffic, more memory.
        find_unused_parameters: whether some parameters may take no part in a forward, for strategies that use DDP. DDP
            then traverses the graph after each forward. Our strategies and FSDP2 do not need this.
        wire: further arguments of `zeroshard.zero.MixedPrecision`: the formats in which weights and gradients are
            communicated, if not in the dtype of computation (ZeRO strategies only).
        reduce_dtype, secondary_shard_size: as in `zeroshard.Zero` (ZeRO strategies only).
        ema_decay: decay of a moving average of the weights; None: no average.
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
    reshard_after_forward: bool = True
    find_unused_parameters: bool = False
    ema_decay: float | None = None
    reduce_dtype: torch.dtype | None = None
    wire: Mapping[str, Any] = field(default_factory=dict)
    secondary_shard_size: int | None = None


class Strategy(Protocol):
    """A model and its optimizer, replicated or sharded over ranks."""

    @property
    def model(self) -> nn.Module:
        """The module that the training loop calls: ``model(tokens_BT, targets_BT)``."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """A real torch optimizer: step it, zero it, edit its ``param_groups``."""

    @property
    def ema(self) -> Ema | None:
        """The moving average of the weights, saved and loaded with them; None if `Setup` asked for none."""

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks that train together."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Wrap forward and backward: gradients accumulate without communication."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch; reduce gradients after the last, or earlier if needed."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the averaged gradients by their global norm; return the norm before clipping, 0-dim, fp32."""

    def tied_names(self) -> dict[str, str]:
        """Map each further name of a tied tensor to the name under which it is saved."""

    def named_shards(self) -> Iterable[NamedShard]:
        """Yield the pieces of tensors that this rank saves; over all ranks every tensor is covered exactly once."""

    def named_param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's param groups in a form for JSON, ``params`` by ordinary names; on every rank."""

    def load_named_shards(self, reader: ShardReader) -> None:
        """Read this rank's part of every saved tensor."""

    def full_params(self) -> AbstractContextManager[None]:
        """Return a context in which weights are unsharded, under their ordinary names."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's unsharded weights on the CPU, with ordinary names; collective."""

    def memory_bytes(self) -> dict[str, int]:
        """Return this rank's resident bytes by category: params, grads, master, optimizer, and ema if there is one."""
