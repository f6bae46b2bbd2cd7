import logging
import subprocess
import sys
import threading

import pytest
import torch

from zeroshard.host.errors import UserError
from zeroshard.kernels import CHOICES, OPERATIONS, choose, describe, dispatch, use_kernels
from zeroshard.kernels.launch import traced

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def machine(monkeypatch):
    """`machine(triton=..., interpreted=...)`: what is installed, as the dispatcher sees it."""

    def have(triton=True, interpreted=False):
        monkeypatch.setattr(dispatch, "HAS_TRITON", triton)
        monkeypatch.setattr(dispatch, "INTERPRETED", interpreted)
        dispatch._say_once.cache_clear()

    have()
    return have


def test_auto_is_triton_on_a_gpu_and_the_reference_elsewhere(machine):
    for operation in OPERATIONS:
        assert choose(operation, CUDA, "auto") == "triton"
        assert choose(operation, CPU, "auto") == "reference"
    machine(triton=False)
    assert choose("rope", CUDA, "auto") == "reference"
    machine(interpreted=True)
    assert choose("rope", CPU, "auto") == "reference"  # an environment variable alone changes nothing


def test_what_auto_falls_back_to_is_said_once(machine, caplog):
    caplog.set_level(logging.INFO, "zeroshard.kernels")
    for _ in range(3):
        choose("rope", CPU, "auto")
    assert [record.message for record in caplog.records] == [
        "kernels: no CUDA device; PyTorch's own operations are used"
    ]
    caplog.clear()
    machine(triton=False)
    for _ in range(3):
        choose("rope", CUDA, "auto")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Triton is not installed" in record.message


@pytest.mark.parametrize(
    ("have", "kernels", "device", "message"),
    [
        ({"triton": False}, "triton", CUDA, "kernels: triton was asked for and is not installed"),
        ({}, "triton", CPU, "kernels: triton was asked for and the tensors are on cpu"),
        ({"interpreted": True}, "triton", torch.device("meta"), "kernels: triton was asked for and the tensors are"),
        ({}, "cuda", CPU, "kernels: 'cuda' is unknown; choose auto, reference, triton"),
    ],
)
def test_what_was_asked_for_by_name_is_never_replaced(have, kernels, device, message, machine):
    machine(**have)
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        choose("layer_norm", device, kernels)
    assert isinstance(caught.value, UserError)


def test_the_block_chooses_for_calls_that_do_not(machine):
    machine(interpreted=True)
    assert choose("rope", CPU) == "reference"
    with use_kernels("triton"):
        assert choose("rope", CPU) == "triton"
        assert choose("rope", CPU, "reference") == "reference"
        with use_kernels("reference"):
            assert choose("rope", CPU) == "reference"
        assert choose("rope", CPU) == "triton"
        seen = []
        thread = threading.Thread(target=lambda: seen.append(choose("rope", CPU)))
        thread.start()
        thread.join()
        assert seen == ["reference"]  # the block is this thread's
    assert choose("rope", CPU) == "reference"
    with pytest.raises(RuntimeError, match="inside"), use_kernels("triton"):
        raise RuntimeError("inside")
    assert choose("rope", CPU) == "reference"
    with pytest.raises(ValueError, match="'fast' is unknown"), use_kernels("fast"):
        pass


def test_who_serves_is_told_by_name(machine):
    assert describe(CUDA, "auto", ("layer_norm", "adamw8bit")) == {"LayerNorm": "triton", "AdamW8bit": "triton"}
    assert set(describe(CPU).values()) == {"reference"}
    assert len(describe(CPU)) == len(OPERATIONS)
    assert CHOICES == ("auto", "reference", "triton")


def test_compiled_code_has_the_compilers_kernels_but_for_the_losses(machine):
    """Also where a plan traces as if it were compiled."""
    fused = {"layer_norm", "rms_norm", "rope", "swiglu"}
    with traced(lambda *_: None, compiled=True):
        found = {operation: choose(operation, CUDA, "auto") for operation in OPERATIONS}
        assert {choose(operation, CUDA, "triton") for operation in OPERATIONS} == {"triton"}
    assert {operation for operation, backend in found.items() if backend == "reference"} == fused

    def asked(x):
        return x + sum(choose(operation, CUDA, "auto") == "reference" for operation in OPERATIONS)

    compiled = torch.compile(asked, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())).item() == len(fused)
    assert asked(torch.zeros(())).item() == 0


@pytest.mark.redundant
def test_without_triton_everything_imports_and_the_reference_serves():
    """In a process of its own, in which `import triton` fails."""
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith("triton") else find(name, *rest)
sys.meta_path.insert(0, Absent())
import torch
from zeroshard import kernels
x = torch.randn(3, 8, requires_grad=True)
kernels.cross_entropy(kernels.rms_norm(x), torch.zeros(3, dtype=torch.int64)).backward()
assert x.grad is not None and "triton" not in sys.modules
try:
    kernels.rms_norm(x, kernels="triton")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.startswith("kernels: triton was asked for and is not installed")
