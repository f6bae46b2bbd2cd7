"""Messages arrive whole, in order, and in nobody else's hands; a rank that is gone is named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import PeerError, SocketTransport, run_threads, thread_transports


def _three_messages_to_the_right(transport):
    rank, size = transport.rank, transport.world_size
    sends = [transport.send(torch.full((5 + i,), 10 * rank + i), (rank + 1) % size) for i in range(3)]
    buffers = [torch.empty(5 + i, dtype=torch.int64) for i in range(3)]
    for work in [transport.recv(buffer, (rank - 1) % size) for buffer in buffers] + sends:
        work.wait()
    return [buffer.tolist() for buffer in buffers]


def _expected(rank, world_size):
    left = (rank - 1) % world_size
    return [[10 * left + i] * (5 + i) for i in range(3)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_threads_get_messages_in_the_order_sent(world_size):
    transports = thread_transports(world_size, timeout_s=120)
    got = run_threads(lambda comm: _three_messages_to_the_right(transports[comm.rank]), world_size)
    assert got == [_expected(rank, world_size) for rank in range(world_size)]


def _over_group(comm):
    transport = SocketTransport(comm.group)
    got = _three_messages_to_the_right(transport)
    transport.close()
    return got


def test_processes_get_messages_in_the_order_sent(gloo_ranks):
    assert gloo_ranks(3).run(_over_group) == [_expected(rank, 3) for rank in range(3)]


def test_threads_that_expect_another_topic_say_so():
    left, right = thread_transports(2, timeout_s=120)
    left.topic, right.topic = 1, 2
    left.send(torch.zeros(3), 1)
    with pytest.raises(PeerError, match="rank 0 called a different collective than this rank"):
        right.recv(torch.zeros(2), 0).wait()


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


def _made_and_closed(comm):
    for _ in range(10):
        SocketTransport(comm.group).close()


def test_a_transport_may_be_closed_as_soon_as_it_is_made(gloo_ranks):
    gloo_ranks(3).run(_made_and_closed)


def test_a_thread_that_is_not_answered_says_who_was_silent():
    lonely = thread_transports(2, timeout_s=0.05)[0]
    with pytest.raises(PeerError, match=r"rank 1 sent no message within 0\.05 s"):
        lonely.recv(torch.empty(1), 1).wait()
    with pytest.raises(PeerError, match=r"rank 1 did not take a message within 0\.05 s"):
        lonely.send(torch.empty(1), 1).wait()


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
    gloo_ranks(2).run(_silent_peer)


def test_without_torch_distributed_there_is_one_line_that_says_so():
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        SocketTransport()
    with pytest.raises(ValueError, match="world_size: 0 ranks; give at least 1"):
        thread_transports(0)
