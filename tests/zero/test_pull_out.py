"""What is attached to the engine can be pulled out: without it the engine's own tests pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "zeroshard"

# folder -> (file, line that attaches it, what stands there without it)
ATTACHED = {
    "ema": [],
    "local_steps": [],
    "reach_probe": [],
    "sharded_optimizer": [],
    "zero/transport": [
        (
            "zero/construction.py",
            "from zeroshard.zero.transport.members import ALL\n",
            "from zeroshard.zero.buffers.plain import PLAIN as ALL\n",
        )
    ],
}
OF_THE_ENGINE = [  # a few seconds' worth: each trains something, or asks what a buffer does
    "test_flat_params.py",
    "test_unit.py",
    "test_runtime.py::test_a_unit_without_gradients_on_any_rank_is_not_stepped",
    "test_runtime.py::test_some_backwards_may_come_without_communication",
    "test_runtime.py::test_a_backward_may_be_differentiated",
]


@pytest.mark.parametrize("folder", ATTACHED)
def test_without_what_is_attached_the_engine_s_own_tests_pass(folder, tmp_path):
    copied = tmp_path / "zeroshard"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copied / folder)
    for name, line, instead in ATTACHED[folder]:
        source = (copied / name).read_text(encoding="utf-8")
        assert source.count(line) == 1, f"{name} does not attach {folder} by one line"
        (copied / name).write_text(source.replace(line, instead), encoding="utf-8")
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "tests", ROOT / "tests" / "support")))
    tests = [f"tests/zero/{name}" for name in OF_THE_ENGINE]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
