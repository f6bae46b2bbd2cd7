"""The rates that a GPU sustains while it trains, by the shape of an operation: a share of its data sheet's rates.

    product m x n x k      tiles of tm x tn, one per core at a time:  waves  tm tn 2 (k + K) / rate of a core
    attention              FLOPs / (peak  share  width(d)  T / (T + T0))
    all else               bytes / (memory's rate  share), and no less than a kernel's launch

*Tiles.* cuBLAS cuts a product into tiles, and each core computes one: a last wave that occupies few cores takes as long
as a full one. We assume that cuBLAS chooses the fastest tile, and the fastest number of parts to cut k into. K is the
start and the end of a tile, in steps of k. NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile
and wave quantisation; Osama et al. 2023, "Stream-K", https://arxiv.org/abs/2301.03598.

*Attention* depends on kernel, direction, head width and sequence length. On an H100: Shah et al. 2024,
"FlashAttention-3", https://arxiv.org/abs/2407.08608, figures 5 and 6. FlashAttention-2 forward under a causal mask at a
head width of 128: 191, 260, 298, 319, 333, 335 TFLOP/s at 512, 1k, ... 16k tokens; backward without a mask: 214, 260,
291, 310, 318, 322. A head width of 64 has 0.81 of that rate forward (299 of 370, no mask) and 0.90 backward (291 of
322). On an A100 FlashAttention-2 reaches 50 to 73 % of the peak (Dao 2023, https://arxiv.org/abs/2307.08691).

*Power.* While a power limit lowers a chip's clock, its power grows with the cube of the clock (P = C V^2 f, with V
proportional to f). So a limit of 500 of 700 W leaves (5 / 7)^(1/3) of the rate of products.

*The rest* (`Sustained.matmul`, ``memory``, ``beside``; flash-1) is fitted to the calibration set of
``benchmarks/claims/published/`` only. docs/plan-accuracy.md compares the resulting times with runs that nothing was
fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from zeroshard.lab.predict.work import Work
from zeroshard.train.profiling.devices import Device

Impl = Literal["eager", "compile", "kernels"]
Attention = Literal["flash-1", "flash-2", "flash-3", "cudnn"]
Loss = Literal["chunked", "compiled", "plain"]
# Rows and columns of a tile, and its share of the largest tile's rate: smaller tiles load more bytes per FLOP.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75))
K_PARTS = (1, 2, 4, 8)
K_START = 128  # steps of k that the start and the end of a tile take
WIDTHS = {32: (0.65, 0.72), 64: (0.81, 0.90), 128: (1.0, 1.0), 256: (0.81, 0.81)}  # head width: forward, backward
ATTENTION_HALF = 300  # tokens at which causal attention reaches half of its rate on long sequences
# The same for cuDNN's kernels, which PyTorch 2.11 takes on an H100: from traced steps of GPT-2 124M and Qwen2.5-0.5B.
WIDTHS_CUDNN = {**WIDTHS, 64: (0.88, 0.58)}
MEASURED_ATTENTION = (64, 2048, 2048, 128)  # the shape that `zeroshard bench device` measures on a GPU


@dataclass(frozen=True)
class Software:
    """The kernels that compute."""

    # ``eager`` (torch, operation by operation), ``compile`` (torch.compile), ``kernels`` (fused by hand)
    impl: Impl = "kernels"
    attention: Attention = "flash-2"  # the fused attention kernel
    # how the loss is computed from logits: ``chunked``; ``compiled``, by code that is compiled separately from the
    # model; or ``plain``, by torch's operations. None: as ``impl`` implies.
    loss: Loss | None = None
    by_default: bool = False  # whether nobody asked for ``impl``: it is what `zeroshard train` does by default
    left_uncompiled_with: str = ""  # the setting for which that is not to compile, if one is


@dataclass(frozen=True)
class Sustained:
    """The sustained rates of one kind of device."""

    num_cores: int  # streaming multiprocessors or compute units
    matmul: float  # share of the data sheet's FLOP/s that large matrix products sustain
    # share of the data sheet's FLOP/s by kernel, forward and backward, at a head width of 128 on long sequences
    attention: Mapping[Attention, tuple[float, float]]
    memory: float  # share of the memory's bandwidth that elementwise operations sustain
    beside: float  # share of a collective's duration that overlapping computation loses to it, in cores and bandwidth
    fitted: bool = True  # whether runs on such a device are in the calibration set


_HOPPER: Mapping[Attention, tuple[float, float]] = {
    "flash-1": (0.21, 0.17),
    "flash-2": (0.344, 0.328),
    "cudnn": (0.55, 0.53),
    "flash-3": (0.63, 0.575),
}
# "flash-3" is FlashAttention-4 here, fitted to one run. It is up to 1.3 times as fast as cuDNN 9.13
# (https://www.together.ai/blog/flashattention-4).
_BLACKWELL: Mapping[Attention, tuple[float, float]] = {
    "flash-2": (0.15, 0.14),
    "cudnn": (0.30, 0.28),
    "flash-3": (0.39, 0.36),
}
SUSTAINED: Mapping[str, Sustained] = {
    "a100": Sustained(108, 0.765, {"flash-1": (0.375, 0.30), "flash-2": (0.65, 0.55)}, 0.75, 0.10),
    "h100": Sustained(132, 0.605, _HOPPER, 0.75, 0.10),
    "h200": Sustained(132, 0.665, _HOPPER, 0.75, 0.10),
    # From one run that is only partly documented: Llama 3 8B on 8 MI300X, FSDP, compiled, micro-batches of 4, 410
    # TFLOP/s of the model (ROCm/TransformerEngine, issue 79); we assume sequences of 4,096 tokens. FlashAttention-2 is
    # assumed to reach an H100's FLOP/s.
    "mi300x": Sustained(304, 0.35, {"flash-2": (0.26, 0.248)}, 0.75, 0.10, fitted=False),
    # We found no run on these. They get the MI300X's shares, except that an MI325X's products get a larger one, in the
    # ratio of the shares that large products reach in Bekman's table (0.604 and 0.514), and so do an MI355X's.
    "mi325x": Sustained(304, 0.41, {"flash-2": (0.26, 0.248)}, 0.75, 0.10, fitted=False),
    "mi355x": Sustained(256, 0.41, {"flash-2": (0.26, 0.248)}, 0.75, 0.10, fitted=False),
    "b200": Sustained(148, 0.515, _BLACKWELL, 0.75, 0.10),
    "b300": Sustained(148, 0.515, _BLACKWELL, 0.75, 0.10, fitted=False),
    "gb200": Sustained(152, 0.515, _BLACKWELL, 0.75, 0.10, fitted=False),
    "gb300": Sustained(152, 0.515, _BLACKWELL, 0.75, 0.10, fitted=False),
}
# Seconds in which the host issues an operation: computation cannot be faster than its host.
HOST_S: Mapping[Impl, float] = {"eager": 8e-6, "compile": 4e-6, "kernels": 4e-6}


# Ratio of predicted to published tokens/s on the validation set of ``benchmarks/claims/published/``: four of five runs
# lie in this range. The second range is for devices that no published run calibrates: that of this table's first
# version, and of AMD's devices.
SPREAD, SPREAD_UNCALIBRATED = (0.91, 1.12), (0.85, 1.60)


def spread(device: Device) -> tuple[float, float]:
    """The range of predicted over published rates on such a device; (1, 1) if the device's rates were measured."""
    if device.sustained and SUSTAINED[device.sustained].fitted:
        return SPREAD
    return SPREAD_UNCALIBRATED if device.device_type != "cpu" and device.matmul_share != 1 else (1.0, 1.0)


def attention_of_torch(device: Device, dtype: str, *, deterministic: bool, in_documents: bool) -> Attention:
    """The kernel by which torch's attention computes, where its rate is known.

    From 2.11 on `scaled_dot_product_attention` takes cuDNN's in 16 bits on Hopper and Blackwell (with cuDNN after 9.15;
    ``check_prefer_cudnn_attention`` in its ``sdp_utils.cpp``) unless algorithms are to be deterministic, elsewhere
    FlashAttention-2's. Flex attention, which stays inside documents, is taken to be as fast as the latter.
    """
    narrow = dtype in ("bfloat16", "float16") and not in_documents and not deterministic
    known = SUSTAINED[device.sustained].attention if device.sustained else {}
    return "cudnn" if narrow and "cudnn" in known else "flash-2"


def sustained_s(work: Work, device: Device, attention: Attention = "flash-2") -> tuple[float, str]:
    """Seconds of one operation on a device of `SUSTAINED`, and its limit: ``flops``, ``bytes`` or ``kernels``."""
    rates = SUSTAINED[device.sustained]
    peak = device.rate(work.dtype) * device.clock_share
    bytes_s = work.num_bytes / (device.bytes_per_s * rates.memory)
    if work.attention:
        shares = rates.attention.get(attention, rates.attention["flash-2"])
        flops_s = work.flops / (peak * shares[work.backward] * attention_share(work.shape, backward=work.backward))
    elif work.shape:
        flops_s = product_s(work, peak * rates.matmul / rates.num_cores, rates.num_cores)
    else:
        flops_s = work.flops / (peak * rates.matmul)
    longest = max(flops_s, bytes_s, device.kernel_s)
    return longest, "flops" if longest == flops_s else "bytes" if longest == bytes_s else "kernels"


def product_s(work: Work, core_flops_per_s: float, num_cores: int) -> float:
    """Seconds of a matrix product, from its shape."""
    factor = work.flops / max(2 * math.prod(work.shape), 1)  # an operation may stand for several such products
    return factor * _tiled_s(work.shape, core_flops_per_s, num_cores)


@lru_cache(maxsize=4096)
def _tiled_s(shape: tuple[int, ...], core_flops_per_s: float, num_cores: int) -> float:
    batch, m, n, k = shape
    best = math.inf
    for rows, columns, share in TILES:
        num_tiles = batch * -(-m // rows) * -(-n // columns)
        for parts in K_PARTS:
            steps = -(-k // parts) + K_START
            waves = -(-num_tiles * parts // num_cores)
            best = min(best, waves * 2 * rows * columns * steps / (core_flops_per_s * share))
    return best


def attention_share(
    shape: tuple[int, ...], *, backward: bool = False, widths: Mapping[int, tuple[float, float]] = WIDTHS
) -> float:
    """Share that this shape reaches of the rate at a head width of 128 on infinitely long sequences."""
    _, queries, keys, width = shape
    padded = next((each for each in widths if width <= each), max(widths))
    tokens = max(min(queries, keys), 1)
    return widths[padded][backward] * min(width / padded, 1.0) * tokens / (tokens + ATTENTION_HALF)
