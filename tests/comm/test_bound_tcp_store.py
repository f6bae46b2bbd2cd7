"""Where the ranks' store listens: at one address, and nowhere else."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from forked import free_port
from zeroshard.host.launch import bound_tcp_store, process_group, several_hosts
from zeroshard.host.launch.bound_tcp_store import open_store
from zeroshard.host.launch.environment import World
from zeroshard.host.launch.one_host import OneHost
from zeroshard.host.launch.rendezvous_address import RendezvousAddress, rendezvous_at
from zeroshard.host.launch.several_hosts import SeveralHosts


def _listening(port):
    """The addresses at which this process listens on ``port``, as the kernel's table has them."""
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port}


def _outer_address():
    """An address of this machine that others could reach; None where it has none."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    return None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_the_loopback_interface_is_reached_there_alone(host):
    store = open_store(host, 0, serves=True, timeout_s=120)
    store.set("key", "value")
    assert _listening(store.port) in ({"127.0.0.1"}, {"::1"})
    other = open_store(host, store.port, serves=False, timeout_s=120)
    assert other.get("key") == b"value"
    for address in ("127.0.0.2", _outer_address()):
        if address is not None:
            with socket.socket() as stranger:
                assert stranger.connect_ex((address, store.port)) != 0


def test_a_store_at_an_outer_address_listens_there_alone():
    address = _outer_address()
    if address is None:
        pytest.skip("this machine has the loopback interface alone")
    store = open_store(address, 0, serves=True, timeout_s=120)
    assert _listening(store.port) == {address}
    with socket.socket() as stranger:
        assert stranger.connect_ex(("127.0.0.1", store.port)) != 0


@pytest.mark.parametrize(
    ("found", "said"),
    [("127.0.1.1", "node01 resolves to 127.0.1.1 here"), ("192.0.2.7", "is 192.0.2.7, which no interface here has")],
)
def test_where_a_name_says_nothing_of_an_interface_all_are_listened_on_and_it_is_said(monkeypatch, capfd, found, said):
    facts = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]
    monkeypatch.setattr(bound_tcp_store.socket, "getaddrinfo", lambda *args, **kwargs: facts)
    server = bound_tcp_store._listen("node01", 0)
    with server:
        assert server.getsockname()[0] == "0.0.0.0"
    assert said in capfd.readouterr().err


def test_a_taken_port_is_an_os_error_and_nothing_stays_open():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="in use"):
            open_store("127.0.0.1", taken.getsockname()[1], serves=True, timeout_s=120)
        assert len(os.listdir("/proc/self/fd")) == before


def test_what_rank_0_opens_for_all_ranks_listens_at_their_rendezvous_alone(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = free_port()
    store = process_group.meet(World(0, 0, 2, "127.0.0.1", port), timeout_s=120)
    assert store.underlying_store.port == port
    assert _listening(port) == {"127.0.0.1"}


def test_the_ranks_of_one_host_meet_on_the_loopback_interface_alone():
    host = OneHost("127.0.0.1", 0, "test")
    try:
        for _ in range(2):  # a start, and a restart
            where = host.next_rendezvous().bootstrap_store_info
            assert where.master_addr == "127.0.0.1"
            assert _listening(where.master_port) == {"127.0.0.1"}  # ranks are forked, no store answers yet
            host.serve()
            assert _listening(where.master_port) == {"127.0.0.1"}
            store = open_store("127.0.0.1", where.master_port, serves=False, timeout_s=120)
            store.set("key", "value")
            assert store.get("key") == b"value"
    finally:
        host.shutdown()
    assert _listening(where.master_port) == set()


def test_a_rendezvous_of_several_machines_listens_at_its_endpoint_alone(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as `set_for_workers` sets it
    monkeypatch.setattr(several_hosts, "LOST_S", 6000)  # else one that gets no processor for 10 s is left out for ever
    address = _outer_address() or "127.0.0.1"
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    first = SeveralHosts.at(rendezvous_at(f"{address}:{port}", 2, 2), "test")
    assert _listening(port) == {address}
    # another launcher was faster
    second = SeveralHosts.at(RendezvousAddress(address, port, 2, 2, address, serves=True), "test")
    assert _listening(port) == {address}
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(second.next_rendezvous)
        infos = first.next_rendezvous(), later.result(600)
    assert sorted(info.rank for info in infos) == [0, 1]
    ranks_store = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
    assert len(ranks_store) == 1
    assert not _listening(ranks_store.pop()[1])  # rank 0 will serve it: `process_group.meet`
    for handler in (first, second):
        handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        second.next_rendezvous()
