"""Compile every kernel for a GPU that this machine has not, and print what each takes of it, a line of JSON.

    python tests/kernels/compile_for.py 90      # an A100 is 80, an H100 90, a B200 100

Triton compiles without a device when it is told of one. Launchers are called as ever, with tensors on the CPU; what
they launch is compiled and not run. A program of its own, because Triton decides at import whether it interprets.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from zeroshard import kernels
from zeroshard.kernels import dispatch, norm_kernels
from zeroshard.kernels.adamw8bit import AdamWOptions, Codes, adamw8bit
from zeroshard.kernels.written import carry_written
from zeroshard.settings.wire_formats import WEIGHT_FORMATS, BlockFormat, rounding_key

compile_or_run = JITFunction.run
CAPABILITY = int(sys.argv[1]) if __name__ == "__main__" else 90
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


class NoDevice:
    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(function, *args, warmup, **kwargs):
    made = compile_or_run(function, *args, warmup=True, **kwargs)
    registers, stack, _ = usage(made.asm["cubin"])
    facts = {"module": function.__module__.rpartition(".")[2], "name": function.__name__, "registers": registers}
    print(json.dumps({**facts, "spilled_bytes": stack, "shared_bytes": made.metadata.shared}), flush=True)


def usage(cubin):
    """Registers of a thread, bytes of its stack (what it spills lies there), static shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = USAGE.search(told)
    assert found, told
    return [int(number) for number in found.groups()]


def draw(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype).requires_grad_()


def backward(outputs, inputs):
    torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs])


def main():
    x, weight, bias, residual = draw(8, 768), draw(768), draw(768), draw(8, 768)
    backward(kernels.layer_norm(x, weight, bias, residual=residual, kernels="triton"), [x, weight, bias, residual])
    norm_kernels.HELD = 64  # rows too wide to be held
    backward([kernels.rms_norm(x, weight, kernels="triton")], [x, weight])
    for dtype in (torch.bfloat16, torch.float32):
        rows, vector, stats = torch.zeros(8, 16384, dtype=dtype), torch.zeros(16384, dtype=dtype), torch.zeros(2, 8)
        norm_kernels.norm_backward(rows, None, rows, vector, stats, rows, vector, vector)
    q, k, angles = draw(1, 4, 8, 64), draw(1, 2, 8, 64), torch.zeros(8, 32)
    backward(kernels.rope(q, k, angles, angles, kernels="triton"), [q, k])
    backward([kernels.swiglu(x, residual, kernels="triton")], [x, residual])
    logits, targets = draw(2, 8192 + 700), torch.zeros(2, dtype=torch.int64)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "kernels": "triton"}
    backward([kernels.cross_entropy(logits, targets, **options)], [logits])
    hidden, head = draw(2, 64), draw(8192 + 700, 64)
    backward([kernels.linear_cross_entropy(hidden, head, targets, **options)], [hidden, head])
    for name in WEIGHT_FORMATS:
        form, flat = BlockFormat(name), torch.zeros(5000)
        packed = torch.zeros(form.num_bytes(5000), dtype=torch.uint8)
        for key in (None, rounding_key(0, 0, "root", 0))[: 1 if name == "nf4" else 2]:
            kernels.quantise(flat, packed, form, key, kernels="triton")
        kernels.dequantise(packed, flat, form, kernels="triton")
    carry_written(torch.zeros(5000), torch.zeros(5000).bfloat16())
    codes = torch.zeros(5000, dtype=torch.int8)
    for dtype, correction in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, codes),
        (torch.float16, None),
    ):
        piece = torch.zeros(5000, dtype=dtype)
        for block in (16, 256):
            scales = torch.zeros(-(-5000 // block))
            states = [Codes(codes, scales, codes, scales, correction)]
            adamw8bit([piece], [piece], states, [1], AdamWOptions(1e-3), block, kernels="triton")


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    dispatch.INTERPRETED = True  # so that "triton" may be asked for with tensors on the CPU
    main()
