"""The interpreter takes what the compiler refuses: every kernel is compiled for an H100, wherever the tests run."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard import kernels
from zeroshard.kernels.launch import HAS_TRITON

PACKAGE = Path(kernels.__file__).parent


def launched_kernels():
    """(module, name) of every function under `@jit` that a launcher launches, as ``name[grid](...)``."""
    found = set()
    for path in PACKAGE.glob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        names = {f.value.id for f in calls if isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name)}
        found |= {(path.stem, name) for name in names}
    return found


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_every_kernel_compiles_for_hopper(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("hopper.py")],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert {(module, name) for module, name, _ in compiled} == launched_kernels()
    assert all(int(num_bytes) > 1000 for *_, num_bytes in compiled)
