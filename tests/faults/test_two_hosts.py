"""The rehearsal of examples/two_hosts.py: two hosts lose each other, one goes on, and takes the other in again."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "two_hosts.py"


def _has_namespaces():
    """Whether this process may make a network namespace."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"zsprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


def _namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.soak  # forty seconds of the processor
@pytest.mark.skipif(not _has_namespaces(), reason="needs root and iproute2, to make network namespaces")
def test_two_hosts_lose_each_other_and_find_each_other_again(alone_with_networks):
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    for line in ("training on 2 ranks", "the link is cut", "with 1 rank", "with 2 ranks", "status 143 and 143"):
        assert line in said, said
    assert re.search(r"  A  started again from the last good checkpoint, 2 times more at most", said), said
    assert re.search(r"  B  error: [^\n]+; start again with", said), said
    assert "zs" not in _namespaces()
