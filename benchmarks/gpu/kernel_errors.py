"""Every kernel against its reference in fp32 on the same numbers: the largest relative error, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import kernel_cases
import torch
from kernel_cases import DEVICE, DTYPES, Case
from kernel_times import outputs_of
from torch import Tensor, nn

from zeroshard import kernels
from zeroshard.kernels import Choice
from zeroshard.kernels.written import carry_written
from zeroshard.optim import AdamW8bit, FlashAdamW
from zeroshard.settings.wire_formats import FORMATS, BlockFormat, rounding_key

# |out - reference| / |reference|. bf16 rounds outputs and gradients to 8 bits; cuBLAS adds up in any order.
BOUNDS = {"float32": 2e-5, "bfloat16": 1e-2}


def errors(toy: bool) -> Iterator[dict[str, object]]:
    """A record for each operation, shape and dtype: the error, its bound, whether it holds."""
    for dtype, bound in BOUNDS.items():
        for case in _cases(dtype, toy):
            yield _record(f"{case.operation} {case.shape} {dtype}", _error(case), bound)
    for numel in (1001, 4099) if toy else (1_000_003, 33_000_001):
        flat = torch.randn(numel, device=DEVICE)
        for dtype, corrects in (("float32", False), ("bfloat16", True)):
            same = all(map(torch.equal, *(_in_8_bits(numel, dtype, corrects, who) for who in ("triton", "reference"))))
            yield _record(f"adamw8bit {dtype} {numel}", 0.0 if same else 1.0, 0.0)
        yield _record(f"written weights {numel}", 0.0 if _same_masters(flat) else 1.0, 0.0)
        for name in FORMATS:
            for kind, key in (("nearest", None), ("stochastic", rounding_key(0, 0, "root", 0))):
                yield from _packs(f"{name}, {kind}, {numel}", flat, BlockFormat(name), key, on_cpu=numel < 2**24)
        for double in (False, True):
            form = BlockFormat("nf4", 64, double)
            case = f"nf4{', scales as codes' * double}, nearest, {numel}"
            yield from _packs(case, flat, form, None, on_cpu=numel < 2**24 and not double)  # the scales' mean is a sum


def _packs(case: str, flat: Tensor, form: BlockFormat, key: int | None, *, on_cpu: bool) -> Iterator[dict[str, object]]:
    """The kernels' bytes beside the reference's on this device and, if ``on_cpu``, on a CPU: how many differ."""
    ours = _packed(flat, form, key, "triton")
    others = {"": _packed(flat, form, key, "reference")}
    if on_cpu:
        others[", reference on a CPU"] = [t.to(DEVICE) for t in _packed(flat.cpu(), form, key, "reference")]
    scales = 4 * form.num_blocks(len(flat))
    for where, (packed, back) in others.items():
        parts = {
            "scales": (ours[0][:scales].view(torch.int32), packed[:scales].view(torch.int32)),
            "codes": (ours[0][scales:], packed[scales:]),
            "numbers": (ours[1].view(torch.int32), back.view(torch.int32)),
        }
        differing = {part: int((found != wanted).sum()) for part, (found, wanted) in parts.items()}
        share = max(count / len(parts[part][0]) for part, count in differing.items())
        yield {**_record(case + where, share, 0.0), "differing": differing}


def _record(case: str, error: float, bound: float) -> dict[str, object]:
    return {"case": case, "error": error, "bound": bound, "same": error <= bound}


def _cases(dtype: str, toy: bool) -> Iterator[Case]:
    """Two odd shapes of each operation that has gradients."""
    flat = ((3, 65), (5, 40)) if toy else ((1003, 1601), (517, 8200))
    for name in ("layer_norm", "rms_norm"):
        yield from kernel_cases.norm_cases(name, dtype, flat)
    yield from kernel_cases.swiglu_cases(dtype, flat)
    heads = ((1, 2, 1, 5, 8), (2, 3, 3, 3, 4)) if toy else ((3, 12, 4, 515, 64), (1, 5, 1, 1001, 80))
    yield from kernel_cases.rope_cases(dtype, heads)
    yield from kernel_cases.cross_entropy_cases(dtype, ((7, 97), (3, 130)) if toy else ((1027, 50257), (515, 131072)))
    linear = ((7, 16, 97), (3, 8, 130)) if toy else ((1027, 768, 50257), (515, 2048, 131072))
    yield from kernel_cases.linear_cross_entropy_cases(dtype, linear)


def _error(case: Case) -> float:
    torch.manual_seed(0)
    made = case.inputs()
    found: list[list[Tensor]] = []
    for who, wide in (("triton", False), ("reference", True)):
        given = [t.detach().float() if wide and t.is_floating_point() else t.detach().clone() for t in made]
        wanted = [given[index].requires_grad_() for index in case.wanted]
        outputs = outputs_of(case.call(who, *given))
        torch.manual_seed(1)
        upstream = [torch.randn(y.shape, device=DEVICE).to(made[0].dtype).to(y.dtype) for y in outputs]
        kept = [y.detach().clone() for y in outputs]  # an operation in place may write its gradient there
        found.append([*kept, *torch.autograd.grad(outputs, wanted, upstream)])
    return max(map(_apart, *found))


def _apart(found: Tensor, wanted: Tensor) -> float:
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def _in_8_bits(numel: int, dtype: str, corrects: bool, who: Choice) -> list[Tensor]:
    """Weights and states after two updates with 8-bit states, whose bits must be those of the reference."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(numel, device=DEVICE).to(DTYPES[dtype]))
    optimizer = (FlashAdamW if corrects else AdamW8bit)([param], 1e-3)
    for _ in range(2):
        param.grad = torch.randn(numel, device=DEVICE).to(param.dtype)
        with kernels.use_kernels(who):
            optimizer.step()
    return [param.detach(), *(each for each in optimizer.state[param].values() if each.dim())]


def _same_masters(flat: Tensor) -> bool:
    """Whether our kernel takes what was written into bf16 weights as PyTorch's operations do, to the bit."""
    written = flat.bfloat16()
    written[::7] = 0.25
    written[3::1000] = float("nan")
    ours, wanted = flat.clone(), torch.where(flat.bfloat16() == written, flat, written.float())
    carry_written(ours, written)
    return all(torch.equal(*map(part, (ours, wanted))) for part in (torch.isnan, torch.nan_to_num))


def _packed(flat: Tensor, form: BlockFormat, key: int | None, who: Choice) -> list[Tensor]:
    packed = torch.zeros(form.num_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    back = torch.empty_like(flat)
    kernels.quantise(flat, packed, form, key, kernels=who)
    kernels.dequantise(packed, back, form, kernels=who)
    return [packed, back]
