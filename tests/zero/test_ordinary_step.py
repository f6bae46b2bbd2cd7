"""What one must read to follow an ordinary step: the files of the engine that it runs through, and what changes there.

Each is a count with a bound. Whoever lowers a count lowers its bound with it.
"""

import ast
import gc
import inspect
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard.zero
from zero.core.plain import PlainOptimizer, plain_engine
from zeroshard.comm import run_threads
from zeroshard.zero import MixedPrecision, Zero
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.core.weights import Weights

ENGINE = Path(zeroshard.zero.__file__).parent

MOST_CORE_FILES = 15  # files of zero/core: ZeRO itself
MOST_OTHER_FILES = {"core": 0, "Zero": 18}  # by engine, of what is attached to it and runs in an ordinary step
MOST_CHANGING = 7  # attributes of weights that get another value after construction, on a CPU
MOST_ASSIGNED = {Weights: 4, FlatParams: 10}  # that any method but the constructor assigns


def _engine(comm, stage, name="Zero", precision=None):
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 8), *blocks)
    if name == "core":
        engine = plain_engine(model, stage, blocks, comm, precision)
        return engine, PlainOptimizer(engine, torch.optim.AdamW, lr=1e-3)
    zero = Zero(model, stage, blocks, comm, precision)
    return zero, zero.optimizer(torch.optim.AdamW, lr=1e-3)


def _step(zero, optim):
    zero.model(torch.ones(4, 8)).square().mean().backward()
    zero.clip_grad_norm_(1.0)
    optim.step()
    optim.zero_grad()


def _files_of_a_step(comm, name):
    """The files, as paths below `zero/`, of which a step of stage 2 runs a function once it is warm."""
    zero, optim = _engine(comm, 2, name)
    for _ in range(3):
        _step(zero, optim)
    ran: set[str] = set()
    sys.setprofile(lambda frame, event, _: ran.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        _step(zero, optim)
    finally:
        sys.setprofile(None)
    return {str(Path(name).relative_to(ENGINE)) for name in ran if Path(name).is_relative_to(ENGINE)}


@pytest.mark.redundant
@pytest.mark.parametrize("name", MOST_OTHER_FILES)
def test_an_ordinary_step_runs_through_few_files(name, monkeypatch):
    gc.collect()  # engines that other tests have left hear of optimizers until they are gone
    if name == "core":  # and some are kept
        monkeypatch.setattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_pre_hooks", OrderedDict())
    gc.disable()
    try:
        files = sorted(set().union(*run_threads(lambda comm: _files_of_a_step(comm, name), 2)))
    finally:
        gc.enable()
    core = [file for file in files if file.startswith("core/")]
    others = [file for file in files if file not in core]
    assert "core/engine.py" in core, "the profiler has seen nothing"
    assert len(core) <= MOST_CORE_FILES, f"{len(core)} files of the core:\n" + "\n".join(core)
    assert len(others) <= MOST_OTHER_FILES[name], f"{len(others)} files beside the core:\n" + "\n".join(others)


def _uses_of_weights(comm):
    """Gather, step, read, pin, write and restage, with and without a narrower compute dtype."""
    for precision in (None, MixedPrecision(param_dtype=torch.bfloat16)):
        zero, optim = _engine(comm, 3, precision=precision)
        for stage in (3, 2, 0, 3):
            zero.restage(stage)
            for _ in range(2):
                _step(zero, optim)
            with zero.full_params():
                zero.model(torch.ones(4, 8))
            with zero.full_params(write_back=True):
                zero.model[0].weight.data.mul_(2.0)
            zero.state_dict()


@pytest.mark.redundant
def test_few_attributes_of_weights_change_after_construction(monkeypatch):
    made, changed = [], {}
    construct = FlatParams.__init__

    def init(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        made.append(self)

    def set_attribute(self, name, value):
        if any(self is each for each in made) and getattr(self, name, set_attribute) is not value:
            changed.setdefault(name)
        object.__setattr__(self, name, value)

    monkeypatch.setattr(FlatParams, "__init__", init)
    monkeypatch.setattr(FlatParams, "__setattr__", set_attribute, raising=False)
    run_threads(_uses_of_weights, 2)
    assert {"state", "full"} <= set(changed), "nothing was recorded"
    assert len(changed) <= MOST_CHANGING, f"{len(changed)} attributes change: {', '.join(sorted(changed))}"


@pytest.mark.parametrize("weights", MOST_ASSIGNED)
def test_methods_of_weights_assign_few_attributes(weights):
    assigned: set[str] = set()
    for cls in weights.__mro__[:-1]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
        for node in (node for method in methods for node in ast.walk(method)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                assigned.add(node.attr)
    assert "state" in assigned
    most = MOST_ASSIGNED[weights]
    assert len(assigned) <= most, f"{len(assigned)} attributes are assigned: {', '.join(sorted(assigned))}"
