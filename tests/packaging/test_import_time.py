"""Importing zeroshard costs little beside importing torch, and its name alone costs nothing.

Costs are counted in modules: seconds are the machine's, and its neighbours'.
"""

import json
import subprocess
import sys

import zeroshard

PROGRAM = """
import json, sys
import numpy, torch, torch.distributed  # theirs, not ours
before = set(sys.modules)
import zeroshard
found = []
for names in (set(zeroshard.__all__) - {"consolidate", "load", "save"}, zeroshard.__all__):
    for name in names:
        getattr(zeroshard, name)
    found.append(sorted(set(sys.modules) - before))
import zeroshard.models
with torch.device("meta"):
    models = [zeroshard.models.build_model(name) for name in ("gpt2-demo", "llama-tiny")]
assert all(param.is_meta for model in models for param in model.parameters())
assert "torch._dynamo" not in sys.modules, "shapes need no compiler"
print(json.dumps(found))
"""


def _run(program):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _strangers(loaded):
    """Packages that are neither ours nor the standard library's."""
    names = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"zeroshard"}
    return {name for name in names if not name.startswith("_")}


def test_the_engine_imports_nothing_after_torch_and_checkpoints_import_three_packages():
    engine, everything = _run(PROGRAM)
    assert not _strangers(engine)
    assert len(engine) <= 142
    assert _strangers(everything) <= {"safetensors", "xxhash", "pydantic"} | {
        *("pydantic_core", "annotated_types", "typing_inspection")  # which pydantic is made of
    }
    ours = [name for name in everything if name.startswith("zeroshard.")]
    assert {name.split(".")[1] for name in ours} == {"checkpoint", "comm", "host", "optim", "settings", "zero"}
    of_optim = {name.split(".")[2] for name in ours if name.startswith("zeroshard.optim.")}
    assert of_optim == {"classes", "named_shards"}
    assert len(ours) <= 156


def test_the_name_alone_imports_nothing_but_the_standard_library():
    loaded = _run("import json, sys, zeroshard; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))")
    ours = {name for name in loaded if name not in sys.stdlib_module_names}
    # what an editable install and a shell's start-up files load is not ours
    assert "zeroshard" in ours
    assert not ours & {"torch", "numpy", "pydantic", "rich", "safetensors", "psutil", "tokenizers"}
    assert zeroshard.__version__
