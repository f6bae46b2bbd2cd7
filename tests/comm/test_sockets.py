"""TCP connections of our own: who may connect, where a rank is called, and what happens when one is gone."""

import contextlib
import gc
import json
import os
import socket
import threading
import time
import weakref

import psutil
import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import PeerError, run_threads, thread_transports
from zeroshard.comm.ring import handshake
from zeroshard.comm.ring.handshake import introduce
from zeroshard.comm.ring.sockets import AT_ONCE_BYTES, _settle, own_address
from zeroshard.host.errors import UserError

LARGE = 3 << 20  # elements; more than sockets keep


@pytest.fixture
def transports():
    """`transports(n)`: the ends of n ranks that live in this process and met at one store."""
    made = []

    def make(world_size, timeout_s=600.0):
        made.extend(thread_transports(world_size, timeout_s=timeout_s))
        return made[-world_size:]

    yield make
    for transport in made:
        transport.close()


def _talk(transports, talk):
    return run_threads(lambda comm: talk(transports[comm.rank]), len(transports))


@pytest.mark.redundant
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_may_send_more_than_sockets_keep_before_they_receive(transports, world_size):
    def talk(transport):
        rank = transport.rank
        sent = transport.send(torch.full((LARGE,), float(rank)), (rank + 1) % world_size)
        small = transport.send(torch.tensor([rank]), (rank + 1) % world_size)  # behind the large one
        large, number = torch.empty(LARGE), torch.empty(1, dtype=torch.int64)
        for work in (transport.recv(large, (rank - 1) % world_size), transport.recv(number, (rank - 1) % world_size)):
            work.wait()
        sent.wait()
        small.wait()
        return large.unique().tolist(), number.item()

    expected = [([float((rank - 1) % world_size)], (rank - 1) % world_size) for rank in range(world_size)]
    assert _talk(transports(world_size), talk) == expected


@pytest.mark.parametrize("numel", [10, LARGE])
def test_storage_that_was_sent_or_filled_may_still_be_given_back(transports, numel):
    one, other = transports(2)
    message, got = torch.zeros(numel), torch.zeros(numel)
    sent = one.send(message, 1)
    other.recv(got, 0).wait()
    sent.wait()
    for tensor in (message, got):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().nbytes() == 0


def test_a_small_message_starts_no_thread_and_a_large_one_lets_go_of_its_tensor(transports):
    one, other = transports(2)
    one.send(torch.zeros(AT_ONCE_BYTES, dtype=torch.uint8), 1)
    other.recv(torch.empty(AT_ONCE_BYTES, dtype=torch.uint8), 0).wait()
    assert "ring-sender" not in {thread.name for thread in threading.enumerate()}
    message = torch.zeros(LARGE)
    gone = weakref.ref(message)
    sent = one.send(message, 1)
    other.recv(torch.empty(LARGE), 0).wait()
    sent.wait()
    del message, sent
    assert gone() is None


def test_a_message_of_another_call_is_not_taken(transports):
    one, other = transports(2)
    one.topic, other.topic = 1, 2
    one.send(torch.zeros(3), 1)
    with pytest.raises(PeerError, match="rank 0 called a different collective than this rank"):
        other.recv(torch.zeros(3), 0).wait()
    one, other = transports(2)
    one.send(torch.zeros(4), 1)
    with pytest.raises(PeerError, match="rank 0 called a different collective than this rank"):
        other.recv(torch.zeros(3), 0).wait()


def test_a_peer_that_leaves_is_named_by_who_receives_and_by_who_sends(transports):
    one, other, third = transports(3)
    one.send(torch.zeros(1), 1).wait()
    other.recv(torch.zeros(1), 0).wait()
    one.close()
    with pytest.raises(PeerError, match=r"rank 1: rank 0 is gone or did not answer; .* \(it has hung up\)"):
        other.recv(torch.zeros(1), 0).wait()
    with pytest.raises(PeerError, match="rank 2: rank 0 is gone or did not answer"):
        third.send(torch.zeros(LARGE), 0).wait()
    with pytest.raises(PeerError, match="rank 2: the transport is closed"):
        third.send(torch.zeros(1), 0)


def test_who_waits_is_woken_when_the_transport_is_closed(transports):
    one, other = transports(2)
    one.send(torch.zeros(1), 1)
    other.recv(torch.zeros(1), 0).wait()
    began = threading.Event()

    def listen(comm):
        began.set()
        with pytest.raises(PeerError):
            other.recv(torch.zeros(1), 0).wait()

    def close(comm):
        began.wait()
        other.close()

    run_threads(lambda comm: (listen, close)[comm.rank](comm), 2)


def _address(transport, rank):
    host, port, secret = json.loads(transport._store.get(f"address/{rank}"))
    return (host, port), bytes.fromhex(secret)


def _still_talk(one, other):
    one.send(torch.tensor([5]), other.rank)
    got = torch.tensor([0])
    other.recv(got, one.rank).wait()
    assert got.item() == 5


def test_who_does_not_know_the_secret_is_not_let_in(transports):
    one, other = transports(2)
    address, secret = _address(other, 1)
    for hello in (bytes(68), b"GET / HTTP/1.1\r\n\r\n" * 9, secret + bytes(36), b""):
        with socket.create_connection(address, timeout=600) as stranger:
            stranger.sendall(hello)
            with contextlib.suppress(OSError):  # it has hung up already
                stranger.shutdown(socket.SHUT_WR)
            heard = b""
            with contextlib.suppress(ConnectionResetError):  # it hung up before it had read all
                while part := stranger.recv(100):
                    heard += part
            assert len(heard) == 32  # a challenge, and nothing after it
    assert secret not in (bytes(32), b"")
    _still_talk(one, other)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 2), (2, 2), (2**32 - 1, 3)])
def test_only_another_rank_of_this_world_is_let_in(transports, rank, world_size):
    ranks = transports(world_size)
    address, secret = _address(ranks[1], 1)
    with socket.create_connection(address) as stranger, pytest.raises(ConnectionError):
        introduce(stranger, secret, rank, 1, 10.0)
    _still_talk(*ranks[:2])


def test_a_second_connection_of_a_rank_does_not_replace_the_first(transports):
    one, other = transports(2)
    _still_talk(one, other)
    address, secret = _address(other, 1)
    with socket.create_connection(address) as stranger:
        with pytest.raises(ConnectionError):
            introduce(stranger, secret, 0, 1, 10.0)
        _still_talk(one, other)


def test_what_was_overheard_opens_no_other_connection(transports):
    _, other, third = transports(3)
    address, secret = _address(other, 1)

    class Overheard(socket.socket):
        said = b""

        def sendall(self, data, *args):
            self.said += data
            return super().sendall(data, *args)

    with Overheard(socket.AF_INET) as line:
        line.connect(address)
        introduce(line, secret, 0, 1, 10.0)
        assert secret not in line.said
        said = line.said
    with socket.create_connection(address, timeout=600) as thief:
        thief.recv(32)
        thief.sendall(said)
        assert thief.recv(1) == b""
    _still_talk(third, other)


def test_who_answers_at_a_ranks_address_without_its_secret_is_not_talked_to(transports):
    one, _ = transports(2)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        host, port = impostor.getsockname()
        one._store.set("address/1", json.dumps([host, port, bytes(32).hex()]))

        def answer():
            line, _ = impostor.accept()
            with line:
                line.sendall(bytes(32))
                line.recv(68, socket.MSG_WAITALL)
                line.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerError, match=r"rank 1 is gone .*does not know its secret"):
            one.send(torch.zeros(1), 1)
        thread.join()


@pytest.mark.parametrize("words", ["{", '["127.0.0.1", 1, "zz"]'])
def test_an_address_that_is_none_is_a_lost_peer(transports, words):
    one, _ = transports(2)
    one._store.set("address/1", words)
    with pytest.raises(PeerError, match="rank 1 is gone"):
        one.send(torch.zeros(1), 1)


def test_silent_strangers_hold_nobody_up(transports, monkeypatch):
    monkeypatch.setattr(handshake, "PATIENCE_S", 1e6)  # nobody is hung up on for being slow
    one, other = transports(2)
    address, _ = _address(other, 1)
    with contextlib.ExitStack() as strangers:
        first, *_ = [
            strangers.enter_context(socket.create_connection(address, timeout=600))
            for _ in range(handshake.MOST_STRANGERS + 20)
        ]
        _still_talk(one, other)
        assert len(first.recv(100)) == 32
        assert first.recv(1) == b""  # the first had to go for those who came later


def test_a_stranger_who_is_slow_has_one_deadline(monkeypatch):
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.1)
    taken = []
    server = socket.create_server(("127.0.0.1", 0))
    listener = handshake.Listener(server, bytes(32), 1, 2, lambda *caller: taken.append(caller))
    with socket.create_connection(server.getsockname(), timeout=600) as stranger:
        num_sent = 0
        with contextlib.suppress(OSError):
            for _ in range(68):
                stranger.sendall(b"x")
                num_sent += 1
                time.sleep(0.05)  # never silent for as long as it may take in all
        assert num_sent < 68
    assert taken == []
    listener.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="needs a choice of TCP's congestion control: Linux")
@pytest.mark.parametrize(("caller", "paced_by"), [("127.0.0.1", "reno"), ("127.0.0.2", None)])
def test_only_connections_within_a_machine_are_kept_from_pacing(caller, paced_by):
    door = socket.create_server(("127.0.0.1", 0))
    with door, socket.create_connection(door.getsockname(), source_address=(caller, 0)) as line:
        as_it_is = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        _settle(line, socket.SO_SNDTIMEO, 20.0)
        chosen = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert chosen.rstrip(b"\0").decode() == (paced_by or as_it_is.rstrip(b"\0").decode())


def _settled():
    """Threads and connections of transports in this process, once no more of them end."""
    found = None
    for _ in range(100):
        gc.collect()
        before, found = (
            found,
            (
                sorted(
                    thread.name for thread in threading.enumerate() if thread.name in ("ring-listener", "ring-sender")
                ),
                len(psutil.Process().net_connections("tcp")),
            ),
        )
        if found == before and not found[0]:
            break
        time.sleep(0.05)
    return found


def test_a_forgotten_transport_leaves_no_thread_and_no_connection():
    before = _settled()
    forgotten = dict(enumerate(thread_transports(2, timeout_s=20.0)))

    def join(comm):
        transport = forgotten.pop(comm.rank)
        sent = transport.send(torch.zeros(LARGE), 1 - comm.rank)
        transport.recv(torch.zeros(LARGE), 1 - comm.rank).wait()
        sent.wait()
        names = {thread.name for thread in threading.enumerate()}
        return {"ring-listener", "ring-sender"} <= names

    assert run_threads(join, 2) == [True, True]
    assert _settled() == before == ([], before[1])


def test_a_rank_is_called_at_the_interface_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such,lo")
    assert own_address(dist.HashStore()) == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME: 'none-such' has no address; choose one of .*lo"):
        own_address(dist.HashStore())


def test_a_rank_is_called_where_the_way_to_the_store_begins(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert own_address(dist.HashStore()) == (socket.AF_INET, "127.0.0.1")
    assert os.environ.get("GLOO_SOCKET_IFNAME") is None
