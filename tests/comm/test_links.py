"""How a run gets its link, and what it says of it."""

import math
import sys

import pytest
import torch

import forked
from tiny_runs import events_of, summary_of
from zeroshard.comm import Link, LocalCommunicator, NullCommunicator, ThrottledCommunicator, links
from zeroshard.comm.links import Links
from zeroshard.host.errors import UserError
from zeroshard.host.launch.environment import World
from zeroshard.settings.tables import LinkConfig

CPU = torch.device("cpu")


def test_quantities_become_bytes_and_seconds_here_and_nowhere_else():
    found = Links.of(LinkConfig(mode="simulated", bandwidth="1Gbit/s", latency="50us", burst="64KiB", node_size=2))
    assert (found.between.bytes_per_s, found.between.burst_bytes) == (125e6, 65536)
    assert found.between.latency_s == pytest.approx(5e-5)
    assert Links.of(LinkConfig(mode="simulated", latency="1ms")).between == Link(1e-3, math.inf)


def test_a_simulated_link_wraps_the_communicator(monkeypatch):
    found = Links.of(LinkConfig(mode="simulated", bandwidth="1Gbit/s", node_size=2))
    monkeypatch.setattr(links, "ranks_share_host", lambda: True)
    comm = NullCommunicator(4)
    slowed = found.slow(comm, CPU)
    assert isinstance(slowed, ThrottledCommunicator)
    assert slowed.inner is comm
    alone = LocalCommunicator()
    assert found.slow(alone, CPU) is alone
    assert Links.of(LinkConfig()).slow(comm, CPU) is comm
    with pytest.raises(UserError, match=r"link.mode: simulated delays CPU tensors, and this run is on cuda"):
        found.slow(comm, torch.device("cuda"))
    monkeypatch.setattr(links, "ranks_share_host", lambda: False)
    with pytest.raises(UserError, match=r"link.mode: simulated needs the clock of one host"):
        found.slow(comm, CPU)


def test_ranks_that_another_launcher_has_started_have_no_namespaces():
    found = Links.of(LinkConfig(mode="netns", bandwidth="1Gbit/s"))
    with pytest.raises(UserError, match=r"link.mode: netns is set up by the launcher, and another one has started"):
        found.enter(World(0, 0, 2, "localhost", 1))


def test_nothing_is_probed_where_no_link_is_slowed():
    assert Links.of(LinkConfig()).probed(NullCommunicator(4)) == {}
    assert Links.of(LinkConfig(mode="simulated", bandwidth="1Gbit/s")).probed(LocalCommunicator()) == {}


def test_a_run_over_a_simulated_link_says_what_was_asked_and_achieved(tmp_path):
    words = ["train", "--nproc", "2", "--data", "synthetic", "--data.dir", str(tmp_path / "data")]
    words += ["--max-steps", "3", "--warmup-steps", "0", "--eval-interval", "0", "--model.n-layer", "2"]
    words += ["--strategy", "zero3", "--link.mode", "simulated", "--link.bandwidth", "100Mbit/s"]
    words += ["--out", str(tmp_path / "run"), "--no-overlap"]
    forked.run([sys.executable, "-m", "zeroshard", *words], check=True, capture_output=True, timeout=600)
    summary = summary_of(tmp_path / "run")
    link = summary["link"]
    (start,) = events_of(tmp_path / "run", "start")
    assert link == start["link"]
    assert (link["mode"], link["asked_bytes_per_s"], link["asked_latency_s"]) == ("simulated", 12.5e6, 0.0)
    near = abs(link["achieved_bytes_per_s"] / 12.5e6 - 1) <= 0.05  # not where others hold the cores
    assert (link["comparable"], not link["why_not_comparable"]) == (near, near)
    assert (tmp_path / "run" / "config.toml").read_text().count('bandwidth = "100Mbit/s"') == 1
