"""MFU and HFU: the share of the devices' peak FLOP/s that a run reaches.

Model FLOPs utilisation (Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, appendix B):

    MFU = tokens_per_s * num_flops_per_token / (num_devices * peak_flops_per_s)

with 6 N + 12 L d T FLOPs for each token (`zeroshard.models.flops_per_token`, attention included). Hardware FLOPs
utilisation (HFU, same paper) also counts what activation checkpointing recomputes. So HFU says how busy the devices
were, and MFU how much of that was useful. Without checkpointing they are equal.

Only devices in `zeroshard.train.profiling.devices` have a known peak; for any other the MFU is None, not a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroshard.train.profiling.devices import device_by_driver_name


def peak_bf16_flops_per_s(device_name: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of a device, by the name that its driver reports; None if it is unknown."""
    device = device_by_driver_name(device_name)
    return None if device is None else device.matmul_flops_per_s.get("bfloat16")


def model_flops_utilisation(
    tokens_per_s: float, num_flops_per_token: int, num_devices: int, peak_flops_per_s: float | None
) -> float | None:
    """Return the MFU: the share of the devices' peak that the model's own FLOPs take, in [0, 1]; None without a peak.

    Args:
        tokens_per_s: tokens per second of all devices together.
        num_flops_per_token: FLOPs of forward and backward, without recomputation; with it the result is the HFU.
        num_devices: how many devices computed these tokens.
        peak_flops_per_s: peak of one device, for the dtype in which the run computes.
    """
    if peak_flops_per_s is None:
        return None
    return tokens_per_s * num_flops_per_token / (num_devices * peak_flops_per_s)


@dataclass(frozen=True)
class Speed:
    """What the time of a step says about its speed."""

    num_flops_per_token: int = 0  # of forward and backward, for MFU
    num_recomputed_flops_per_token: int = 0  # that activation checkpointing adds, for HFU
    peak_flops_per_s: float | None = None  # of one device

    def of_step(self, step_s: float, num_tokens: int, num_devices: int) -> dict[str, Any]:
        """Return the values of a `StepRecord` for a step of ``step_s`` seconds, ``num_tokens`` on all devices."""
        tokens_per_s, flops, again = num_tokens / step_s, self.num_flops_per_token, self.num_recomputed_flops_per_token
        mfu, hfu = (
            model_flops_utilisation(tokens_per_s, each, num_devices, self.peak_flops_per_s)
            for each in (flops, flops + again)
        )
        return {"step_s": step_s, "tokens_per_s": tokens_per_s, "mfu": mfu, "hfu": hfu if again else None}
