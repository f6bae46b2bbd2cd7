"""Several machines in one world: where they meet, and as whom this one comes."""

from __future__ import annotations

import socket
import threading

import pytest

from zeroshard.errors import UserError
from zeroshard.launch import rendezvous_address
from zeroshard.launch.rendezvous_address import DEFAULT_PORT, RendezvousAddress, meeting_at


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_who_has_the_address_serves_the_meeting_there():
    port = _free_port()
    meeting = meeting_at(f"127.0.0.1:{port}", 2, 4)
    assert (meeting.min_nodes, meeting.max_nodes, meeting.endpoint) == (2, 4, f"127.0.0.1:{port}")
    assert meeting.serves
    assert meeting.own_address == "127.0.0.1"
    assert meeting.interface == "lo"
    assert not meeting_at("192.0.2.1:2345", 2, 2).serves  # reserved for documentation: nobody has it
    assert meeting_at("127.0.0.1", 2, 2).port == DEFAULT_PORT


def test_where_somebody_serves_already_this_process_comes_as_a_guest():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not meeting_at(f"127.0.0.1:{server.getsockname()[1]}", 2, 2).serves


def test_a_meeting_that_cannot_be_reached_any_more_is_told_once(monkeypatch):
    monkeypatch.setattr(rendezvous_address, "PROBE_S", 0.05)
    monkeypatch.setattr(rendezvous_address, "UNREACHABLE_AFTER_S", 0.3)
    told, ended = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = meeting_at(f"127.0.0.1:{server.getsockname()[1]}", 2, 2)
        thread = threading.Thread(target=rendezvous_address.watch, args=(meeting, ended, lambda: told.append(1)))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
        assert not told
    thread.join(10)
    assert told == [1]


def test_a_meeting_that_has_ended_is_not_looked_for(monkeypatch):
    monkeypatch.setattr(rendezvous_address, "PROBE_S", 0.05)
    monkeypatch.setattr(rendezvous_address, "UNREACHABLE_AFTER_S", 0.0)
    ended = threading.Event()
    ended.set()
    rendezvous_address.watch(RendezvousAddress(port=_free_port()), ended, lambda: pytest.fail("it was looked for"))


@pytest.mark.parametrize("endpoint", [":29400", "here:", "here:port", "here:0", "here:70000", "no such host"])
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(UserError, match="rdzv_endpoint") as caught:
        meeting_at(endpoint, 2, 2)
    assert "\n" not in str(caught.value)
