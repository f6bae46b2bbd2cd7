"""Devices and links by name, each with its source; and the file that holds measured ones.

A link's bandwidth is what one device sends in one direction while it receives as much: half of what data sheets of
NVLink and PCIe print, which add up both. `LINKS` has the rates; what a collective reaches of them is `BANDWIDTH_SHARE`.
Latencies are per step of a ring, those that NCCL itself reckons with.
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

from zeroshard.errors import UserError, shown
from zeroshard.profiling.devices import DEVICES, GIGA, Device, device_by_driver_name
from zeroshard.regular_files import read_text
from zeroshard.train.config.sizes import parse_bandwidth, parse_duration, parse_size
from zeroshard.train.config.validate import nearest

__all__ = [
    "DEVICES",
    "LINKS",
    "Calibration",
    "Device",
    "Link",
    "device_by_driver_name",
    "find_device",
    "find_link",
    "parse_bandwidth",
    "parse_duration",
    "parse_size",
    "read_calibration",
    "this_machine",
    "write_calibration",
]

FORMAT = "zeroshard device 1"
# Of a measured device: outside of these nothing was measured, and sums would leave what a double holds.
LONGEST_S, LEAST_RATE, MOST_RATE = 1e6, 1e-6, 1e24
# NCCL's protocol takes a fifth of NVLink: its ring reaches 370 of 450 GB/s on 8 H100 (NVIDIA/nccl-tests, issue 212).
BANDWIDTH_SHARE = 0.8
# Between nodes: 4 nodes of 8 B200 with 50 GB/s each reach 381.8 GB/s of bus bandwidth (Bekman, "Machine Learning
# Engineering", network/README.md), 0.955 of them. More nodes reach the same with buffers as much larger.
NETWORK_SHARE = 0.955
# NVLink SHARP on 8 H100: a bus bandwidth of about 480 GB/s, 275 of the buffer's (NVIDIA/nccl-tests, issue 212), 9/8 of
# that on the link. Blackwell's switches have 0.74 / 0.85 of Hopper's share (NCCL, src/graph/tuning.cc).
IN_SWITCH = {"nvlink4": 0.6875, "nvlink5": 0.6875 * 0.74 / 0.85}
# NCCL, src/graph/tuning.cc: latencies of a step of a ring, protocol Simple, by kind of link, and of a call.
NVLINK_STEP_S, PCIE_STEP_S, NETWORK_STEP_S = 3.4e-6, 5.7e-6, 9.6e-6
CALL_S = 8.4e-6
# A pod of TPU v5e or v6e: 16 x 16 chips, each with a link to each neighbour. Collectives there are XLA's; their latency
# and what a call takes are round figures of ours.
TORUS_CHIPS, HOP_S, XLA_CALL_S = 256, 1e-6, 10e-6
NCCL_TUNING = "latency: NCCL src/graph/tuning.cc, ring, Simple"
# Of the latency of a ring's step, what one level of a tree over nodes takes, and how many pieces are on their way at
# once: fitted to all-reduces by EFA (AWS), and to those by InfiniBand (two HGX B200), which use all of NCCL's 8 slots.
TREE_STEPS, WINDOW = 4, 1
INFINIBAND_TREE_STEPS, INFINIBAND_WINDOW = 1, 8
# Likewise of LL and LL128; what a call takes is 7 us more than there, which nccl-tests' tables show of any collective
# of few bytes. Of LL the most that it passes, GB/s: on NVLink by generation (llMaxBws, one node); between nodes what
# all-gathers among 16 ranks show, 15, where that table has 19 to 39.
LAUNCH_S = 7e-6
LL_GB_PER_S = {"nvlink5": 282.0, "nvlink4": 141.0, "nvlink3": 87.7, "nvlink2": 39.0}
LL_NETWORK_GB_PER_S = 15.0


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's for small messages, on one kind of link.

    Attributes:
        name: ``LL`` or ``LL128``.
        call_s: that a collective takes, however little it sends.
        ring_step_s, tree_step_s: latency of a step of a ring, of an edge of a tree.
        bytes_per_s: the most that it passes.
        ring_share, tree_share: of what Simple reaches, what it does.
    """

    name: str
    call_s: float
    ring_step_s: float
    tree_step_s: float
    bytes_per_s: float
    ring_share: float
    tree_share: float


def _ll(ring_step_s: float, tree_step_s: float, gb_per_s: float) -> Protocol:
    return Protocol("LL", 6.6e-6 + LAUNCH_S, ring_step_s, tree_step_s, gb_per_s * GIGA, 1 / 2, 1 / 3.8)


LL128 = Protocol("LL128", 14e-6 + LAUNCH_S, 1.9e-6, 1.25e-6, math.inf, 0.92, 0.92 * 7 / 9)
NETWORK_PROTOCOLS = (_ll(2.7e-6, 5.0e-6, LL_NETWORK_GB_PER_S),)


@dataclass(frozen=True)
class Link:
    """What joins a device to its neighbours in a ring.

    Attributes:
        name: as flags take it.
        latency_s: of one step of a ring.
        bytes_per_s: that a device sends in one direction, while it receives as many.
        source: the data sheet, or how it was measured.
        call_s: that a collective takes, however little it sends.
        share: of ``bytes_per_s``, what collectives reach; 1.0 where they were measured.
        falloff: by what part that share is smaller for each doubling of the nodes: a fabric with fewer links above.
        in_switch: of ``bytes_per_s``, what switches that reduce reach of it (NVLS); 0: none do.
        protocols: for small messages; none where it is not NCCL that sends, or it sends by sockets.
        tree_steps: of ``latency_s``, what a level of a tree over nodes takes.
        window: pieces of a message that are on their way through a tree at once.
        axes: directions of a torus; in each a ring is gone round.
        num_ranks: among how many ranks ``collectives`` were measured.
        collectives: by operation, the seconds that one takes with no bytes, and those of a byte of the whole buffer.
        beside: likewise, the seconds by which one slows the computation that it runs beside: where the same cores do
            both, that may be more than it takes alone.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    source: str
    call_s: float = CALL_S
    share: float = BANDWIDTH_SHARE
    falloff: float = 0.0
    in_switch: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    tree_steps: float = TREE_STEPS
    window: int = WINDOW
    axes: int = 1
    num_ranks: int = 0
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    beside: Mapping[str, tuple[float, float]] = field(default_factory=dict)


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
    """Of a link by its name and Simple's latency; none over sockets, nor of RCCL, which nobody measured."""
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
    _link("pcie4", 31.5, PCIE_STEP_S, f"{_PCIE} 16 GT/s, 128b/130b"),
    _link("pcie4-x8", 15.75, PCIE_STEP_S, "PCI-SIG: 8 lanes of 16 GT/s, 128b/130b"),
    _link("pcie3", 15.75, PCIE_STEP_S, f"{_PCIE} 8 GT/s, 128b/130b"),
    _link("infiniband-xdr", 100, NETWORK_STEP_S, "InfiniBand Trade Association: XDR, 800 Gbit/s"),
    _link("infiniband-ndr", 50, NETWORK_STEP_S, "InfiniBand Trade Association: NDR, 400 Gbit/s"),
    _link("infiniband-hdr", 25, NETWORK_STEP_S, "InfiniBand Trade Association: HDR, 200 Gbit/s"),
    _link("infiniband-edr", 12.5, NETWORK_STEP_S, "InfiniBand Trade Association: EDR, 100 Gbit/s"),
    _link("ethernet-400g", 50, NETWORK_STEP_S, "IEEE 802.3bs, with RoCE"),
    _link("ethernet-100g", 12.5, NETWORK_STEP_S, "IEEE 802.3ba, with RoCE"),
    # Over sockets each step goes through the kernel on both sides.
    _link("ethernet-25g", 3.125, 5e-5, "IEEE 802.3by; latency: TCP in one data centre, a round figure of ours"),
    _link("ethernet-10g", 1.25, 5e-5, "IEEE 802.3ae; latency: TCP in one data centre, a round figure of ours"),
    _link("ethernet-1g", 0.125, 1e-4, "IEEE 802.3ab; latency: TCP in one data centre, a round figure of ours"),
)
_ICI = "cloud.google.com/tpu/docs: {} GB/s both ways a chip, 2D torus; latency: a round figure of ours"
_LINK_TABLE += tuple(
    Link(name, HOP_S, rate / 2 * GIGA, _ICI.format(rate), call_s=XLA_CALL_S, axes=2)
    for name, rate in (("ici-v5e", 400), ("ici-v6e", 800))
)
LINKS: Mapping[str, Link] = {link.name: link for link in _LINK_TABLE}


@dataclass(frozen=True)
class Calibration:
    """What was measured on one machine: its device, and its ranks' way to each other where there were several."""

    device: Device
    link: Link | None = None


def this_machine(memory_bytes: int, device_type: str) -> Calibration:
    """A device of so much memory that computes in every dtype, at no rate that was measured: where memory is asked for.

    Args:
        memory_bytes: what a rank may use.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    rates = dict.fromkeys(("float32", "bfloat16", "float16"), 1e12)
    return Calibration(Device("this machine", memory_bytes, rates, 1e11, "a stand-in", device_type=device_type))


def find_device(text: str, field: str = "gpu") -> Calibration:
    """The device ``text`` names: a row of `DEVICES`, or the path of a file that `write_calibration` wrote.

    A name may leave out its memory where that is unambiguous, and ``rtx`` and ``tpu``: ``h200``, ``a6000``, ``v5e``.

    Raises:
        UserError: there is no such device or file; the nearest name is given.
    """
    if text.endswith(".json"):
        return read_calibration(text, field)
    name = text.strip().lower().replace("_", "-")
    if name in DEVICES:
        return Calibration(DEVICES[name])
    names = (name, f"rtx-{name}", f"tpu-{name}")
    sizes = [known for known in DEVICES if known in names or known.rpartition("-")[0] in names]
    if len(sizes) == 1:
        return Calibration(DEVICES[sizes[0]])
    if sizes:
        raise UserError(field, f"{text!r} comes in several sizes", f"choose {' or '.join(sizes)}")
    otherwise = f"choose one of {', '.join(DEVICES)}, or a file of `zeroshard bench device`"
    raise UserError(field, f"{text!r} is not a known device", nearest(name, DEVICES, otherwise))


def find_link(text: str, field: str = "network") -> Link:
    """The link ``text`` names: a row of `LINKS`, or a bandwidth with its unit, with a network's latency.

    Raises:
        UserError: neither.
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
    """Write what was measured as JSON; ``extra``: more about it that JSON has words for (environment, spread)."""
    link = None if calibration.link is None else asdict(calibration.link)
    content = {"format": FORMAT, "device": {**asdict(calibration.device)}, "link": link, **extra}
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_calibration(path: str | Path, field: str = "gpu") -> Calibration:
    """What `write_calibration` wrote.

    Raises:
        UserError: there is no such file, or it is something else; with ``field``.
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
    facts += [device.matmul_share, device.attention_share, device.memory_share, device.in_step]
    times = [device.kernel_s, device.gelu_s, device.hook_s, *itertools.chain.from_iterable(device.conversions.values())]
    if link is not None:
        facts += [link.bytes_per_s, link.share, 1 - link.falloff]
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
