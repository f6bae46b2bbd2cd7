"""Several machines in one world: where they meet, and as whom this one comes."""

import socket
import threading

import pytest

from forked import free_port
from zeroshard.host.errors import UserError
from zeroshard.host.launch import rendezvous_address
from zeroshard.host.launch.rendezvous_address import DEFAULT_PORT, RendezvousAddress, rendezvous_at


def test_who_has_the_address_serves_the_rendezvous_there():
    port = free_port()
    rendezvous = rendezvous_at(f"127.0.0.1:{port}", 2, 4)
    assert (rendezvous.min_nodes, rendezvous.max_nodes, rendezvous.endpoint) == (2, 4, f"127.0.0.1:{port}")
    assert rendezvous.serves
    assert rendezvous.own_address == "127.0.0.1"
    assert rendezvous.interface == "lo"
    assert not rendezvous_at("192.0.2.1:2345", 2, 2).serves  # reserved for documentation: nobody has it
    assert rendezvous_at("127.0.0.1", 2, 2).port == DEFAULT_PORT


def test_where_somebody_serves_already_this_process_comes_as_a_guest():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not rendezvous_at(f"127.0.0.1:{server.getsockname()[1]}", 2, 2).serves


def test_a_rendezvous_that_cannot_be_reached_any_more_is_told_once(monkeypatch):
    monkeypatch.setattr(rendezvous_address, "PROBE_S", 0.05)
    monkeypatch.setattr(rendezvous_address, "UNREACHABLE_AFTER_S", 0.3)
    told, ended = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = rendezvous_at(f"127.0.0.1:{server.getsockname()[1]}", 2, 2)
        thread = threading.Thread(target=rendezvous_address.watch, args=(rendezvous, ended, lambda: told.append(1)))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
        assert not told
    thread.join(600)
    assert told == [1]


def test_a_rendezvous_that_has_ended_is_not_looked_for(monkeypatch):
    monkeypatch.setattr(rendezvous_address, "PROBE_S", 0.05)
    monkeypatch.setattr(rendezvous_address, "UNREACHABLE_AFTER_S", 0.0)
    ended = threading.Event()
    ended.set()
    looked_for = []
    rendezvous_address.watch(RendezvousAddress(port=free_port()), ended, lambda: looked_for.append(1))
    assert looked_for == []


@pytest.mark.parametrize("endpoint", [":29400", "here:", "here:port", "here:0", "here:70000", "no such host"])
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(UserError, match="rdzv_endpoint") as caught:
        rendezvous_at(endpoint, 2, 2)
    assert "\n" not in str(caught.value)
