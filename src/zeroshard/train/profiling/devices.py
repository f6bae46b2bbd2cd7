"""Memory, FLOP/s and bandwidth of devices, from data sheets: the one table that MFU and the planner read.

FLOP/s are dense (NVIDIA prints those of Ada, Hopper and Blackwell with sparsity: twice these). 16-bit matmuls
accumulate in fp32, and ``float32`` is without TF32, which torch does not use by default.

Memory is what torch reports as "total capacity" in its out-of-memory errors, in GiB. It is neither the GB of a data
sheet nor what nvidia-smi prints (for an H100 81559 MiB, of which 79.11 GiB can be used; for an A100, L40S, L4, A10 and
T4 81920, 46068, 23034, 23028 and 15360 MiB: modal-labs/modal-client, pull request 2797). From users' reports: A100
39.50 and 79.25, H100 79.11, H100 NVL 93.00, H100 of 96 GB 95.0, B200 178.35, L40S 44.40, A10 21.99, RTX 4090 23.52, RTX
3090 23.69, RTX 5090 31.36, RTX 3060 11.75, RTX 4060 7.75, RTX A6000 47.54, RTX 6000 Ada 47.4, A40 44.35, A10G 22.03,
V100 15.78 and 31.74, T4 14.56, MI300X 191.98 (AMD's GB are GiB), B300 267.69, GB200 184.31, GB300 276.50, RTX PRO 6000
94.97, MI355X 287.98, H20 95.1. If reports differ, we take the smallest. We found no report of these and assume: H200
NVL as the H200, L4 as the A10, GeForce boards of 12 and 16 GB 0.97 of that, MI325X and MI250X as in AMD's data sheets;
H800, A800 and L20 as H100, A100 and L40S, for which nvidia-smi prints the same.

Boards of one chip that are sold with fewer links (H800, A800) sustain the same FLOP/s as that chip's other boards.

No kernel reaches the peak. ``matmul_share`` is the share of it that large matmuls reach: if a row has one of its own,
it is from Bekman, "Machine Learning Engineering", table of maximum achievable matmul FLOPS, bf16; else it is a round
figure of ours. GeForce boards have higher clocks than their data sheets say, and reach more than these: users measured
large matmuls in 16 bits with torch 2.4 to 2.8 at 76 TFLOP/s (RTX 3090, two reports), 163 (RTX 4090, median of six) and
230 (RTX 5090, one report). ``memory_share`` is the share of the memory bandwidth that a copy reaches, and ``kernel_s``
the time of a small kernel: both are round figures for all GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

TERA, GIGA = 10**12, 10**9
# For devices that `zeroshard bench device` has not measured. With PyTorch 2.11 an H100 and an H200 (SXM) ran a bf16
# matmul of 8192 cubed at 0.80 of their data sheet, and copied at 0.90 of their memory bandwidth. Layers are smaller.
MATMUL_SHARE = 0.75
# Of the matmul rate: FlashAttention-2 reaches 35-40% of an H100 and 50-73% of an A100, arXiv:2307.08691.
ATTENTION_SHARE = 0.55
MEMORY_SHARE = 0.9
# For devices without a row in `zeroshard.lab.predict.rates`, which published runs calibrate: the share of the rate of
# large matmuls by themselves that training sustains. An A100 sustains 0.88 of it, an H100 0.75.
TRAINING_SHARE = 0.8
KERNEL_S = 4e-6  # from the start of one small kernel to the start of the next

FP8 = "float8_e4m3fn"  # torch's name of the numbers of products in 8 bits
# Without such products. The data sheets of all other devices of NVIDIA in the table say twice the 16-bit rate.
_WITHOUT_FP8 = ("a100", "a800", "a40-", "a10", "rtx-a6000", "rtx-30", "v100", "t4", "mi")

DiskWork = Literal["walk", "gather", "write"]
# Of a matrix product's two factors in memory, as BLAS names them: a linear layer computes "nt", its weights' gradient
# "tn", its inputs' "nn". A CPU without instructions for bfloat16 takes ten times as long for "nn" as for "tn".
Layout = Literal["nt", "tn", "nn", "tt"]


@dataclass(frozen=True)
class Device:
    """One device, by its data sheet or as it was measured."""

    name: str  # name of the device, as `zeroshard plan --gpu` takes it
    memory_bytes: int  # memory that a rank may use
    # FLOP/s of matmuls by dtype (``float32``, ``bfloat16``, ``float16``, `FP8`); one that is missing is not supported
    matmul_flops_per_s: Mapping[str, float]
    bytes_per_s: float  # memory bandwidth, reads and writes together
    source: str  # the data sheet, or how it was measured
    matmul_share: float = 1.0  # share of those FLOP/s that large matmuls reach; 1.0 if the FLOP/s were measured
    attention_share: float = 1.0  # share of those FLOP/s that fused attention kernels reach
    memory_share: float = 1.0  # share of ``bytes_per_s`` that operations reach
    kernel_s: float = 0.0  # the least time that an operation takes, however small it is
    # name of the links between the devices of a node, in `zeroshard.lab.predict.hardware.LINKS`; empty: unknown
    link: str = ""
    driver_name: str = ""  # words that are all in the device name which the driver reports; empty: unknown
    device_type: str = "cuda"  # torch's device type, ``"cuda"`` or ``"cpu"``
    # its row in `zeroshard.lab.predict.rates.SUSTAINED`, which then replaces the shares above; empty: the shares apply
    sustained: str = ""
    # clock of matmuls under this board's power limit, relative to the usual limit; 1.0: the usual one
    clock_share: float = 1.0
    # seconds of a tanh GELU on a CPU for each element, forward or backward; 0: its bytes are the bottleneck
    gelu_s: float = 0.0
    hook_s: float = 0.0  # seconds that the engine's hooks take on a CPU for each parameter that has a gradient
    # by which factor a CPU's operations are slower in a step than alone: caches, autograd and Python
    in_step: float = 1.0
    # bytes that a rank's host reads and writes in a second of AdamW's update, with all ranks at once; 0: not measured
    update_bytes_per_s: float = 0.0
    # bytes of a copy between host and device in a second, each way while the other is as busy, all ranks at once; 0:
    # not measured
    bus_bytes_per_s: float = 0.0
    # bytes of a rank's file in a second, with all ranks at once: each read and written back; read as weights are
    # gathered; written as gradients arrive; 0: not measured
    disk_walk_bytes_per_s: float = 0.0
    disk_gather_bytes_per_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0
    # by ``walk``, ``gather``, ``write``, seconds of a CPU's computation that a byte of it costs
    disk_beside_s: Mapping[DiskWork, float] = field(default_factory=dict)
    # by dtype, the FLOP/s of products of factors in that layout as a multiple of ``matmul_flops_per_s``; missing: 1
    matmul_layouts: Mapping[str, Mapping[Layout, float]] = field(default_factory=dict)
    host_memory_bytes: int = 0  # of a node, for all of its ranks; 0: not known
    # by quantisation (``int8 quantise``, say), seconds for each call and for each element; see
    # `zeroshard.lab.predict.conversions`. Any other takes its bytes divided by the memory's rate.
    conversions: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def rate(self, dtype: str) -> float:
        """FLOP/s of products in ``dtype``; of 8 bits, if these were not measured, those of 16; else of fp32."""
        rates = self.matmul_flops_per_s
        other = rates.get("bfloat16") if dtype == FP8 else None
        return rates.get(dtype) or other or rates.get("float32") or max(rates.values())

    @property
    def is_measured_gpu(self) -> bool:
        """Whether it is a GPU whose rates were measured, and so are no shares of a data sheet's."""
        return self.device_type == "cuda" and self.matmul_share == 1.0 and not self.sustained


def _sold(
    name: str,
    memory_gib: float,
    tflops: tuple[float, float, float],
    gb_per_s: float,
    link: str,
    source: str,
    driver_name: str = "",
    share: float = MATMUL_SHARE,
    power: float = 1.0,
) -> Device:
    """Make a `Device` from its data sheet.

    ``tflops``: float32, bfloat16, float16; 0: not supported. ``power``: the board's power limit as a share of the usual
    one. ``share``: the share of the peak that large matmuls by themselves reach.
    """
    rates = zip(("float32", "bfloat16", "float16"), tflops, strict=True)
    flops_per_s = {dtype: rate * TERA for dtype, rate in rates if rate}
    if not name.startswith(_WITHOUT_FP8):
        flops_per_s[FP8] = 2 * flops_per_s["bfloat16"]
    sustained = _like(name)
    share *= 1.0 if sustained else TRAINING_SHARE
    return Device(
        name,
        round(memory_gib * 2**30),
        flops_per_s,
        gb_per_s * GIGA,
        source,
        share,
        ATTENTION_SHARE * share,
        MEMORY_SHARE,
        KERNEL_S,
        link,
        driver_name,
        sustained=sustained,
        clock_share=power ** (1 / 3),
    )


def _like(name: str) -> str:
    """Return the row of `zeroshard.lab.predict.rates.SUSTAINED` for the device ``name``; empty if it has none."""
    return next((_CHIPS.get(row, row) for row in _SUSTAINED if name.startswith(row)), "")


_CHIPS = {"a800": "a100", "h800": "h100"}
_SUSTAINED = ("a100", "a800", "h100", "h200", "h800", "b200", "b300", "gb200", "gb300", "mi300x", "mi325x", "mi355x")


_ADA = "NVIDIA Ada GPU architecture white paper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper, appendix A"

# A row matches the name that a driver reports if each word of its `driver_name` is a word of that name. The first match
# wins, so more specific rows come first.
# fmt: off
_TABLE = (
    # NVLink joins the 72 GPUs of a rack, so they are one node: --gpus-per-node 72
    _sold("gb300-279gb", 276.5, (80, 2500, 2500), 8000, "nvlink5", "NVIDIA GB300 NVL72 data sheet", "GB300"),
    _sold("gb200-186gb", 184.3, (80, 2500, 2500), 8000, "nvlink5", "NVIDIA GB200 NVL72 data sheet", "GB200"),
    _sold("b300-270gb", 267.6, (75, 2250, 2250), 8000, "nvlink5", "NVIDIA HGX and DGX B300 data sheets", "B300"),
    _sold("b200-180gb", 178.3, (75, 2250, 2250), 8000, "nvlink5", "NVIDIA HGX and DGX B200 data sheets", "B200"),
    _sold("h200-nvl-141gb", 139.8, (60, 835.5, 835.5), 4800, "nvlink4", "NVIDIA H200 data sheet, NVL", "H200 NVL", 0.8),
    _sold("h200-141gb", 139.8, (67, 989.5, 989.5), 4800, "nvlink4", "NVIDIA H200 data sheet, SXM", "H200", 0.8),
    _sold("h100-nvl-94gb", 93.0, (60, 835.5, 835.5), 3900, "nvlink4-pcie", "NVIDIA H100 data sheet, NVL", "H100 NVL",
          0.8),
    _sold("h100-pcie-80gb", 79.1, (51, 756.5, 756.5), 2000, "pcie5", "NVIDIA H100 data sheet, first edition, PCIe",
          "H100 PCIe", 0.8),
    _sold("h800-80gb", 79.1, (67, 989.5, 989.5), 3350, "nvlink4-h800", "NVIDIA H800 data sheet, SXM", "H800", 0.803),
    _sold("h20-96gb", 95.0, (44, 148, 148), 4000, "nvlink4", "NVIDIA H20 data sheet, SXM, HBM3 of 96 GB", "H20"),
    # SXM boards call themselves "H100 80GB HBM3"
    _sold("h100-80gb", 79.1, (67, 989.5, 989.5), 3350, "nvlink4", "NVIDIA H100 data sheet, SXM", "H100 HBM3", 0.803),
    # Meta's Grand Teton: SXM with HBM2e, run at 500 W; torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
    _sold("h100-96gb-500w", 95.0, (67, 989.5, 989.5), 2400, "nvlink4", "NVIDIA H100 data sheet, SXM; HBM2e",
          share=0.803, power=5 / 7),
    _sold("a100-80gb", 79.1, (19.5, 312, 312), 2039, "nvlink3", "NVIDIA A100 data sheet, SXM", "A100 SXM4 80GB", 0.869),
    _sold("a100-40gb", 39.5, (19.5, 312, 312), 1555, "nvlink3", "NVIDIA A100 data sheet, SXM", "A100 SXM4 40GB", 0.869),
    _sold("a800-80gb", 79.1, (19.5, 312, 312), 2039, "nvlink3-a800", "NVIDIA A800 data sheet, SXM", "A800 SXM4", 0.869),
    _sold("a100-pcie-80gb", 79.1, (19.5, 312, 312), 1935, "pcie4", "NVIDIA A100 data sheet, PCIe", "A100 80GB", 0.811),
    _sold("a100-pcie-40gb", 39.4, (19.5, 312, 312), 1555, "pcie4", "NVIDIA A100 data sheet, PCIe", "A100", 0.811),
    _sold("rtx-6000-ada-48gb", 47.4, (91.1, 364.25, 364.25), 960, "pcie4", "NVIDIA RTX 6000 Ada data sheet",
          "RTX 6000 Ada"),
    _sold("rtx-a6000-48gb", 47.5, (38.7, 154.8, 154.8), 768, "pcie4", "NVIDIA Ampere GA102 white paper", "RTX A6000"),
    _sold("a40-48gb", 44.3, (37.4, 149.7, 149.7), 696, "pcie4", "NVIDIA A40 data sheet", "A40"),
    _sold("a10g-24gb", 22.0, (35, 70, 70), 600, "pcie4", "NVIDIA A10G data sheet", "A10G"),
    _sold("l40s-48gb", 44.4, (91.6, 362.05, 362.05), 864, "pcie4", "NVIDIA L40S data sheet", "L40S"),
    _sold("l20-48gb", 44.4, (59.8, 119.5, 119.5), 864, "pcie4", "NVIDIA L20 data sheet", "L20"),
    _sold("l4-24gb", 21.9, (30.3, 121, 121), 300, "pcie4", "NVIDIA L4 data sheet", "L4"),
    _sold("a10-24gb", 21.9, (31.2, 125, 125), 600, "pcie4", "NVIDIA A10 data sheet", "A10"),
    _sold("rtx-pro-6000-server-96gb", 94.9, (120, 480, 480), 1597, "pcie5",
          "NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet", "RTX PRO 6000 Server"),
    _sold("rtx-pro-6000-96gb", 94.9, (125, 503.8, 503.8), 1792, "pcie5",
          "NVIDIA RTX Blackwell PRO GPU architecture white paper, Workstation Edition of 600 W",
          "RTX PRO 6000 Workstation"),
    _sold("rtx-5090-32gb", 31.3, (104.8, 209.5, 209.5), 1792, "pcie5",
          _BLACKWELL, "RTX 5090", 1.10),
    _sold("rtx-4090-24gb", 23.5, (82.6, 165.2, 165.2), 1008, "pcie4",
          _ADA, "RTX 4090", 0.985),
    _sold("rtx-5080-16gb", 15.5, (56.3, 112.6, 112.6), 960, "pcie5", _BLACKWELL, "RTX 5080"),
    _sold("rtx-5070-ti-16gb", 15.5, (43.9, 87.9, 87.9), 896, "pcie5", _BLACKWELL, "RTX 5070 Ti"),
    _sold("rtx-5070-12gb", 11.6, (30.9, 61.7, 61.7), 672, "pcie5", _BLACKWELL, "RTX 5070"),
    _sold("rtx-5060-ti-16gb", 15.5, (23.7, 47.4, 47.4), 448, "pcie5-x8", _BLACKWELL, "RTX 5060 Ti"),
    _sold("rtx-4080-16gb", 15.5, (48.7, 97.5, 97.5), 717, "pcie4", _ADA, "RTX 4080"),
    _sold("rtx-4070-12gb", 11.6, (29.1, 58.3, 58.3), 504, "pcie4", _ADA, "RTX 4070"),
    _sold("rtx-4060-ti-16gb", 15.5, (22.1, 44.1, 44.1), 288, "pcie4-x8", _ADA, "RTX 4060 Ti"),
    _sold("rtx-4060-8gb", 7.75, (15.1, 30.2, 30.2), 272, "pcie4-x8", _ADA, "RTX 4060"),
    _sold("rtx-3090-24gb", 23.6, (35.6, 71, 71), 936, "pcie4", "NVIDIA Ampere GA102 white paper, appendix A",
          "RTX 3090", 1.07),
    _sold("rtx-3090-ti-24gb", 23.6, (40, 80, 80), 1008, "pcie4", "NVIDIA GeForce RTX 3090 Ti data sheet",
          "RTX 3090 Ti"),
    _sold("rtx-3060-12gb", 11.7, (12.7, 25.5, 25.5), 360, "pcie4", "NVIDIA GeForce RTX 3060 data sheet", "RTX 3060"),
    _sold("v100-32gb", 31.7, (15.7, 0, 125), 900, "nvlink2", "NVIDIA V100 data sheet, SXM2", "V100 SXM2 32GB"),
    _sold("v100-16gb", 15.7, (15.7, 0, 125), 900, "nvlink2", "NVIDIA V100 data sheet, SXM2", "V100 SXM2 16GB"),
    _sold("t4-16gb", 14.5, (8.1, 0, 65), 320, "pcie3", "NVIDIA T4 data sheet", "T4"),
    _sold("mi355x-288gb", 287.9, (157.3, 2516.6, 2516.6), 8000, "xgmi4", "AMD Instinct MI355X data sheet", "MI355X"),
    _sold("mi325x-256gb", 255.9, (163.4, 1307.4, 1307.4), 6000, "xgmi3", "AMD Instinct MI325X data sheet", "MI325X",
          0.604),
    _sold("mi300x-192gb", 191.9, (163.4, 1307.4, 1307.4), 5300, "xgmi3", "AMD Instinct MI300X data sheet", "MI300X",
          0.514),
    # one of the two dies of a module, which is what torch calls a device
    _sold("mi250x-64gb", 63.9, (23.95, 191.5, 191.5), 1638, "xgmi2", "AMD Instinct MI250X data sheet", "MI250X", 0.767),
)
# fmt: on
DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}

# Words in the names of other devices, unless a row has them: a slice of one (MIG), or one with nearly the same name.
_OTHER_DEVICES = {"MIG", "Laptop", "D", "Max", "PCIE", "3e", "Ti", "SUPER"}


def device_by_driver_name(reported: str) -> Device | None:
    """Return the device that a driver calls ``reported``, under that name; None if it is not in the table."""
    words = set(re.split(r"[^A-Za-z0-9]+", reported))
    named = ((device, set(device.driver_name.split())) for device in _TABLE if device.driver_name)
    found = (device for device, own in named if own <= words and not (words - own) & _OTHER_DEVICES)
    device = next(found, None)
    return None if device is None else replace(device, name=reported)
