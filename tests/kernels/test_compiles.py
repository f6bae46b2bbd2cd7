"""The interpreter takes what the compiler refuses: every kernel is compiled for GPUs, wherever the tests run."""

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soak import soaking
from zeroshard import kernels
from zeroshard.kernels.launch import HAS_TRITON

PATHS = [path for path in Path(kernels.__file__).parent.glob("*.py") if path.stem != "launch"]


def launched_kernels():
    """(module, name) of every function under `@jit` that is launched, by ``name[grid](...)`` or a `PreparedKernel`."""
    return {(path.stem, name) for path in PATHS for name in _launched(ast.parse(path.read_text()))}


def _launched(tree):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call.func.value for call in calls if isinstance(call.func, ast.Subscript)]
    named += [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "PreparedKernel"]
    return {each.id for each in named if isinstance(each, ast.Name)}


def _launches(tree):
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    prepared = any(isinstance(each, ast.Attribute) and each.attr == "launch" for each in calls)
    return prepared or any(isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name) for f in calls)


def _is_opaque(function):
    return any(isinstance(each, ast.Call) and each.func.id == "opaque" for each in function.decorator_list)


def test_every_launcher_launches_on_the_device_of_its_tensors():
    """Triton launches on the current device, which that of a tensor on cuda:1 need not be."""
    bare = set()
    for path in PATHS:
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        bare |= {f"{path.stem}.{each.name}" for each in functions if _launches(each) and not _is_opaque(each)}
    # The first is called inside of `device_of`, and takes lists that no operator does; the others by launchers.
    assert bare == {"adamw8bit_kernels.launch", "norm_kernels._launch_wide", "swiglu._launch"}


# The most registers of a thread on any of the three, of Triton 3.6 and 3.7. Twice as many halve how many threads work.
REGISTERS = {
    "_forward": 64, "_backward_held": 128, "_backward_wide": 72, "_add_parts": 48,
    "_rope_kernel": 48, "_forward_kernel": 32, "_backward_kernel": 56, "_loss_kernel": 96,
    "_gradient_kernel": 40, "_adamw8bit_kernel": 80, "_carry_kernel": 56,
    "_quantise_kernel": 80, "_dequantise_kernel": 40,
}  # fmt: skip


# Of the sources that were compiled last: what compiles them anew is a change of theirs, and `make soak`.
COMPILED = "9bde01da7ae24545"


def _digest():
    sources = [*sorted(Path(kernels.__file__).parent.glob("*.py")), Path(__file__).with_name("compile_for.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.soak), 90, pytest.param(100, marks=pytest.mark.soak)]
)
def test_every_kernel_compiles_spills_nothing_and_takes_no_more_registers(capability, tmp_path):
    """A100, H100 and B200: what is spilled goes to memory and back, which a kernel bound by memory pays for at once."""
    digest = _digest()
    if digest == COMPILED and not soaking():
        return
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_for.py"), str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(each["module"], each["name"]) for each in compiled} == launched_kernels()
    for each in compiled:
        assert each["spilled_bytes"] == 0, each
        assert each["registers"] <= REGISTERS[each["name"]], each
        assert each["shared_bytes"] <= 16384, each
    assert digest == COMPILED, f"they compile: write COMPILED = {digest!r}"
