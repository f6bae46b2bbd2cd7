"""AdamW over any number of pieces of parameters in one launch.

    g = grad * grad_scale                                    (clipping, or loss scaling, without an extra pass)
    p = p - lr * weight_decay * p
    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    copy = p, for example in bf16                            (the compute weights, beside the fp32 master weights)

Decoupled Weight Decay Regularization, Loshchilov and Hutter 2019, arXiv:1711.05101. Least memory traffic for fp32
pieces: 28 bytes per element (four numbers read, three written), 30 with a bf16 copy.

The kernel performs the operations of torch's fused CUDA kernel, with the same fused multiply-adds and the same
hyper-parameters rounded to fp32. So the two give the same bits if the powers in the bias corrections agree. The
reference performs those of `torch.optim.AdamW(foreach=False)`, whose bias corrections are in float64.

[Note: Addresses]
    Pieces may be anywhere in memory: in the shards of several units, with gaps between the parameters of a group. The
    kernel gets a table of their addresses, and for each of its programs a piece and an offset in it. The tables stay on
    the device. If a piece has moved, they are copied again from pinned memory, without blocking the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from zeroshard.kernels.checks import check_device, check_floating
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.kernels.launch import device_of, jit, next_power_of_2, tl

BLOCK = 2048  # elements of a program: 8 of each array in each of 256 threads
SERVED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that the kernel takes; it computes in fp32


@dataclass(frozen=True)
class AdamWOptions:
    """Hyper-parameters of one update.

    Raises:
        ValueError: one of them is outside its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value!r} is not a finite number >= 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < 1):
                raise ValueError(f"{name}: {value!r} is outside [0, 1)")


# ---------------------------------------------------------------------------------------------------- reference


@torch.no_grad()
def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    options: AdamWOptions,
    grad_scale: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """`adamw` of one piece, in PyTorch: the operations of `torch.optim.AdamW(foreach=False)`, in their order."""
    grad = grad.to(param.dtype)
    if grad_scale is not None:
        grad = grad * grad_scale.to(grad.dtype)
    lr, beta1, beta2 = options.lr, options.beta1, options.beta2
    if options.weight_decay:
        param.mul_(1 - lr * options.weight_decay)
    exp_avg.lerp_(grad.to(exp_avg.dtype), 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad.to(exp_avg.dtype), grad.to(exp_avg.dtype), value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(options.eps)
    param.addcdiv_(exp_avg.to(param.dtype), denominator.to(param.dtype), value=-lr / (1 - beta1**step))
    if copy is not None:
        copy.copy_(param)


# ------------------------------------------------------------------------------------------------------ kernels


@jit
def _update(
    param_ptr, grad_ptr, m_ptr, v_ptr, copy_ptr, offsets, mask, scale, lr, beta1, beta2, eps, weight_decay, step_size,
    root, HAS_SCALE: tl.constexpr, HAS_COPY: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    param = tl.load(param_ptr + offsets, mask=mask).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + offsets, mask=mask).to(tl.float32)
    if HAS_SCALE:
        grad *= scale
    if DECAYS:
        param = tl.fma(-lr * weight_decay, param, param)
    square = grad * grad
    m = tl.fma(beta1, m, tl.fma(-beta1, grad, grad))
    v = tl.fma(beta2, v, tl.fma(-beta2, square, square))
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    param -= tl.div_rn(step_size * m, denominator)
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + offsets, v.to(v_ptr.dtype.element_ty), mask=mask)
    if HAS_COPY:
        tl.store(copy_ptr + offsets, param.to(copy_ptr.dtype.element_ty), mask=mask)


@jit
def _pointer(table_ptr, segment, ROLE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    # A row of the table has five addresses, in order of ROLE: parameter, gradient, m, v, copy.
    pointer = tl.load(table_ptr + segment * 5 + ROLE).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _adamw_kernel(
    addresses_ptr, numels_ptr, segments_ptr, starts_ptr, corrections_ptr, scale_ptr, lr, beta1, beta2, eps,
    weight_decay, step_size, root, PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr,
    COPY: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_COPY: tl.constexpr, HAS_CORRECTIONS: tl.constexpr,
    DECAYS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.load(segments_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.multiple_of(tl.load(starts_ptr + tl.program_id(0)), 16)
    numel = tl.load(numels_ptr + segment)
    param_ptr = _pointer(addresses_ptr, segment, 0, PARAM, ALIGNED)
    grad_ptr = _pointer(addresses_ptr, segment, 1, GRAD, ALIGNED)
    m_ptr = _pointer(addresses_ptr, segment, 2, STATE, ALIGNED)
    v_ptr = _pointer(addresses_ptr, segment, 3, STATE, ALIGNED)
    copy_ptr = _pointer(addresses_ptr, segment, 4, COPY, ALIGNED)
    scale = tl.load(scale_ptr) if HAS_SCALE else 1.0
    if HAS_CORRECTIONS:  # parameters that have taken different numbers of steps
        step_size = tl.load(corrections_ptr + 2 * segment)
        root = tl.load(corrections_ptr + 2 * segment + 1)
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # a full block needs no mask, and its loads are vectors
        _update(
            param_ptr, grad_ptr, m_ptr, v_ptr, copy_ptr, offsets, None, scale, lr, beta1, beta2, eps, weight_decay,
            step_size, root, HAS_SCALE, HAS_COPY, DECAYS,
        )  # fmt: skip
    else:
        _update(
            param_ptr, grad_ptr, m_ptr, v_ptr, copy_ptr, offsets, offsets < numel, scale, lr, beta1, beta2, eps,
            weight_decay, step_size, root, HAS_SCALE, HAS_COPY, DECAYS,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- launchers


@dataclass
class Pieces:
    """Tables of the addresses and sizes of pieces on one device, stored on that device; see [Note: Addresses]."""

    addresses: list[int] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    block: int = BLOCK
    tables: tuple[Tensor, Tensor, Tensor] | None = None  # numels [n]; piece of each program; its start in the piece
    address_table: Tensor | None = None

    def update(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """Bring the tables up to date if pieces have moved or changed in size; ``columns``: tensors of each role."""
        device = columns[0][0].device
        numels = [tensor.numel() for tensor in columns[0]]
        if numels != self.numels:
            self.numels = numels
            self.block = min(BLOCK, next_power_of_2(max([1, *numels])))
            counts = [-(-numel // self.block) for numel in numels]
            segments = np.repeat(np.arange(len(numels), dtype=np.int32), counts)
            starts = np.concatenate([np.arange(n, dtype=np.int64) * self.block for n in counts] or [np.empty(0)])
            self.tables = (
                _to_device(np.array(numels, dtype=np.int64), device),
                _to_device(segments, device),
                _to_device(starts.astype(np.int64), device),
            )
        addresses = [tensor.data_ptr() for row in zip(*columns, strict=True) for tensor in row]
        if addresses != self.addresses or self.address_table is None:
            self.addresses = addresses
            self.address_table = _to_device(np.array(addresses, dtype=np.int64), device)

    @property
    def aligned(self) -> bool:
        """Whether every piece starts at a multiple of 16 bytes."""
        return all(address % 16 == 0 for address in self.addresses)


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    table = torch.from_numpy(array)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _launch(
    pieces: Pieces,
    columns: Sequence[Sequence[Tensor]],
    steps: Sequence[int],
    options: AdamWOptions,
    grad_scale: Tensor | None,
    has_copy: bool,
) -> None:
    """columns: params, grads, exp_avgs, exp_avg_sqs, copies (params again if there are none)."""
    pieces.update(columns)
    assert pieces.tables is not None
    assert pieces.address_table is not None
    numels, segments, starts = pieces.tables
    if not segments.numel():
        return
    corrections = [_corrections(step, options) for step in steps]
    uniform = len(set(steps)) == 1
    table = numels if uniform else _to_device(np.array(corrections, dtype=np.float32), numels.device)
    params, grads, states, _, copies = columns
    _adamw_kernel[(segments.numel(),)](
        pieces.address_table,
        numels,
        segments,
        starts,
        table,
        numels if grad_scale is None else grad_scale,
        options.lr,
        options.beta1,
        options.beta2,
        options.eps,
        options.weight_decay,
        *corrections[0],
        PARAM=_triton_dtype(params[0]),
        GRAD=_triton_dtype(grads[0]),
        STATE=_triton_dtype(states[0]),
        COPY=_triton_dtype(copies[0]),
        HAS_SCALE=grad_scale is not None,
        HAS_COPY=has_copy,
        HAS_CORRECTIONS=not uniform,
        DECAYS=options.weight_decay != 0,
        ALIGNED=pieces.aligned,
        BLOCK=pieces.block,
        num_warps=max(1, min(8, pieces.block // 256)),
    )


def _corrections(step: int, options: AdamWOptions) -> tuple[float, float]:
    """Return the step size and the root of the second bias correction, both in fp32 as in torch's fused kernel."""
    one, count = np.float32(1), np.float32(step)
    size = np.float32(options.lr) / (one - np.float32(options.beta1) ** count)
    return float(size), float(np.sqrt(one - np.float32(options.beta2) ** count))


def _triton_dtype(tensor: Tensor) -> object:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensor.dtype]


# ------------------------------------------------------------------------------------------------------- public


@torch.no_grad()
def adamw(
    params: Tensor | Sequence[Tensor],
    grads: Tensor | Sequence[Tensor],
    exp_avgs: Tensor | Sequence[Tensor],
    exp_avg_sqs: Tensor | Sequence[Tensor],
    *,
    step: int | Sequence[int],
    options: AdamWOptions,
    grad_scale: Tensor | None = None,
    copies: Tensor | Sequence[Tensor] | None = None,
    pieces: Pieces | None = None,
    kernels: Choice | None = None,
) -> None:
    """Update ``params``, ``exp_avgs`` and ``exp_avg_sqs`` in place; the Triton backend launches one kernel for all.

    Args:
        params: contiguous tensors of one dtype on one device, or one tensor; fp32, bf16 or fp16 (fp64: reference).
        grads: one for each parameter, its shape, all of one dtype.
        exp_avgs: m, one for each parameter, its shape, all of one dtype.
        exp_avg_sqs: v, as m.
        step: t, the number of this update, from 1; one for all, or one for each parameter.
        options: hyper-parameters.
        grad_scale: 0-dim fp32 on the same device; gradients are multiplied by it as they are read; None: 1.
        copies: tensors to which the new parameters are written too, in a dtype of their own; None: no copies.
        pieces: tables from an earlier call, which are brought up to date; None: new tables are built.
        kernels: backend; see `zeroshard.kernels.use_kernels`. Unless it is ``"triton"``, fp64 uses the reference.

    Raises:
        ValueError: an invalid argument; the message begins with its name.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    params, grads, exp_avgs, exp_avg_sqs = (_listed(column) for column in (params, grads, exp_avgs, exp_avg_sqs))
    columns = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if copies is not None:
        columns["copies"] = _listed(copies)
    steps = [step] * len(params) if isinstance(step, int) else list(step)
    _check(columns, steps, grad_scale)
    if not steps:
        return
    if _backend(columns, kernels) == "reference":
        for *tensors, count in zip(*columns.values(), steps, strict=True):
            param, grad, m, v, *copy = tensors
            adamw_reference(param, grad, m, v, count, options, grad_scale, copy[0] if copy else None)
        return
    given = [params, grads, exp_avgs, exp_avg_sqs, columns.get("copies", params)]
    with device_of(*params):
        _launch(pieces or Pieces(), given, steps, options, grad_scale, copies is not None)


def _backend(columns: dict[str, list[Tensor]], kernels: Choice | None) -> str:
    """Return the backend: for a dtype outside `SERVED` the reference, or ValueError if ``kernels`` is ``"triton"``."""
    backend = choose("adamw", columns["params"][0].device, kernels)
    unserved = [(name, tensors[0].dtype) for name, tensors in columns.items() if tensors[0].dtype not in SERVED]
    if backend != "triton" or not unserved:
        return backend
    if kernels == "triton":
        name, dtype = unserved[0]
        raise ValueError(f"{name}: {dtype} is not supported by triton; give float32, bfloat16 or float16")
    return "reference"


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _check(columns: dict[str, list[Tensor]], steps: list[int], grad_scale: Tensor | None) -> None:
    params = columns["params"]
    for name, tensors in columns.items():
        if len(tensors) != len(params):
            raise ValueError(f"{name}: {len(tensors)} tensors for {len(params)} parameters")
        for tensor, param in zip(tensors, params, strict=True):
            check_floating(name, tensor)
            if tensor.dtype != tensors[0].dtype:
                raise ValueError(f"{name}: {tensor.dtype} beside {tensors[0].dtype}; give one dtype")
            if tensor.shape != param.shape:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)} is not its parameter's {tuple(param.shape)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: strides {tensor.stride()} leave gaps; give contiguous tensors")
            check_device(name, tensor, "params", params[0])
    if len(steps) != len(params):
        raise ValueError(f"step: {len(steps)} counts for {len(params)} parameters")
    for step in steps:
        if step < 1:
            raise ValueError(f"step: {step} is below 1, the number of the first update")
    if grad_scale is not None:
        if grad_scale.numel() != 1 or grad_scale.dtype != torch.float32:
            raise ValueError(f"grad_scale: {grad_scale.dtype} of shape {tuple(grad_scale.shape)}; give one float32")
        if params:
            check_device("grad_scale", grad_scale, "params", params[0])
