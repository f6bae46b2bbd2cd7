"""A communicator that delivers as late as its contract allows, and poisons what has not come yet.

"Its tensors belong to it until `Work.wait()` has returned" (`zeroshard.comm.base`): so a result is written in `wait`
and no earlier. Until then what is to be written, and what may be used as scratch, is NaN (the largest number of an
integer dtype), so that whoever reads too early computes it; and whoever writes into an input on its way is told so.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zeroshard.comm import Communicator, ReduceOp, Work, all_to_all
from zeroshard.comm.wrappers.wrapper import Wrapper


def poison(tensor: Tensor) -> None:
    """Make every element NaN, or the largest number of its dtype."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


class LateWork:
    """Delivers when it is waited for."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        self._deliver: Callable[[], None] | None = deliver

    def wait(self) -> None:
        """Write the result; nothing the second time."""
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()


class LateCommunicator(Wrapper):
    """``inner``, whose results are held back; `inner` must have finished where `wait` of its work has returned."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        return self._late(tensor, lambda copy: self.inner.all_reduce(copy, op))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Communicator.broadcast`: what is sent stays readable where it comes from."""
        if self.rank == src:
            return self._reads(tensor, self.inner.broadcast(tensor.clone(), src))
        return self._late(tensor, lambda copy: self.inner.broadcast(copy, src))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`: the input is scratch."""
        result = torch.empty_like(output)
        self.inner.reduce_scatter(result, input.clone(), op).wait()
        poison(input)
        poison(output)
        return LateWork(lambda: output.view(-1).copy_(result.view(-1)))

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """See `Communicator.all_gather`: the input stays as it is, unless it is a part of the output."""
        result = torch.empty_like(output)
        self.inner.all_gather(result, input.clone()).wait()
        inside = input.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        poison(output)
        reads = None if inside else self._reads(input, LateWork(lambda: None))

        def deliver() -> None:
            if reads is not None:
                reads.wait()
            output.view(-1).copy_(result.view(-1))

        return LateWork(deliver)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """See `zeroshard.comm.all_to_all`: the input stays as it is."""
        result = torch.empty_like(output)
        all_to_all(self.inner, result, input.clone()).wait()
        poison(output)
        reads = self._reads(input, LateWork(lambda: None))

        def deliver() -> None:
            reads.wait()
            output.view(-1).copy_(result.view(-1))

        return LateWork(deliver)

    def _late(self, tensor: Tensor, issue: Callable[[Tensor], Work]) -> Work:
        result = tensor.clone()
        issue(result).wait()
        poison(tensor)
        return LateWork(lambda: tensor.copy_(result))

    def _reads(self, tensor: Tensor, work: Work) -> Work:
        work.wait()
        sent = tensor.clone()

        def check() -> None:
            same = torch.equal(tensor.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
            assert same, "a tensor was written to while a collective was reading it"

        return LateWork(check)


def late(comm: Communicator) -> Communicator:
    """``comm``, as late as may be."""
    return LateCommunicator(comm)
