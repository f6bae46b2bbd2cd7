"""Compile every kernel for an H100 on a machine that has none, and print its name and the bytes of its machine code.

Triton compiles without a device when it is told of one. Launchers are called as ever, with tensors on the CPU; what
they launch is compiled and not run. A program of its own, because Triton decides at import whether it interprets.
"""

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from zeroshard import kernels
from zeroshard.kernels import AdamWOptions, dispatch, norm_kernels

compile_or_run = JITFunction.run


class NoDevice:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(function, *args, warmup, **kwargs):
    made = compile_or_run(function, *args, warmup=True, **kwargs)
    print(function.__module__.rpartition(".")[2], function.__name__, len(made.asm["cubin"]), flush=True)


def draw(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype).requires_grad_()


def backward(outputs, inputs):
    torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs])


def main():
    x, weight, bias, residual = draw(8, 768), draw(768), draw(768), draw(8, 768)
    backward(kernels.layer_norm(x, weight, bias, residual=residual, kernels="triton"), [x, weight, bias, residual])
    norm_kernels.HELD_FORWARD = norm_kernels.HELD_BACKWARD = 64  # rows too wide to be held
    backward([kernels.rms_norm(x, weight, kernels="triton")], [x, weight])
    q, k, angles = draw(1, 4, 8, 64), draw(1, 2, 8, 64), torch.zeros(8, 32)
    backward(kernels.rope(q, k, angles, angles, kernels="triton"), [q, k])
    backward([kernels.swiglu(x, residual, kernels="triton")], [x, residual])
    logits, targets = draw(2, 8192 + 700), torch.zeros(2, dtype=torch.int64)
    for inplace in (False, True):
        options = {"label_smoothing": 0.1, "z_loss": 0.1, "inplace": inplace, "kernels": "triton"}
        backward([kernels.cross_entropy(logits * 1, targets, **options)], [logits])
    kernels.sum_of_squares(torch.zeros(10_000), kernels="triton")
    columns = [torch.zeros(5000) for _ in range(4)]
    settings = {"options": AdamWOptions(1e-3), "copies": torch.zeros(5000).bfloat16(), "kernels": "triton"}
    kernels.adamw(*columns, step=1, grad_scale=torch.ones(()), **settings)
    narrow = [[torch.zeros(n).bfloat16() for n in (5, 7)] for _ in range(4)]
    kernels.adamw(*narrow, step=[1, 2], options=AdamWOptions(1e-3), rounding_seed=3, kernels="triton")


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    dispatch.INTERPRETED = True  # so that "triton" may be asked for with tensors on the CPU
    main()
