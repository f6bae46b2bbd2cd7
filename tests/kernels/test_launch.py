from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.kernels import layer_norm, rope, swiglu
from zeroshard.kernels.launch import PreparedKernel, on_its_device, opaque, traced


@opaque("doubled_for_a_test", "out")
def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.from_numpy(x.numpy() * 2))  # which no compiler looks into


def test_a_launcher_is_a_plain_call_and_one_node_when_compiled():
    x = torch.arange(3.0)

    def run(x):
        y = torch.empty_like(x)
        doubled(x + 1, y)
        return y - 1

    nodes = []

    def backend(graph, inputs):
        nodes.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), (x + 1) * 2 - 1)
    assert torch.equal(run(x), compiled(x))
    assert "zeroshard.doubled_for_a_test.default" in [str(node) for node in nodes]


@pytest.mark.skipif(0 < torch.cuda.device_count() < 3, reason="a fake tensor on cuda:2 needs three GPUs, or none")
def test_a_launch_is_on_the_device_of_its_tensors_whichever_is_current(monkeypatch):
    """Without the guard a kernel of cuda:1's tensors would be launched on cuda:0."""
    current = [0]

    @contextmanager
    def device(wanted):
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr("torch.cuda.current_device", lambda: current[0])
    monkeypatch.setattr("torch.cuda.device", device)
    launched = []
    launch = on_its_device(lambda *args: launched.append(current[0]))
    with FakeTensorMode():
        for where in ("cuda:1", "cpu", "cuda:0", "cuda:2"):
            launch(3, torch.empty(2, device=where), torch.empty(2, device=where))
    assert launched == [1, 0, 0, 2]
    assert current == [0]


class _Kernel:
    """As Triton's: a launch by ``kernel[grid]`` chooses a compiled kernel and returns it, which is launched alike."""

    arg_names = ("x_ptr", "y_ptr", "numel", "BLOCK", "SCALE")

    def __init__(self, log, name="chosen"):
        self._log, self._name = log, name

    def __getitem__(self, grid):
        def launch(*args, **options):
            self._log.append((self._name, grid, args[2:], options))
            return _Kernel(self._log, "remembered")

        return launch


def test_a_prepared_kernel_is_chosen_once_for_all_that_triton_compiles_for():
    log, options = [], {"num_warps": 4, "SCALE": 0.5, "BLOCK": 16}
    kernel, x, grid = PreparedKernel(_Kernel(log), **options), torch.zeros(64), (3, 1, 1)
    for y, numel in ((x, 16), (x, 16), (x, 17), (x[1:], 16), (x[1:], 16), (x[4:], 16), (x, 17)):
        kernel.launch(grid, (x, y), (numel,))
    chosen = ("chosen", grid, (16,), options)
    remembered = ("remembered", grid, (16, 16, 0.5), {})  # constants in the order of the kernel's parameters
    assert log == [
        chosen,
        remembered,
        ("chosen", grid, (17,), options),
        chosen,  # an address that is no multiple of 16: chosen each time
        chosen,
        remembered,
        ("remembered", grid, (17, 16, 0.5), {}),
    ]


def test_a_prepared_kernel_remembers_a_bounded_number_of_launches_and_none_of_the_interpreter(monkeypatch):
    monkeypatch.setattr("zeroshard.kernels.launch.MOST_COMPILED", 2)
    log, x = [], torch.zeros(16)
    kernel = PreparedKernel(_Kernel(log))
    for numel in (1, 2, 3, 3, 1):
        kernel.launch((1, 1, 1), (x, x), (numel,))
    assert [entry[0] for entry in log] == ["chosen"] * 3 + ["remembered", "chosen"]
    interpreted = {(1, 1, 1): lambda *args, **options: log.append("interpreted")}
    kernel = PreparedKernel(interpreted)
    for _ in range(2):
        kernel.launch((1, 1, 1), (x, x), (1,))
    assert log[-2:] == ["interpreted"] * 2


class _Operators(TorchDispatchMode):
    """Collects the names of the operators of torch that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


X, VECTOR, HEADS, ANGLES = torch.ones(2, 3, 16), torch.ones(16), torch.ones(2, 4, 3, 8), torch.ones(3, 4)


@pytest.mark.parametrize(
    ("operation", "tensors", "constants", "num_forward", "num_backward"),
    [
        (layer_norm, [X, VECTOR, VECTOR], [], 2, 3),  # y and the rows' statistics; three gradients
        (swiglu, [X, X], [], 1, 2),
        (rope, [HEADS, HEADS], [ANGLES, ANGLES], 2, 2),
    ],
)
def test_around_its_launches_an_operation_allocates_and_does_nothing_else(
    operation, tensors, constants, num_forward, num_backward
):
    """Each operator costs microseconds of the host, by which the step of a small model is bound."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    launched = []
    with traced(lambda name, args: launched.append(name)):
        with _Operators() as forward:
            outputs = operation(*leaves, *constants)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        upstream = [torch.ones_like(y) for y in outputs]
        with _Operators() as backward:
            torch.autograd.grad(outputs, leaves, upstream)
    assert len(launched) == 2
    assert set(forward.names + backward.names) <= {"empty", "empty_like"}
    assert (len(forward.names), len(backward.names)) == (num_forward, num_backward)
