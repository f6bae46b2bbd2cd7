"""The cases of kernel_times.py: operations at sizes of real models, and the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard import kernels
from zeroshard.kernels import Choice
from zeroshard.kernels.adamw8bit import AdamWOptions
from zeroshard.settings.wire_formats import BlockFormat, rounding_key

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OPTIONS = AdamWOptions(lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)


@dataclass
class Case:
    """One operation at one size.

    Attributes:
        operation, shape, dtype: labels of the case in the report.
        bytes: bytes that must move through memory, by mode (``forward``, ``backward``, ``both``); only these modes are
            measured.
        inputs: makes fresh tensors on `DEVICE`, of ``shape`` and ``dtype``.
        call: (kernels, *inputs) -> outputs; ``kernels`` as in `zeroshard.kernels.choose`, or a name of ``contestants``.
        wanted: indices of the inputs that get a gradient.
        contestants: names; the others are compared with the first.
    """

    operation: str
    shape: str
    dtype: str
    bytes: dict[str, int]
    inputs: Callable[[], list[Tensor]]
    call: Callable[..., Any]
    wanted: tuple[int, ...] = ()
    contestants: tuple[str, ...] = ("eager", "compile", "triton")


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers on the device."""
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).to(dtype)


NORM_SHAPES = ((16384, 768), (16384, 1600), (16384, 4096), (16384, 8192)) if ON_GPU else ((24, 64),)
ROPE_SHAPES = ((8, 12, 12, 1024, 64), (4, 32, 8, 4096, 128)) if ON_GPU else ((1, 2, 1, 4, 8),)
GATED_SHAPES = ((16384, 2048), (8192, 11008), (8192, 14336)) if ON_GPU else ((8, 32),)
LOSS_SHAPES = ((8192, 50257), (8192, 50304), (4096, 128256)) if ON_GPU else ((4, 97),)
LINEAR_LOSS_SHAPES = ((16384, 768, 50304), (8192, 2048, 128256)) if ON_GPU else ((8, 16, 97),)


def norm_cases(
    name: str,
    dtype: str,
    shapes: Sequence[tuple[int, int]] = NORM_SHAPES,
    residuals: Sequence[bool] = (False, True),
) -> Iterator[Case]:
    """Layer norm or RMS norm of rows, each with a fused residual addition and without."""
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    for rows, width in shapes:
        n = rows * width
        for fused in residuals:

            def inputs(rows: int = rows, width: int = width, fused: bool = fused) -> list[Tensor]:
                made = [normal(rows, width, dtype=kind), *(normal(width, dtype=kind) for _ in range(2))]
                return [*made, normal(rows, width, dtype=kind)] if fused else made

            def call(who: Choice, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Any:
                if name == "layer_norm":
                    return kernels.layer_norm(x, weight, bias, residual=residual, kernels=who)
                return kernels.rms_norm(x, weight, residual=residual, kernels=who)

            # Forward reads x (and the residual) and writes y (and the sum). Backward reads two tensors and writes one;
            # with a residual it also reads the gradient of the sum.
            moved = {"forward": (4 if fused else 2) * n * size, "backward": (4 if fused else 3) * n * size}
            wanted = (0, 1, 3) if fused else (0, 1)
            wanted = (*wanted, 2) if name == "layer_norm" else wanted
            shape = f"{rows} x {width}{' + residual' if fused else ''}"
            yield Case(name, shape, dtype, with_both(moved), inputs, call, wanted)


def rope_cases(dtype: str, shapes: Sequence[tuple[int, int, int, int, int]] = ROPE_SHAPES) -> Iterator[Case]:
    """Rotary position embedding (RoPE) of queries and keys."""
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    for B, H, K, T, D in shapes:

        def inputs(B: int = B, H: int = H, K: int = K, T: int = T, D: int = D) -> list[Tensor]:
            qk = [normal(B, T, heads, D, dtype=kind) for heads in (H, K)]
            angles = torch.rand(T, D // 2, device=DEVICE)
            return [*(x.transpose(1, 2) for x in qk), angles.cos(), angles.sin()]

        def call(who: Choice, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return kernels.rope(q, k, cos, sin, kernels=who)

        moved = 2 * B * (H + K) * T * D * size
        yield Case("rope", f"{B} x {H}+{K} x {T} x {D}", dtype, with_both({"forward": moved, "backward": moved}),
                   inputs, call, (0, 1))  # fmt: skip


def swiglu_cases(dtype: str, shapes: Sequence[tuple[int, int]] = GATED_SHAPES) -> Iterator[Case]:
    """SwiGLU of a gate and the other branch."""
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    for rows, width in shapes:

        def inputs(rows: int = rows, width: int = width) -> list[Tensor]:
            return [normal(rows, width, dtype=kind) for _ in range(2)]

        def call(who: Choice, gate: Tensor, up: Tensor) -> Any:
            return kernels.swiglu(gate, up, kernels=who)

        n = rows * width * size
        moved = with_both({"forward": 3 * n, "backward": 5 * n})
        yield Case("swiglu", f"{rows} x {width}", dtype, moved, inputs, call, (0, 1))


def cross_entropy_cases(dtype: str, shapes: Sequence[tuple[int, int]] = LOSS_SHAPES) -> Iterator[Case]:
    """Cross entropy of logits."""
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    for rows, vocab in shapes:

        def inputs(rows: int = rows, vocab: int = vocab) -> list[Tensor]:
            return [normal(rows, vocab, dtype=kind), torch.randint(vocab, (rows,), device=DEVICE)]

        def call(who: Choice, logits: Tensor, targets: Tensor) -> Any:
            return kernels.cross_entropy(logits, targets, check_targets=False, kernels=who)

        moved = {"both": 3 * rows * vocab * size}  # read twice, and the gradient written
        yield Case("cross_entropy", f"{rows} x {vocab}", dtype, moved, inputs, call, (0,))


def linear_cross_entropy_cases(
    dtype: str, shapes: Sequence[tuple[int, int, int]] = LINEAR_LOSS_SHAPES
) -> Iterator[Case]:
    """The projection to the vocabulary fused with its cross entropy."""
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    for rows, width, vocab in shapes:

        def inputs(rows: int = rows, width: int = width, vocab: int = vocab) -> list[Tensor]:
            weight = normal(vocab, width, dtype=kind) * 0.02
            return [normal(rows, width, dtype=kind), weight, torch.randint(vocab, (rows,), device=DEVICE)]

        def call(who: Choice, hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
            return kernels.linear_cross_entropy(hidden, weight, targets, check_targets=False, kernels=who)

        moved = {"both": 2 * (rows + vocab) * width * size}  # matmuls are the bottleneck: "of copy" says little here
        yield Case("linear_cross_entropy", f"{rows} x {width} x {vocab}", dtype, moved, inputs, call, (0, 1))


def block_format_cases(dtype: str) -> Iterator[Case]:
    """Quantising to int8 with stochastic rounding, as gradients are sent, and dequantising."""
    numel, form = (124_000_000 if ON_GPU else 5000), BlockFormat("int8")
    key = rounding_key(0, 0, "blocks.0", 0)

    def call(who: Choice, flat: Tensor, packed: Tensor) -> Any:
        kernels.quantise(flat, packed, form, key, kernels=who)
        kernels.dequantise(packed, flat, form, kernels=who)
        return flat

    def inputs() -> list[Tensor]:
        packed = torch.empty(form.num_bytes(numel), dtype=torch.uint8, device=DEVICE)
        return [normal(numel, dtype=DTYPES[dtype]), packed]

    moved = {"forward": 2 * (numel * DTYPES[dtype].itemsize + form.num_bytes(numel))}
    yield Case("block_formats", f"{numel}", dtype, moved, inputs, call, contestants=("eager", "triton"))


def frozen_weight_cases(dtype: str) -> Iterator[Case]:
    """Decoding the weights of a block of an 8B model, as frozen weights of four bits are before each use."""
    numel = 218_112_000 if ON_GPU else 64 * 100
    for double in (False, True):
        form = BlockFormat("nf4", 64, double)

        def call(who: Choice, flat: Tensor, packed: Tensor, form: BlockFormat = form) -> Any:
            kernels.dequantise(packed, flat, form, kernels=who)
            return flat

        def inputs(form: BlockFormat = form) -> list[Tensor]:
            weights = normal(numel, dtype=DTYPES[dtype])
            packed = torch.empty(form.num_bytes(numel), dtype=torch.uint8, device=DEVICE)
            kernels.quantise(weights, packed, form)
            return [weights, packed]

        moved = {"forward": numel * DTYPES[dtype].itemsize + form.num_bytes(numel)}
        shape = f"nf4 {numel}{', scales as codes' * double}"
        yield Case("frozen_weights", shape, dtype, moved, inputs, call, contestants=("eager", "triton"))


def with_both(moved: dict[str, int]) -> dict[str, int]:
    """Add the mode ``both``: forward and backward together."""
    return {**moved, "both": moved["forward"] + moved["backward"]}


CASES: dict[str, Callable[[str], Iterator[Case]]] = {
    "layer_norm": lambda dtype: norm_cases("layer_norm", dtype),
    "rms_norm": lambda dtype: norm_cases("rms_norm", dtype),
    "rope": rope_cases,
    "swiglu": swiglu_cases,
    "cross_entropy": cross_entropy_cases,
    "linear_cross_entropy": linear_cross_entropy_cases,
    "block_formats": block_format_cases,
    "frozen_weights": frozen_weight_cases,
}
