"""What counts of a batch on ranks: each row once, and each label once, as in one process with all ranks' rows.

Accelerate's loaders fill up the last batch of all ranks with rows of the first one. Of rank r's B rows those are its
own whose place r B + b is below the number of rows that are left:

    3 rows, 2 ranks, B = 2        rank 0: row 0, row 1        rank 1: row 2, row 0 again

The model is given a rank's own rows. A rank that has none computes as well, for the others' collectives, and nothing of
it counts. A loss that is divided by the number of labels of all ranks is a rank's share of one process's loss; the mean
of a rank's rows is weighted by their number. Which of the two a model computes is seen by what it does with the number
(`LabelCount`): its signature does not say, and classifiers take the number and leave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import accelerate
import torch
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor

from zeroshard.host.torch_internals import as_plain, tree_leaves

_IGNORED = -100  # a label that does not count
_LABELS = ("labels", "shift_labels")


@dataclass(frozen=True)
class OwnRows:
    """Rows of a batch.

    Attributes:
        num: those of this rank that are its own; they are its first ones.
        given: those that this rank was given.
        total: those that are some rank's own.
        world_size: number of ranks.
    """

    num: int
    given: int
    total: int
    world_size: int

    @property
    def is_even(self) -> bool:
        """Whether all rows are some rank's own."""
        return self.total == self.given * self.world_size

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator, batch: Any) -> OwnRows | None:
        """Those of the ``batch`` that the current loader has given last; None: it has no rows."""
        state, world_size = accelerator.gradient_state, accelerator.num_processes
        given = find_batch_size(batch)
        if given is None:
            return None
        num, total = given, given * world_size
        # 0 rows are left: none is repeated; -1: nobody knows
        if accelerator.even_batches and state.end_of_dataloader and 0 < state.remainder < total:
            total = state.remainder
            num = min(max(total - accelerator.process_index * given, 0), given)
        return cls(num, given, total, world_size)

    def take(self, batch: Any) -> Any:
        """The own rows of ``batch``; without any, all."""
        return self._apply(lambda each: each[: self.num], batch, self.given) if 0 < self.num < self.given else batch

    def filled(self, output: Any) -> Any:
        """What was computed of own rows, with as many rows as the rank was given."""
        more = self.given - self.num

        def fill(each: Tensor) -> Tensor:
            return torch.cat([each, each[-1:].expand(more, *each.shape[1:])])

        return self._apply(fill, output, self.num) if 0 < self.num < self.given else output

    def share(self, *, counted: bool) -> float:
        """The factor of this rank's loss in a mean over ranks; ``counted``: it is divided by labels of all ranks."""
        return float(self.num > 0) if counted else self.num * self.world_size / self.total

    @staticmethod
    def _apply(change: Any, data: Any, num_rows: int) -> Any:
        def changed(each: Tensor) -> Tensor:
            return change(each) if each.dim() and each.shape[0] == num_rows else each

        return recursively_apply(changed, data)


def without_labels(batch: Any) -> Any:
    """The batch with labels that do not count."""
    return {**batch, **{name: torch.full_like(batch[name], _IGNORED) for name in _LABELS if name in batch}}


class LabelCount(Tensor):
    """A number of labels that knows whether anything has been computed with it.

    Attributes:
        is_used: whether.
    """

    is_used: bool = False

    @classmethod
    def of(cls, number: Tensor) -> LabelCount:
        """The same number."""
        return number.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # not an attribute, such as its device
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, LabelCount):
                    each.is_used = True
        with as_plain():
            return func(*args, **(kwargs or {}))
