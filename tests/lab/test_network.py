"""Networks that the kernel makes slow. What needs root, or tools, is skipped by name where they are not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from zeroshard.host.errors import UserError
from zeroshard.lab import network
from zeroshard.lab.network import shaper_burst, shaping
from zeroshard.settings.sizes import parse_bandwidth


def _why_not() -> str:
    """Why networks cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "not root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "no iproute2"
    probe = f"zs-test{os.getpid()}"  # other workers ask at the same time
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", probe], check=False)
    return "" if made else "no right to make network namespaces"


needs_root = pytest.mark.skipif(bool(_why_not()), reason=f"networks cannot be made here: {_why_not()}")
NO_NETEM = "this kernel has no netem, and can delay no packet; leave it out, or use --link.mode simulated"


def state() -> tuple[str, ...]:
    """All that `ip` and `tc` know of, but for counters."""
    asked = (["ip", "netns"], ["ip", "-br", "link"], ["ip", "route"], ["tc", "qdisc", "show"])
    return tuple(subprocess.run(words, capture_output=True, text=True, check=True).stdout for words in asked)


@pytest.fixture
def as_before(alone_with_networks):
    network.clean()
    before = state()
    yield before
    assert state() == before


# -- without root -------------------------------------------------------------------------------------------------


def test_tc_is_told_bits_and_the_burst_in_bytes():
    (words,) = shaping(parse_bandwidth("x", "1Gbit/s"))
    assert words[words.index("rate") + 1] == "1000000000bit"
    assert words[words.index("burst") + 1] == "500000b"
    assert words[words.index("limit") + 1] == f"{64 << 20}b"  # more may wait for tokens than TCP has under way
    assert shaping(parse_bandwidth("x", "125MB/s")) == [words]
    (words,) = shaping(parse_bandwidth("x", "1GB/s"), burst_bytes=4096)
    assert words[words.index("rate") + 1] == "8000000000bit"
    assert words[words.index("burst") + 1] == "4096b"
    assert words[words.index("limit") + 1] == "100000000b"


def test_a_burst_covers_a_timers_tick():
    assert [shaper_burst(rate) for rate in (1e6, 125e6, 625e6)] == [64 << 10, 500_000, 2_500_000]


def test_a_latency_is_a_queue_around_the_bucket():
    outer, inner = shaping(125e6, 5e-3)
    assert outer == ["root", "handle", "7a73:", "netem", "delay", "5000us", "limit", "1833"]
    assert inner[:5] == ["parent", "7a73:1", "handle", "7a74:", "tbf"]


def test_who_is_not_root_is_told_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(UserError, match=r"link.mode: netns makes network namespaces, which only root may; run it as"),
        network.nodes(2, 1, 1e6),
    ):
        pass


# -- with root ----------------------------------------------------------------------------------------------------


def shaped(namespace: str | None, device: str) -> int:
    """The rate in bit/s that tc reports."""
    inside = ["-n", namespace] if namespace else []
    done = subprocess.run(["tc", *inside, "-j", "qdisc", "show", "dev", device], capture_output=True, check=True)
    (queue,) = [queue for queue in json.loads(done.stdout) if queue["kind"] == "tbf"]
    return queue["options"]["rate"] * 8  # tc's JSON has bytes


@needs_root
def test_a_network_is_there_shaped_both_ways_and_gone_afterwards(as_before):
    with network.nodes(3, 2, parse_bandwidth("x", "100Mbit/s")) as nodes:
        assert len(nodes.names) == 3
        number = network._number_of(nodes.names[0])
        for node, name in enumerate(nodes.names):
            assert shaped(name, nodes.interface) == 100_000_000
            pace = ["ip", "netns", "exec", name, "cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
            assert subprocess.run(pace, capture_output=True, text=True, check=True).stdout == "reno\n"
            assert shaped(None, f"zsnet{number}v{node}") == 100_000_000
        ping = ["ip", "netns", "exec", nodes.names[0], sys.executable, "-c"]
        reach = (
            "import socket, sys; s = socket.socket(); s.settimeout(5); sys.exit(s.connect_ex((sys.argv[1], 9)) != 111)"
        )
        for address in (nodes.address, f"10.213.{number}.3"):
            assert subprocess.run([*ping, reach, address], check=False).returncode == 0  # answers: refused
        with network.nodes(2, 1, 1e6) as other:
            assert not set(other.names) & set(nodes.names)
            assert network.clean() == []  # both have an owner


@needs_root
def test_what_raises_inside_leaves_nothing(as_before):
    with pytest.raises(KeyboardInterrupt), network.nodes(2, 1, 1e6):
        raise KeyboardInterrupt


@needs_root
def test_a_kernel_that_cannot_delay_says_so_and_leaves_nothing(as_before):
    said = []
    try:
        with network.nodes(2, 1, 1e6, 1e-3):
            said.append("")  # this kernel has netem
    except UserError as error:
        said.append(str(error))
    assert said[0] in ("", f"link.latency: {NO_NETEM}")


OWNER = """
import time
from zeroshard.lab import network
with network.nodes(2, 1, 1e6) as nodes:
    print(nodes, flush=True)
    time.sleep(60)
"""


@needs_root
def test_what_a_killed_owner_leaves_is_removed_by_the_next_start(as_before):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    owner.stdout.readline()
    assert state() != as_before
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert state() != as_before
    with network.nodes(2, 1, 1e6):
        pass
    assert network.clean() == []


@pytest.mark.slow
@needs_root
def test_a_run_that_is_stopped_takes_its_network_along(as_before, tmp_path):
    words = ["train", "--nproc", "2", "--data", "synthetic", "--data.dir", str(tmp_path / "data")]
    words += ["--max-steps", "100000", "--eval-interval", "0", "--model.n-layer", "1", "--out", str(tmp_path / "run")]
    words += ["--link.mode", "netns", "--link.bandwidth", "1Gbit/s"]
    log, pipe = tmp_path / "run" / "metrics.jsonl", subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", "zeroshard", *words], stdout=pipe, stderr=pipe) as process:
        try:
            while not log.exists() or log.read_text().count('"event": "step"') < 2:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            link = json.loads(log.read_text().splitlines()[0])["link"]
            assert (link["mode"], link["asked_bytes_per_s"]) == ("netns", 125e6)
            assert link["achieved_bytes_per_s"] > 0  # how much it is depends on what else the machine does
            assert state() != as_before
        finally:
            process.terminate()
            process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
