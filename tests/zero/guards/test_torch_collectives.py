"""Collectives of torch.distributed on weights and gradients of an engine: right, or one line; they take bare memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from nets import Net, rows
from ranks import RankError
from zeroshard.comm import RingCommunicator, SharedMemoryCommunicator, TorchCommunicator
from zeroshard.zero import Zero

OF_GRAD = r"^param.grad: a collective of torch.distributed would write into it, and it is averaged over the ranks alr"
OF_WEIGHTS = r": a collective was given it while the weights were sharded, and one NaN stands for all of its elements; "
GIVEN = [dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0), lambda tensor: dist.all_reduce_coalesced([tensor])]
SHOWN = [lambda param: param, lambda param: param.data, lambda param: param.detach()[1:]]


def _refused(stage: int, comm) -> None:
    net = Net()
    zero = Zero(net, stage, comm=comm)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    param = net.blocks[1].weight
    net(rows(comm.rank)).sum().backward()
    for give in GIVEN:
        with pytest.raises(RuntimeError, match=OF_GRAD):
            give(param.grad)
    expected = param.grad.full_tensor()
    gathered = [torch.zeros(param.shape) for _ in range(2)]
    dist.all_gather(gathered, param.grad)  # which reads it
    assert all(torch.equal(each, expected) for each in gathered)
    optim.step()
    if stage in (1, 2):  # as those functions do that ask no subclass: which they are depends on the version of torch
        assert type(param) is not nn.Parameter, "it is older than the step"
        distributed_c10d._check_single_tensor(param, "tensor")
        assert type(param) is nn.Parameter, "it was gathered"
    for shown in SHOWN if stage == 3 else ():
        for give in GIVEN:
            with pytest.raises(RuntimeError, match=OF_WEIGHTS), torch.no_grad():
                give(shown(param))
    zero.remove()


def _agree(stage: int, comm) -> list[dict[str, torch.Tensor]]:
    """The weights, twice, of a loop that has all ranks agree on them."""
    net = Net()
    zero = Zero(net, stage, comm=comm)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    found = []
    for written in (False, True):
        net(rows(comm.rank)).sum().backward()
        optim.step()
        optim.zero_grad()
        for param in net.parameters() if stage < 3 else ():  # those that are older than the step are gathered first
            dist.all_reduce(param, dist.ReduceOp.MAX)
        with zero.full_params(write_back=True), torch.no_grad():
            for param in net.parameters():
                param.fill_(comm.rank) if written else None
                dist.broadcast(param.data, 1)
        found.append({name: value.clone() for name, value in zero.state_dict().items()})
    zero.remove()
    return found


def _all(comm) -> None:
    comm = TorchCommunicator()
    for stage in range(4):
        _refused(stage, comm)
    plain, *others = [_agree(stage, comm) for stage in range(4)]
    assert all((value == 1).all() for value in plain[1].values())
    assert all(str(other) == str(plain) for other in others)


def _given_to_ours(comm) -> None:
    net = Net()
    Zero(net, 3, comm=comm)
    net(rows(comm.rank)).sum().backward()
    for own in (SharedMemoryCommunicator(), RingCommunicator()):
        with pytest.raises(ValueError, match=r"^ShardedGrad: .* moves plain tensors; give it this one's full_tensor"):
            own.all_reduce(net.first.weight.grad)
        own.close()


def test_our_own_communicators_refuse_a_sharded_gradient_which_would_wait_for_itself(gloo_ranks):
    """`_given_to_ours` asserts, on each rank."""
    try:
        gloo_ranks(2).run(_given_to_ours)
    except RankError as error:
        pytest.fail(str(error))


def test_a_collective_of_the_users_own_is_right_or_one_line(gloo_ranks):
    """`_all` asserts, on each rank."""
    try:
        gloo_ranks(2).run(_all)
    except RankError as error:
        pytest.fail(str(error))
