"""Devices and links by name, each with its source; and reading and writing the file of measured ones.

A link's bandwidth is that of one direction while the other direction is equally busy: half of the figure in data sheets
of NVLink and PCIe, which add both directions. `LINKS` has these rates; a collective reaches `BANDWIDTH_SHARE` of them.
Latencies are per step of a ring; they are the ones by which NCCL itself chooses algorithms.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zeroshard.host.errors import UserError, shown
from zeroshard.host.regular_files import read_text
from zeroshard.settings.sizes import parse_bandwidth
from zeroshard.settings.validate import nearest
from zeroshard.train.profiling.devices import DEVICES, GIGA, Device

FORMAT = "zeroshard device 1"
# Bounds on what a file of measurements may have: no measurement lies outside, and sums would overflow a double.
LONGEST_S, LEAST_RATE, MOST_RATE = 1e6, 1e-6, 1e24
# NCCL's protocol uses up a fifth of NVLink: its ring reaches 370 of 450 GB/s on 8 H100 (NVIDIA/nccl-tests, issue 212).
BANDWIDTH_SHARE = 0.8
# Between nodes: 4 nodes of 8 B200 with 50 GB/s each reach 381.8 GB/s of bus bandwidth (Bekman, "Machine Learning
# Engineering", network/README.md), 0.955 of the links'. More nodes reach the same with proportionally larger buffers.
NETWORK_SHARE = 0.955
# NVLink SHARP on 8 H100: a bus bandwidth of about 480 GB/s, which is 275 GB/s of the buffer (NVIDIA/nccl-tests, issue
# 212), and 9/8 of that on the link. Blackwell's switches reach 0.74 / 0.85 of Hopper's share (NCCL,
# src/graph/tuning.cc).
IN_SWITCH = {"nvlink4": 0.6875, "nvlink5": 0.6875 * 0.74 / 0.85}
# Latencies of a step of a ring with protocol Simple, by kind of link, and of a call (NCCL, src/graph/tuning.cc).
NVLINK_STEP_S, PCIE_STEP_S, NETWORK_STEP_S = 3.4e-6, 5.7e-6, 9.6e-6
CALL_S = 8.4e-6
NCCL_TUNING = "latency: NCCL src/graph/tuning.cc, ring, Simple"
# Latency of one level of a tree over nodes, in latencies of a ring's step, and number of pieces in flight at once:
# fitted to all-reduces over EFA (AWS), and to those over InfiniBand (two HGX B200), which use all of NCCL's 8 slots.
TREE_STEPS, WINDOW = 4, 1
INFINIBAND_TREE_STEPS, INFINIBAND_WINDOW = 1, 8
# LL and LL128, also from tuning.cc, except that a call takes 7 us more, as nccl-tests' tables show for all collectives
# of few bytes. LL's highest bandwidth in GB/s: on NVLink by generation (llMaxBws, one node); between nodes 15, as
# all-gathers among 16 ranks show, although that table has 19 to 39.
LAUNCH_S = 7e-6
LL_GB_PER_S = {"nvlink5": 282.0, "nvlink4": 141.0, "nvlink3": 87.7, "nvlink2": 39.0}
LL_NETWORK_GB_PER_S = 15.0


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's protocols for small messages, on one kind of link."""

    name: str  # ``LL`` or ``LL128``
    call_s: float  # seconds that every collective takes, however few bytes it sends
    # ring_step_s, tree_step_s: latency of a step of a ring, and of an edge of a tree
    ring_step_s: float
    tree_step_s: float
    bytes_per_s: float  # the protocol's highest bandwidth
    # ring_share, tree_share: its bandwidth in a ring, and in a tree, as a share of protocol Simple's
    ring_share: float
    tree_share: float


def _ll(ring_step_s: float, tree_step_s: float, gb_per_s: float) -> Protocol:
    return Protocol("LL", 6.6e-6 + LAUNCH_S, ring_step_s, tree_step_s, gb_per_s * GIGA, 1 / 2, 1 / 3.8)


LL128 = Protocol("LL128", 14e-6 + LAUNCH_S, 1.9e-6, 1.25e-6, math.inf, 0.92, 0.92 * 7 / 9)
NETWORK_PROTOCOLS = (_ll(2.7e-6, 5.0e-6, LL_NETWORK_GB_PER_S),)


@dataclass(frozen=True)
class Link:
    """The link between a device and its neighbours in a ring."""

    name: str  # the link's name in flags
    latency_s: float  # latency of one step of a ring
    bytes_per_s: float  # bytes that a device sends per second in one direction while it receives as many
    source: str  # the data sheet, or how it was measured
    call_s: float = CALL_S  # seconds that every collective takes, however few bytes it sends
    share: float = BANDWIDTH_SHARE  # share of ``bytes_per_s`` that collectives reach; 1.0 if they were measured
    in_switch: float = 0.0  # share of ``bytes_per_s`` that reducing switches reach (NVLS); 0: there are none
    # protocols for small messages; empty if the backend is not NCCL, or NCCL uses sockets
    protocols: tuple[Protocol, ...] = ()
    tree_steps: float = TREE_STEPS  # latency of a level of a tree over nodes, in units of ``latency_s``
    window: int = WINDOW  # pieces of a buffer that are in flight through a tree at once
    num_ranks: int = 0  # number of ranks among which ``collectives`` were measured
    # measured seconds of a collective by operation: a constant, and per byte of the unsharded buffer
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # measured seconds by which a collective slows overlapping computation, in the same form: if the same cores do both,
    # this may be more than the collective takes alone
    beside: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The communicator of `zeroshard.comm.registry` that it was measured with; empty: it was not measured."""
        return self.name.partition(" among ")[0] if self.num_ranks else ""


def _link(name: str, gb_per_s: float, step_s: float, source: str) -> Link:
    is_network = step_s == NETWORK_STEP_S
    return Link(
        name,
        step_s,
        gb_per_s * GIGA,
        f"{source}; {NCCL_TUNING}",
        share=NETWORK_SHARE if is_network else BANDWIDTH_SHARE,
        in_switch=IN_SWITCH.get(name, 0.0),
        protocols=_protocols(name, step_s),
        tree_steps=INFINIBAND_TREE_STEPS if name.startswith("infiniband") else TREE_STEPS,
        window=INFINIBAND_WINDOW if name.startswith("infiniband") else WINDOW,
    )


def _protocols(name: str, step_s: float) -> tuple[Protocol, ...]:
    """Protocols of a link by its name and Simple's latency; none over sockets, or for RCCL, which is not measured."""
    generation = name.partition("-")[0]
    if generation in LL_GB_PER_S:
        return (_ll(0.6e-6, 0.6e-6, LL_GB_PER_S[generation]), LL128)
    if step_s == PCIE_STEP_S:
        return (_ll(1.0e-6, 1.0e-6, math.inf),)
    return NETWORK_PROTOCOLS if step_s == NETWORK_STEP_S else ()


_PCIE = "PCI-SIG: 16 lanes of"
_LINK_TABLE = (
    _link("nvlink5", 900, NVLINK_STEP_S, "NVIDIA Blackwell: 18 links, 1.8 TB/s both ways"),
    _link("nvlink4", 450, NVLINK_STEP_S, "NVIDIA H100 data sheet: 18 links, 900 GB/s both ways"),
    _link("nvlink4-pcie", 300, NVLINK_STEP_S, "NVIDIA H100 NVL data sheet: 600 GB/s both ways, between two boards"),
    _link("nvlink4-h800", 200, NVLINK_STEP_S, "NVIDIA H800 data sheet: 8 links, 400 GB/s both ways"),
    _link("nvlink3", 300, NVLINK_STEP_S, "NVIDIA A100 data sheet: 12 links, 600 GB/s both ways"),
    _link("nvlink3-a800", 200, NVLINK_STEP_S, "NVIDIA A800 data sheet: 8 links, 400 GB/s both ways"),
    _link("nvlink2", 150, NVLINK_STEP_S, "NVIDIA V100 data sheet: 6 links, 300 GB/s both ways"),
    _link("xgmi4", 537.6, NVLINK_STEP_S, "AMD MI355X data sheet: 7 links of 153.6 GB/s both ways; latency as NVLink's"),
    _link("xgmi3", 448, NVLINK_STEP_S, "AMD MI300X data sheet: 7 links of 128 GB/s both ways; latency as NVLink's"),
    _link("xgmi2", 200, NVLINK_STEP_S, "AMD MI250X data sheet: 8 links of 100 GB/s both ways, half to the own module"),
    _link("pcie5", 63.0, PCIE_STEP_S, f"{_PCIE} 32 GT/s, 128b/130b"),
    _link("pcie5-x8", 31.5, PCIE_STEP_S, "PCI-SIG: 8 lanes of 32 GT/s, 128b/130b"),
    _link("pcie4", 31.5, PCIE_STEP_S, f"{_PCIE} 16 GT/s, 128b/130b"),
    _link("pcie4-x8", 15.75, PCIE_STEP_S, "PCI-SIG: 8 lanes of 16 GT/s, 128b/130b"),
    _link("pcie3", 15.75, PCIE_STEP_S, f"{_PCIE} 8 GT/s, 128b/130b"),
    _link("infiniband-xdr", 100, NETWORK_STEP_S, "InfiniBand Trade Association: XDR, 800 Gbit/s"),
    _link("infiniband-ndr", 50, NETWORK_STEP_S, "InfiniBand Trade Association: NDR, 400 Gbit/s"),
    _link("infiniband-hdr", 25, NETWORK_STEP_S, "InfiniBand Trade Association: HDR, 200 Gbit/s"),
    _link("infiniband-edr", 12.5, NETWORK_STEP_S, "InfiniBand Trade Association: EDR, 100 Gbit/s"),
    _link("ethernet-400g", 50, NETWORK_STEP_S, "IEEE 802.3bs, with RoCE"),
    _link("ethernet-100g", 12.5, NETWORK_STEP_S, "IEEE 802.3ba, with RoCE"),
    # Over sockets each step goes through the operating system's kernel on both sides.
    _link("ethernet-25g", 3.125, 5e-5, "IEEE 802.3by; latency: TCP in one data centre, a round figure of ours"),
    _link("ethernet-10g", 1.25, 5e-5, "IEEE 802.3ae; latency: TCP in one data centre, a round figure of ours"),
    _link("ethernet-1g", 0.125, 1e-4, "IEEE 802.3ab; latency: TCP in one data centre, a round figure of ours"),
)
LINKS: Mapping[str, Link] = {link.name: link for link in _LINK_TABLE}


@dataclass(frozen=True)
class Calibration:
    """A device with its rates and, if several ranks were measured on it, the link between them."""

    device: Device
    link: Link | None = None


def find_device(text: str, field: str = "gpu") -> Calibration:
    """Find the device that ``text`` names: a row of `DEVICES`, or the path of a file that `write_calibration` wrote.

    A name may omit the memory if that is unambiguous, and the prefix ``rtx``: ``h200``, ``a6000``.

    Raises:
        UserError: there is no such device or file; the error suggests the nearest name.
    """
    if text.endswith(".json"):
        return read_calibration(text, field)
    name = text.strip().lower().replace("_", "-")
    if name in DEVICES:
        return Calibration(DEVICES[name])
    names = (name, f"rtx-{name}")
    sizes = [known for known in DEVICES if known in names or known.rpartition("-")[0] in names]
    if len(sizes) == 1:
        return Calibration(DEVICES[sizes[0]])
    if sizes:
        raise UserError(field, f"{text!r} comes in several sizes", f"choose {' or '.join(sizes)}")
    otherwise = f"choose one of {', '.join(DEVICES)}, or a file of `zeroshard bench device`"
    raise UserError(field, f"{text!r} is not a known device", nearest(name, DEVICES, otherwise))


def find_link(text: str, field: str = "network") -> Link:
    """Find the link that ``text`` names: a row of `LINKS`, or a bandwidth with its unit and a network's latency.

    Raises:
        UserError: ``text`` is neither.
    """
    name = text.strip().lower().replace("_", "-")
    if name in LINKS:
        return LINKS[name]
    if not name[:1].isdigit():
        otherwise = f"give a bandwidth, as 400Gbit/s, or one of {', '.join(LINKS)}"
        raise UserError(field, f"{text!r} is not a known link", nearest(name, LINKS, otherwise))
    return Link(
        text.strip(),
        NETWORK_STEP_S,
        parse_bandwidth(field, text),
        f"as given; {NCCL_TUNING}",
        share=NETWORK_SHARE,
        protocols=NETWORK_PROTOCOLS,
    )


def write_calibration(path: str | Path, calibration: Calibration, **extra: Any) -> None:
    """Write a calibration as JSON; ``extra``: further JSON values to store, such as the environment and the spread."""
    link = None if calibration.link is None else asdict(calibration.link)
    content = {"format": FORMAT, "device": {**asdict(calibration.device)}, "link": link, **extra}
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_calibration(path: str | Path, field: str = "gpu") -> Calibration:
    """Read a file that `write_calibration` wrote.

    Raises:
        UserError: there is no such file, or it is damaged or of another kind; the error names ``field``.
    """
    todo = "give a file that `zeroshard bench device` wrote"
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise UserError(field, f"cannot read {path} ({error.strerror})", todo) from None
    except (ValueError, RecursionError):
        raise UserError(field, f"{path} is not JSON", todo) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(field, f"{path} is not a {FORMAT!r} file", todo)
    try:
        found = _CALIBRATION.validate_python({"device": content.get("device"), "link": content.get("link")})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(field, f"{path} is damaged ({where}: {first['msg']})", todo) from None
    device, link = found.device, found.link
    facts = [device.memory_bytes, device.bytes_per_s, *device.matmul_flops_per_s.values()]
    rates = [device.update_bytes_per_s, device.bus_bytes_per_s, device.disk_walk_bytes_per_s]
    rates += [device.disk_gather_bytes_per_s, device.disk_write_bytes_per_s]
    rates += [device.host_memory_bytes]
    facts += [rate for rate in rates if rate != 0]  # 0: not measured
    facts += itertools.chain.from_iterable(each.values() for each in device.matmul_layouts.values())
    facts += [device.matmul_share, device.attention_share, device.memory_share, device.in_step]
    times = [device.kernel_s, device.gelu_s, device.hook_s, *device.disk_beside_s.values()]
    times += [*itertools.chain.from_iterable(device.conversions.values())]
    if link is not None:
        facts += [link.bytes_per_s, link.share]
        costs = (cost for table in (link.collectives, link.beside) for cost in table.values())
        times += [link.latency_s, link.call_s, *itertools.chain.from_iterable(costs)]
    if not all(0 <= time <= LONGEST_S for time in times):
        raise UserError(field, f"{path} has a time that is not a number of seconds, 0 to {LONGEST_S:g}", todo)
    if not device.matmul_flops_per_s or not all(LEAST_RATE <= fact <= MOST_RATE for fact in facts):
        raise UserError(field, f"{path} has a rate, size or share that is not a positive number", todo)
    if device.link and device.link not in LINKS:
        raise UserError(field, f"{path} names a link that is not known, {shown(device.link)}", todo)
    return Calibration(replace(device, matmul_flops_per_s=dict(device.matmul_flops_per_s)), link)


_CALIBRATION = TypeAdapter(Calibration)
