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
    "buffers/test_flat_params.py",
    "buffers/test_unit.py",
    "runtime/test_runtime.py::test_a_unit_without_gradients_on_any_rank_is_not_stepped",
    "runtime/test_runtime.py::test_some_backwards_may_come_without_communication",
    "runtime/test_runtime.py::test_a_backward_may_be_differentiated",
]


@pytest.mark.parametrize("folder", ATTACHED)
def test_without_what_is_attached_the_engine_s_own_tests_pass(folder, tmp_path):
    copied = _copy(tmp_path)
    shutil.rmtree(copied / folder)
    for name, line, instead in ATTACHED[folder]:
        source = (copied / name).read_text(encoding="utf-8")
        assert source.count(line) == 1, f"{name} does not attach {folder} by one line"
        (copied / name).write_text(source.replace(line, instead), encoding="utf-8")
    _require_passes(tmp_path, OF_THE_ENGINE)


def test_the_core_passes_its_tests_in_a_package_without_the_rest_of_the_engine(tmp_path):
    engine = _copy(tmp_path) / "zero"
    for path in engine.iterdir():
        if path.is_dir() and path.name != "core":
            shutil.rmtree(path)
        elif path.is_file() and path.name != "__init__.py":
            path.unlink()
    _require_passes(tmp_path, ["core"])


def _copy(folder):
    return Path(shutil.copytree(PACKAGE, folder / "zeroshard", ignore=shutil.ignore_patterns("__pycache__")))


def _require_passes(folder, names):
    """Tests below `tests/zero` pass with the package that lies in ``folder``."""
    path = os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT / "tests" / "support")))
    tests = [f"tests/zero/{name}" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
