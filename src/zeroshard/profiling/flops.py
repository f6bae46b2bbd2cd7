"""What a device can do at its best, and the share of it that a run reaches.

Model FLOPs utilisation (Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, appendix B):

    MFU = tokens_per_s * num_flops_per_token / (num_devices * peak_flops_per_s)

A peak is known for the devices below alone; for any other there is no MFU, rather than an invented one.
"""

from __future__ import annotations

import re

# Dense bf16 matrix throughput in FLOP/s, without sparsity, from the makers' data sheets (which print the Hopper and
# L4 figures with sparsity: twice these). A row counts when each of its words is a word of the device's name; the
# first one that does wins, so narrower rows stand first.
PEAK_BF16_FLOPS_PER_S: tuple[tuple[str, float], ...] = (
    ("H200 NVL", 835.5e12),  # NVIDIA H200 data sheet, column NVL
    ("H200", 989.5e12),  # NVIDIA H200 data sheet, column SXM
    ("H100 NVL", 835.5e12),  # NVIDIA H100 data sheet, column NVL
    ("H100 PCIe", 756.5e12),  # NVIDIA H100 data sheet, first edition, column PCIe
    (
        "H100 HBM3",
        989.5e12,
    ),  # NVIDIA H100 data sheet, column SXM; SXM boards call themselves "H100 80GB HBM3"
    ("A100", 312e12),  # NVIDIA A100 data sheet, PCIe and SXM alike
    ("L40S", 362.05e12),  # NVIDIA L40S data sheet
    ("L4", 121e12),  # NVIDIA L4 data sheet
    ("RTX 4090", 165.2e12),  # NVIDIA Ada GPU architecture white paper, appendix A, fp32 accumulation
)
_OTHER_DEVICES = {"MIG", "Laptop", "D"}  # a slice of a device, or a smaller one under nearly the same name


def peak_bf16_flops_per_s(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device, by the name that its driver reports; None where it is not known."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    if words & _OTHER_DEVICES:
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS_PER_S if words.issuperset(name.split())), None)


def model_flops_utilisation(
    tokens_per_s: float, num_flops_per_token: int, num_devices: int, peak_flops_per_s: float | None
) -> float | None:
    """The share of the devices' peak that the model's own arithmetic takes, in [0, 1]; None without a peak.

    Args:
        tokens_per_s: global, over all devices.
        num_flops_per_token: forward and backward, recomputation not counted.
        num_devices: over which the tokens were spread.
        peak_flops_per_s: of one device, for the dtype that the run computes in.
    """
    if peak_flops_per_s is None:
        return None
    return tokens_per_s * num_flops_per_token / (num_devices * peak_flops_per_s)
