"""The share of what a device can do that a run reaches.

Model FLOPs utilisation (Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, appendix B):

    MFU = tokens_per_s * num_flops_per_token / (num_devices * peak_flops_per_s)

with 6 N + 12 L d T for each token (`zeroshard.models.flops_per_token`, attention included). Hardware FLOPs utilisation,
HFU, of the same paper credits what activation checkpointing computes again too: it says how busy the devices were, MFU
what came of it. Without checkpointing they are equal.

A peak is known for the devices of `zeroshard.profiling.devices` alone; for any other there is no MFU, rather than an
invented one.
"""

from __future__ import annotations

from zeroshard.profiling.devices import device_by_driver_name


def peak_bf16_flops_per_s(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device, by the name that its driver reports; None where it is not known."""
    device = device_by_driver_name(device_name)
    return None if device is None else device.matmul_flops_per_s.get("bfloat16")


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


def hardware_flops_utilisation(
    tokens_per_s: float,
    num_flops_per_token: int,
    num_recomputed_flops_per_token: int,
    num_devices: int,
    peak_flops_per_s: float | None,
) -> float | None:
    """The share of the devices' peak that all arithmetic takes, recomputation too; None without a peak.

    Args:
        tokens_per_s, num_flops_per_token, num_devices, peak_flops_per_s: as `model_flops_utilisation`.
        num_recomputed_flops_per_token: what runs again in backward.
    """
    computed = num_flops_per_token + num_recomputed_flops_per_token
    return model_flops_utilisation(tokens_per_s, computed, num_devices, peak_flops_per_s)
