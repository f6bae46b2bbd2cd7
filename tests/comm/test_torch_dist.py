"""What is torch.distributed's own; the rest is in test_contract.py."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import TorchCommunicator


def outside_a_group(comm):
    group = dist.new_group([0])
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match="this process is no member of the group"):
            TorchCommunicator(group)
    comm.barrier()
    if comm.rank == 0:
        dist.destroy_process_group(group)


def test_a_process_outside_the_group_is_refused(gloo_ranks):
    """`outside_a_group` asserts it."""
    gloo_ranks(2).run(outside_a_group)


@contextmanager
def nccl_alone():
    """Groups of gloo are taken for those of NCCL alone, on a machine with GPUs."""
    with (
        patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield


def messages_beside_nccl(comm):
    """What CPU tensors become, by two communicators over one group of NCCL alone."""
    group, known = dist.new_group([0, 1]), dist.distributed_c10d._world.pg_map
    before = set(known)
    with nccl_alone():
        first, second = TorchCommunicator(group), TorchCommunicator(group)
    rank = first.rank
    assert first.control_device == torch.device("cpu")
    assert set(known) == before  # until there is something to send
    flags, told, gathered = torch.tensor([rank, 5], dtype=torch.uint8), torch.tensor([rank]), torch.empty(2)
    shard, parts = torch.empty(2), torch.empty(2)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        first.all_reduce(flags, "max").wait()
        second.reduce_scatter(shard, torch.tensor([1.0, 2.0, 3.0, 4.0])).wait()
    second.broadcast(told, src=1).wait()
    first.all_gather(gathered, torch.tensor([float(rank)])).wait()
    second.all_to_all(parts, torch.tensor([10.0, 20.0]) + rank).wait()
    (beside,) = set(known) - before  # one for both
    assert [call.kwargs["group"] for call in all_reduce.call_args_list] == [beside, beside]
    assert dist.get_process_group_ranks(beside) == [0, 1]
    dist.destroy_process_group(beside)
    dist.destroy_process_group(group)
    return [each.tolist() for each in (flags, shard, told, gathered, parts)]


def test_messages_of_the_host_go_over_gloo_beside_a_group_of_nccl_alone(gloo_ranks):
    assert gloo_ranks(2).run(messages_beside_nccl) == [
        [[1, 5], [2.0, 4.0], [1], [0.0, 1.0], [10.0, 11.0]],
        [[1, 5], [6.0, 8.0], [1], [0.0, 1.0], [20.0, 21.0]],
    ]


def messages_of_a_part(comm):
    group = dist.new_group([0])
    if comm.rank == 0:
        with nccl_alone():
            return str(TorchCommunicator(group).control_device)
    return None


def test_a_group_of_some_ranks_sends_its_messages_from_the_device(gloo_ranks):
    assert gloo_ranks(2).run(messages_of_a_part) == ["cuda:0", None]


def messages_on_the_device(comm):
    """Where messages lie without a group beside, and those of a part; what is said where there can be none."""
    with nccl_alone(), patch.object(dist, "new_group", side_effect=RuntimeError("connection refused\nframe 0")):
        without = TorchCommunicator(host_messages=False)
        with pytest.raises(RuntimeError) as raised:
            TorchCommunicator().all_reduce(torch.zeros(1))
    with nccl_alone():
        part = without.split([[0], [1]])
    dist.destroy_process_group(part.group)
    return str(without.control_device), str(part.control_device), str(raised.value)


def test_without_messages_of_the_host_they_lie_on_the_device_and_no_group_is_made(gloo_ranks):
    said = (
        "a group of cuda:nccl takes no CPU tensors, and its ranks cannot meet over gloo (connection refused); "
        "set GLOO_SOCKET_IFNAME to the network interface that they share, "
        "or give comm=TorchCommunicator(host_messages=False)"
    )
    assert gloo_ranks(2).run(messages_on_the_device) == [("cuda:0", "cuda:0", said)] * 2


def _refuses_what_gloo_does_not_add(comm):
    for dtype in (torch.int16, torch.uint32, torch.float8_e4m3fn):
        tensor = torch.ones(4).to(dtype)
        for call in (lambda t=tensor: comm.all_reduce(t), lambda t=tensor: comm.reduce_scatter(t[:2], t)):
            with pytest.raises(ValueError, match=r"dtype: gloo does not reduce .*RingCommunicator"):
                call()
        comm.broadcast(tensor, src=0).wait()


def test_dtypes_that_gloo_does_not_add_are_refused_by_name(gloo_ranks):
    """`_refuses_what_gloo_does_not_add` asserts it."""
    gloo_ranks(2).run(_refuses_what_gloo_does_not_add)
