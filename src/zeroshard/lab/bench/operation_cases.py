"""The operations that `zeroshard bench device` times; each is an amount (FLOPs, bytes, elements, calls) and a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.comm import NullCommunicator
from zeroshard.lab.predict.rates import MEASURED_ATTENTION
from zeroshard.train.profiling.devices import Layout
from zeroshard.zero import Zero


def products(device: torch.device, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Sizes (tokens, inputs, outputs) of matrix products: a small model's on a CPU, a large one's on a GPU."""
    if device.type == "cuda":
        return [(8192, 4096, 4096), (8192, 4096, 14336)]
    return [(256, 384, 1536), (512, 512, 2048) if dtype == torch.float32 else (256, 1536, 384)]


def dtypes(device: torch.device) -> list[torch.dtype]:
    """The dtypes in which matrix products are timed."""
    return [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])


def linear(
    m: int, k: int, n: int, dtype: torch.dtype, device: torch.device
) -> dict[Layout, tuple[float, Callable[[], object]]]:
    """The three matrix products of a linear layer (one forward, two backward) by their layout, and each one's FLOPs."""
    x, w, g = (torch.randn(*size, device=device).to(dtype) for size in ((m, k), (n, k), (m, n)))
    calls: dict[Layout, Callable[[], object]] = {"nt": lambda: x @ w.t(), "tn": lambda: g.t() @ x, "nn": lambda: g @ w}
    return {layout: (2.0 * m * k * n, call) for layout, call in calls.items()}


def matmul(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[float, Callable[[], object]]:
    """The three products of `linear` as one case."""
    cases = linear(m, k, n, dtype, device).values()
    return sum(amount for amount, _ in cases), lambda: [call() for _, call in cases]


def attention(dtype: torch.dtype, device: torch.device) -> tuple[float, Callable[[], object]]:
    """Causal attention, forward and backward, and its FLOPs: enough that a GPU takes longer than the host that asks."""
    batch, heads, length, width = (16, 16, *MEASURED_ATTENTION[2:]) if device.type == "cuda" else (4, 8, 256, 64)
    q, k, v = (
        torch.randn(batch, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    grad = torch.randn_like(q)

    def call() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    # Two products forward and five backward; the causal mask halves them.
    return 14.0 * batch * heads * length * length * width / 2, call


def copy(device: torch.device) -> tuple[float, Callable[[], object]]:
    """A copy of a tensor larger than any cache, and the bytes that it reads and writes."""
    source = torch.ones((256 if device.type == "cuda" else 16) * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes, lambda: target.copy_(source)


def anew(device: torch.device) -> tuple[float, Callable[[], object]]:
    """A sum that allocates its output, of tensors as large as a small model's activations, and the bytes it moves."""
    numel = (64 if device.type == "cuda" else 1) * 2**20 // 4
    a, b = (torch.ones(numel, device=device) for _ in range(2))
    return 3.0 * a.nbytes, lambda: a + b


def host_update() -> tuple[float, Callable[[], object]]:
    """AdamW's fused update on the host, of states larger than any cache, and the bytes that it reads and writes."""
    param = nn.Parameter(torch.ones(16 * 2**20 // 4))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    # read: gradient, weights and two states; written: all but the gradient
    return 7.0 * param.nbytes, optimizer.step


def bus(device: torch.device) -> tuple[float, Callable[[], object]]:
    """Copies to and from the device at once, each on a stream, and the bytes that one of them moves.

    On a CPU, where host and device are one, a copy in memory.
    """
    num_bytes = (64 if device.type == "cuda" else 16) * 2**20
    here = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    there = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    if device.type != "cuda":
        return float(num_bytes), lambda: there[0].copy_(here[0])
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def call() -> object:
        for stream, target, source in zip(streams, (there[0], here[1]), (here[0], there[1]), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    return float(num_bytes), call


def gelu() -> tuple[float, Callable[[], object]]:
    """Tanh GELU and its backward, of as many elements as a small model's activations have, and their number."""
    x, grad = torch.randn(256, 1024), torch.randn(256, 1024)

    def call() -> object:
        return F.gelu(x, approximate="tanh"), torch.ops.aten.gelu_backward(grad, x, approximate="tanh")

    return 2.0 * x.numel(), call


class _Tiny(nn.Module):
    """Many operations on tiny tensors, so that their overhead is all that is measured."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(8)
        )
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def small_operations(device: torch.device) -> tuple[float, Callable[[], object]]:
    """A forward and backward pass of many tiny operations, and their number (forward 5 a layer, backward 9)."""
    net, x = _Tiny(device), torch.ones(2, 8, device=device)
    return 8.0 * (5 + 9), lambda: torch.autograd.grad(net(x), list(net.parameters()))


def with_engine() -> tuple[float, Callable[[], object]]:
    """The same pass as `small_operations` with the engine's hooks on the gradients, and the number of parameters."""
    net, x = _Tiny(torch.device("cpu")), torch.ones(2, 8)
    zero = Zero(net, stage=1, units=list(net.layers), comm=NullCommunicator(2))
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.0)

    def call() -> object:
        net(x).backward()
        return optimizer.zero_grad()

    return float(len(list(net.parameters()))), call
