"""Messages of one transport are no other's; a rank that does not answer is named."""

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import PeerError, SocketTransport, thread_transports


def _two_transports_and_the_group(comm):
    """The same peers talk three ways at once; receives are posted in another order than sends."""
    ways = [SocketTransport(comm.group), SocketTransport(comm.group)]
    peer = 1 - comm.rank
    inbox = [torch.zeros(4) for _ in range(3)]
    works = [dist.irecv(inbox[2], peer), ways[1].recv(inbox[1], peer), ways[0].recv(inbox[0], peer)]
    works += [way.send(torch.full((4,), float(i)), peer) for i, way in enumerate(ways)]
    works.append(dist.isend(torch.full((4,), 2.0), peer))
    for work in works:
        work.wait()
    for way in ways:
        way.close()
    return [message[0].item() for message in inbox]


def test_messages_never_mix_with_other_traffic(gloo_ranks):
    assert gloo_ranks(2).run(_two_transports_and_the_group) == [[0.0, 1.0, 2.0]] * 2


def _silent_peer(comm):
    transport = SocketTransport(comm.group, timeout_s=0.3)
    buffer = torch.empty(4)
    if comm.rank == 0:
        with pytest.raises(PeerError, match="rank 0: rank 1 is gone or did not answer"):
            transport.recv(buffer, 1).wait()
        with pytest.raises(PeerError, match="the transport is closed"):
            transport.recv(buffer, 1)
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises(PeerError, match="rank 1: rank 0 waited too long"):
            transport.recv(buffer, 0).wait()


def test_a_peer_that_does_not_answer_in_time_is_named_and_the_transport_closed(gloo_ranks):
    """`_silent_peer` asserts it."""
    gloo_ranks(2).run(_silent_peer)


def test_without_torch_distributed_there_is_one_line_that_says_so():
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        SocketTransport()
    with pytest.raises(ValueError, match=r"^world_size must be at least 1, got 0"):
        thread_transports(0)
