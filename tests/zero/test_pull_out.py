"""What is attached to the engine can be pulled out: without it, tests of what is left pass.

Every copy of the package lacks all that lies above the engine, and what is attached to it from there. With ``--soak``
each folder is pulled out by itself, too.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import zeroshard
from soak import soaking
from zero import pulled_out

ROOT = Path(__file__).parents[2]
PACKAGE = Path(zeroshard.__file__).parent

# what the core imports outside of zero/; then what conftest.py does
BELOW_THE_CORE = ["comm", "host", "settings", "__init__.py"]
BELOW_ZERO = [*BELOW_THE_CORE, "optim/__init__.py", "optim/named_shards.py", "optim/classes"]
# Without one of these there is no `Zero`: weights that users read and write at any time, `param.grad`, and the users'
# own optimizers are what it makes of the core. The core passes its tests without them and all others.
IS_ZERO = {"zero/core", "zero/buffers", "zero/runtime", "zero/optimizers"}

# folder -> (file, line that attaches it, what stands there without it)
ATTACHED = {
    "zero/local_steps": [],  # an argument of `Zero` that attaches itself
    "zero/sharded_optimizer": [],
    "zero/compat": [
        ("zero/engine.py", "from zeroshard.zero.compat.module_methods import ModulePatches\n", ""),
        (
            "zero/engine.py",
            "        self._handles.append(ModulePatches(model, self._runtime, self._optimizers))\n",
            "",
        ),
        (
            "zero/arguments.py",
            "from zeroshard.zero.compat.module_methods import has_engine\n",
            "from zeroshard.zero.optimizers.adoption import has_owner as has_engine\n",
        ),
    ],
    "zero/ema": [
        ("zero/engine.py", "from zeroshard.zero.ema.average import Ema\n", ""),
        ("zero/engine.py", "from zeroshard.zero.ema.observer import attached\n", ""),
    ],
    "zero/frozen_formats": [  # an argument of `Zero` that attaches itself
        (
            "zero/engine.py",
            "from zeroshard.zero.frozen_formats.settings import frozen_format_of\n",
            "frozen_format_of = lambda given: None\n",
        ),
        (
            "zero/__init__.py",
            "    from zeroshard.zero.frozen_formats.settings import FrozenFormat as FrozenFormat\n",
            "",
        ),
    ],
    "zero/state": [  # saves, loads and changes of the stage
        ("zero/engine.py", "from zeroshard.zero.state import full_state, relayout\n", ""),
        ("zero/engine_optimizers.py", "from zeroshard.zero.state import relayout, training_state\n", ""),
        ("zero/engine_optimizers.py", "from zeroshard.zero.state.full_state import take_names\n", ""),
    ],
    "zero/state_formats": [
        (
            "zero/engine_optimizers.py",
            "            from zeroshard.zero.state_formats.operands import attach, format_of  # late: for kernels\n",
            "",
        )
    ],
    "zero/offload": [  # an argument of `Zero` that attaches itself
        ("zero/__init__.py", "    from zeroshard.zero.offload.settings import Offload as Offload\n", "")
    ],
    "zero/guards": [
        (
            "zero/engine.py",
            "from zeroshard.zero import arguments, construction, guards\n",
            "from zeroshard.zero import arguments, construction\n",
        ),
        ("zero/engine.py", "        self._handles.append(guards.install(self))\n", ""),
    ],
    "zero/transport": [
        (
            "zero/construction.py",
            "from zeroshard.zero.transport.members import ALL\n",
            "from zeroshard.zero.buffers.plain import PLAIN as ALL\n",
        )
    ],
    "zero/whole_tensors": [
        ("zero/state/relayout.py", "from zeroshard.zero.whole_tensors.layout import balanced, in_blocks\n", ""),
        (
            "zero/optimizers/piecewise.py",
            "from zeroshard.zero.whole_tensors.layout import kind_of_group, needed_block\n",
            "kind_of_group = lambda *_: None\nneeded_block = lambda *_, **__: 1\n",
        ),
    ],
}
TESTS = [  # a few seconds' worth: each trains something, or asks what a buffer does
    "tests/zero/buffers/test_flat_params.py",
    "tests/zero/runtime/test_runtime.py::test_a_unit_without_gradients_on_any_rank_is_not_stepped",
    "tests/zero/runtime/test_runtime.py::test_some_backwards_may_come_without_communication",
    "tests/zero/runtime/test_runtime.py::test_a_backward_may_be_differentiated",
    "tests/zero/optimizers/test_optimizer.py::test_two_optimizers_share_a_model",
    "tests/zero/state/test_restage.py::test_a_stage_may_be_changed_before_the_first_step_and_the_model_is_given_back_whole",
]


def _copy(folder, below, lines=()):
    """A package of what is ``below`` zero/, and of zero/ with these lines replaced."""
    copied = folder / "zeroshard"
    copied.mkdir(parents=True)
    for name in [*below, "zero"]:
        (copied / name).parent.mkdir(exist_ok=True)
        (shutil.copytree if (PACKAGE / name).is_dir() else shutil.copy2)(PACKAGE / name, copied / name)
    for name in (folder for folder, lines_of in ATTACHED.items() if not lines_of):
        shutil.rmtree(copied / name)
    for name, line, instead in lines:
        source = (copied / name).read_text(encoding="utf-8")
        assert source.count(line) == 1, f"{name} does not have this line once: {line}"
        (copied / name).write_text(source.replace(line, instead), encoding="utf-8")
    return copied


def _core_alone(folder):
    zero = _copy(folder, BELOW_THE_CORE) / "zero"
    for found in zero.iterdir():
        if found.name != "core":
            shutil.rmtree(found) if found.is_dir() else found.unlink()
    (zero / "__init__.py").write_text("")


def test_without_what_is_attached_to_it_the_engine_passes_its_tests(tmp_path):
    _core_alone(tmp_path / "core")
    tests = {"core": ["tests/zero/core"]}
    within = [folder for folder, lines in ATTACHED.items() if lines]
    for pulled in (*([folder] for folder in within if soaking()), within):
        name = " ".join(folder.replace("/", ".") for folder in pulled)
        copied = _copy(tmp_path / name, BELOW_ZERO, [line for folder in pulled for line in ATTACHED[folder]])
        for folder in pulled:
            shutil.rmtree(copied / folder)
        tests[name] = [test for test in TESTS if "zero/state" not in pulled or "/state/" not in test]
    ended = subprocess.run(
        [sys.executable, pulled_out.__file__, str(tmp_path)],
        input=json.dumps(tests),
        env={**os.environ, "PYTHONPATH": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-1000:]


def test_each_folder_is_part_of_the_engine_or_attached_to_it():
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "zero").glob("*/__init__.py")}
    assert folders == IS_ZERO | ATTACHED.keys()
