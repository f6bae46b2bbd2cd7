"""Importing zeroshard costs little beside importing torch, and its name alone costs nothing.

Costs are counted in modules: seconds are the machine's, and its neighbours'.
"""

from __future__ import annotations

import json
import subprocess
import sys

import zeroshard

PROGRAM = """
import json, sys
import numpy, torch, torch.distributed  # theirs, not ours
before = set(sys.modules)
import zeroshard
for name in zeroshard.__all__:
    getattr(zeroshard, name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def _run(program):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_public_names_import_the_engine_and_two_small_packages_after_torch():
    loaded = _run(PROGRAM)
    others = [name for name in loaded if not name.startswith("zeroshard")]
    unknown = {name.partition(".")[0] for name in others} - {"safetensors", "xxhash"} - sys.stdlib_module_names
    assert not {name for name in unknown if not name.startswith("_")}
    assert len(others) <= 20
    layers = {name.split(".")[1] for name in loaded if name.startswith("zeroshard.")}
    leaves = {"errors", "garbage", "lazily", "process", "regular_files", "wire_formats"}
    assert layers <= {"checkpoint", "comm", "zero"} | leaves
    assert len(loaded) <= 115


def test_the_name_alone_imports_nothing_but_the_standard_library():
    loaded = _run("import json, sys, zeroshard; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))")
    ours = {name for name in loaded if name not in sys.stdlib_module_names}
    # what an editable install and a shell's start-up files load is not ours
    assert "zeroshard" in ours
    assert not ours & {"torch", "numpy", "pydantic", "rich", "safetensors", "psutil", "tokenizers"}
    assert zeroshard.__version__
