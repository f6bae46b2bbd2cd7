"""benchmarks/gpu_day.py end to end without a GPU: its pieces, what it keeps, and with torch, numpy and Triton alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from zeroshard.kernels.launch import INTERPRETED

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "gpu_day.py"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
# torch's own requirements, beside Python's library and what a checkout has
ALONE = """
import sys
from importlib.machinery import PathFinder

HERE = {"torch", "torchgen", "functorch", "numpy", "triton", "zeroshard", "filelock", "typing_extensions", "sympy",
        "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "setuptools", "pkg_resources", "_distutils_hack"}


class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        ours = path or name in HERE or spec is None or "site-packages" not in (spec.origin or "")
        return spec if ours else None


sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyTorch()
"""


def _day(out, *words):
    command = [sys.executable, PROGRAM, "--out", out, *words]
    return forked.run(list(map(str, command)), capture_output=True, text=True, check=False)


def _result(out, piece):
    return json.loads((out / f"{piece}.json").read_text())


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    out = tmp_path_factory.mktemp("day")
    done = _day(out, "--pieces", "two-ranks", "tax", "memory-8", "saving", "kernels-rms_norm", "strategies-2")
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_stages_have_the_same_bits_on_two_ranks_and_what_was_planned(day):
    out, told = day
    assert _result(out, "two-ranks")["same_bits"] == {"fp32": True, "bf16": True, "fp32 on one rank and on two": True}
    for row in _result(out, "memory-8")["rows"]:
        assert abs(row["planned"] - row["measured"]) <= 2048
    assert set(_result(out, "tax")["ratio"]) == {"plain", "zero0", "zero1", "zero2", "zero3"}
    assert len(set(_result(out, "tax")["first_loss"].values())) == 1
    assert "strategies-2" in told
    assert "not run: there is no GPU" in told


def test_the_page_says_what_it_was_measured_on(day, tmp_path):
    out, _ = day
    assert _day(out, "--page", tmp_path / "gpu.md").returncode == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "No figure on this page claims anything" in page
    for heading in ("Two ranks on one GPU", "What the engine costs", "Peak memory", "Checkpoints", "Kernels"):
        assert f"\n## {heading}" in page
    assert (tmp_path / "images" / "gpu-memory.png").stat().st_size > 1000


def test_what_is_done_is_not_done_again_and_what_fails_holds_nothing_up(day, tmp_path):
    out, _ = day
    before = (out / "tax.json").stat().st_mtime_ns
    assert "is done" in _day(out, "--pieces", "tax").stdout
    assert (out / "tax.json").stat().st_mtime_ns == before
    assert "left for later" in _day(tmp_path, "--pieces", "tax", "--minutes", "1").stdout
    (tmp_path / "tax.partial").mkdir()  # where the piece would write
    done = _day(tmp_path, "--pieces", "tax", "strategies-4")
    assert done.returncode == 1
    assert "IsADirectoryError" in (tmp_path / "tax.failed").read_text()
    assert (tmp_path / "strategies-4.json").exists()
    unknown = _day(tmp_path, "--pieces", "taxes")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: pieces: there is no 'taxes'; choose of")


def test_engine_kernels_and_predictions_run_with_torch_numpy_and_triton_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ALONE)
    program = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import gpu_day; from pathlib import Path\n"
    names = ("tax", "memory-8", "kernels-rms_norm", "fp8", "graphs", "overlap")
    program += f"out = Path({str(tmp_path)!r})\nfor name in {names}: gpu_day.run_piece(name, out)\n"
    program += "import gpu_page; gpu_page.write_page(out, out / 'gpu.md')"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PROGRAM.parents[1] / 'src'}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert "skipped" not in _result(tmp_path, name), _result(tmp_path, name)
    page = (tmp_path / "gpu.md").read_text()
    for heading in ("Products in 8 bits", "A step as a CUDA graph", "What of collectives is hidden"):
        assert f"\n## {heading}" in page
    stages = _result(tmp_path, "overlap")["stages"]
    sent = [stages[f"zero{stage}"]["num_bytes"] for stage in range(4)]
    assert sent[0] * 6 == sent[1] * 8 > 0  # 8 bytes a parameter: its gradient twice; 6: once, and a weight in bf16
    assert sent[1] == sent[2] < sent[3]
    assert (tmp_path / stages["zero3"]["trace"]).stat().st_size > 1000
