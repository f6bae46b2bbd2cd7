"""What is read of the kernel's files: how much memory can be had, and which node of it is near."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from zeroshard.host import host_memory

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 1,000 KiB, of which 600 can be had; returns a function that writes a further file of the kernel."""
    for name in ("PROC", "CONTROL_GROUPS", "DEVICES", "NODES"):
        monkeypatch.setattr(host_memory, name, tmp_path / name.lower())

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:  100 kB\nMemAvailable:    600 kB\nHugePages_Total:   0\n")
    return write


def test_a_machine_without_groups_has_what_the_kernel_says(machine):
    assert (host_memory.available_bytes(), host_memory.total_bytes()) == (600 * 1024, 1000 * 1024)


def test_nothing_is_said_where_the_kernel_says_nothing(machine, tmp_path):
    (tmp_path / "proc" / "meminfo").unlink()
    assert host_memory.available_bytes() is None
    assert host_memory.total_bytes() is None


def test_a_group_bounds_what_its_processes_have_together_and_pages_of_files_can_be_dropped(machine):
    machine("proc/self/cgroup", "0::/jobs/ours\n")
    machine("control_groups/jobs/ours/memory.max", "max\n")
    machine("control_groups/jobs/ours/memory.current", "5000\n")
    assert host_memory.available_bytes() == 600 * 1024
    machine("control_groups/jobs/memory.max", "9000\n")
    machine("control_groups/jobs/memory.current", "6000\n")
    machine("control_groups/jobs/memory.stat", "anon 4000\ninactive_file 500\nactive_file 250\n")
    assert (host_memory.available_bytes(), host_memory.total_bytes()) == (3750, 9000)
    machine("control_groups/jobs/memory.current", "12000\n")
    assert host_memory.available_bytes() == 0


def test_the_kernel_counts_processes_that_it_has_killed_for_lack_of_memory(machine):
    assert host_memory.num_oom_kills() is None
    machine("proc/vmstat", "oom_kill 3\n")
    assert host_memory.num_oom_kills() == 3  # of the machine
    machine("proc/self/cgroup", "4:memory:/ours\n0::/jobs/ours\n")
    machine("control_groups/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert host_memory.num_oom_kills() == 2
    machine("proc/self/cgroup", "0::/jobs/ours\n")
    machine("control_groups/jobs/ours/memory.events", "max 7\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert host_memory.num_oom_kills() == 1


def test_the_older_version_of_groups_is_read_too_and_its_largest_number_means_no_limit(machine):
    machine("proc/self/cgroup", "4:cpu,memory:/ours\n2:pids:/\n")
    machine("control_groups/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    machine("control_groups/memory/memory.usage_in_bytes", "1\n")
    assert host_memory.available_bytes() == 600 * 1024
    machine("control_groups/memory/ours/memory.limit_in_bytes", "7000\n")
    machine("control_groups/memory/ours/memory.usage_in_bytes", "5000\n")
    machine("control_groups/memory/ours/memory.stat", "total_inactive_file 1000\n")
    assert host_memory.available_bytes() == 3000


def test_a_gpus_node_is_found_by_its_address_on_the_bus(machine, monkeypatch):
    address = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xAF, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: address)
    machine("devices/0000:af:00.0/numa_node", "1\n")
    machine("nodes/node0/cpulist", "0-1\n")
    assert host_memory.node_of(GPU) is None  # one node: nothing to choose
    machine("nodes/node1/cpulist", "2-3\n")
    assert host_memory.node_of(GPU) == 1
    assert host_memory.node_of(torch.device("cpu")) is None
    machine("devices/0000:af:00.0/numa_node", "-1\n")
    assert host_memory.node_of(GPU) is None


def test_a_thread_runs_on_a_node_only_inside_the_block_and_only_where_it_may(machine):
    before = os.sched_getaffinity(0)
    one = min(before)
    machine("nodes/node1/cpulist", f"{one},{max(before) + 7}-{max(before) + 9}\n")
    with host_memory.on_node(1):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    machine("nodes/node1/cpulist", f"{max(before) + 7}\n")
    for node in (1, 2, None):
        with host_memory.on_node(node):
            assert os.sched_getaffinity(0) == before
