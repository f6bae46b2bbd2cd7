"""Synchronises buffers that forwards change, such as running statistics, after each backward that reduces.

Each rank's forward sees its own samples, so statistics drift apart, but a checkpoint saves those of one rank: without
synchronisation a resumed run would start from other statistics than most ranks had. Which buffers change is detected,
not declared: in the all-reduce at the end of backward each rank flags the modules whose buffers it has written to, and
rank 0 broadcasts the buffers of all flagged modules. A model whose buffers are constants sends nothing.
Buffers that are no part of the module's state (``persistent=False``) are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator, labelled
from zeroshard.comm.tensor_broadcast import PendingBroadcasts
from zeroshard.host.torch_internals import not_saved, own_buffers, version_of

BufferSync = Literal["broadcast", "keep"]
_LABEL = "buffers/step"


class ModuleBuffers:
    """The persistent buffers of a model, module by module.

    Args:
        model: the model, whose modules are listed once, here.
        comm: the ranks among which buffers are synchronised.
        sync: how, see `Zero`.
        may_change: whether forwards may change buffers at all; if not, `agreed` raises.
    """

    def __init__(self, model: nn.Module, comm: Communicator, sync: BufferSync, *, may_change: bool = True) -> None:
        self._comm, self._may_change = comm, may_change
        follows = (sync != "keep" and comm.world_size > 1) or not may_change
        # By module: batch norm's counter of batches has a new version after a forward, its running means do not.
        self._modules = [m for m in model.modules() if follows and _persistent(m)]
        self._seen = [_marks(module) for module in self._modules]

    def votes(self) -> list[bool]:
        """For each module with buffers, whether this rank has written to any of them since `agreed`."""
        return [_marks(module) != seen for module, seen in zip(self._modules, self._seen, strict=True)]

    def agreed(self, votes: Sequence[int]) -> None:
        """Make the buffers of modules to which any rank has written equal on all ranks. Collective if there are any.

        Raises:
            RuntimeError: a forward has changed buffers although they may not change.
        """
        if not any(votes):
            return
        places = [place for place, flag in enumerate(votes) if flag]
        if not self._may_change:
            module = type(self._modules[places[0]]).__name__
            what = f"forward updates those of a {module} from each rank's rows, so bits depend on the number of ranks"
            raise RuntimeError(f"buffers: {what}; leave out the module, or reproducible")
        tensors = list(dict.fromkeys(tensor for place in places for tensor in _persistent(self._modules[place])))
        with torch.no_grad(), labelled(_LABEL):
            pending = PendingBroadcasts(self._comm, _LABEL)
            for device in dict.fromkeys(tensor.device for tensor in tensors):
                pending.issue([tensor for tensor in tensors if tensor.device == device], src=0)
            pending.wait()
        for place in places:
            self._seen[place] = _marks(self._modules[place])


def _persistent(module: nn.Module) -> list[Tensor]:
    names = not_saved(module)
    return [tensor for name, tensor in own_buffers(module).items() if tensor is not None and name not in names]


def _marks(module: nn.Module) -> list[tuple[int, int]]:
    return [(id(t), 0 if t.is_inference() else version_of(t)) for t in _persistent(module)]
