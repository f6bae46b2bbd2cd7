"""A model, a data source, a strategy, a communicator, a kernel and a callback that are no part of the package.

They are those of docs/how-to/extend.md, written into a module of the current folder as a user would.
"""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import forked
import zeroshard
from pages import ROOT, blocks_of
from tiny_runs import events_of, summary_of, train_on
from zeroshard import kernels
from zeroshard.cli import main
from zeroshard.comm import run_threads
from zeroshard.comm.registry import COMMUNICATORS, CommEntry
from zeroshard.data.registry import SOURCES
from zeroshard.host.errors import UserError
from zeroshard.host.launch.environment import World
from zeroshard.kernels import OPERATIONS
from zeroshard.kernels.launch import HAS_TRITON, INTERPRETED
from zeroshard.models import PRESETS
from zeroshard.parallel import STRATEGIES
from zeroshard.settings.engine import EngineSettings
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.evaluation import Evaluation
from zeroshard.train.records.records import Callback
from zeroshard.train.setup.ranks import join
from zeroshard.zero import FrozenFormat, Zero

PACKAGE = Path(zeroshard.__file__).parent
TABLES = (PRESETS, SOURCES, STRATEGIES, COMMUNICATORS, OPERATIONS)
TRAIN = ["train", "--device", "cpu", "--max-steps", "4", "--warmup-steps", "1", "--eval-batches", "2"]
TRAIN += ["--seq-len", "32", "--out", "mine"]

WRONG = """
class Typo(Callback):
    def on_evaluate(self, step, losses): ...
class Two(Callback):
    def __init__(self, run, other): ...
class Says(Callback):
    def on_step(self, record): return "yes"
class Keeps(Callback):
    def state_dict(self): return {"all": {1, 2}}
"""


@pytest.fixture
def module_text():
    """The classes of the page, without its run and what takes the rows away again."""
    code = [block.code for block in blocks_of(ROOT / "docs/how-to/extend.md") if block.language == "python"]
    return "\n".join(code[:6])


@pytest.fixture
def newcomer(module_text, tmp_path, monkeypatch):
    """A module of the current folder that adds its rows when it is imported; they go after the test."""
    (tmp_path / "newcomer.py").write_text(module_text)
    monkeypatch.chdir(tmp_path)
    before = [dict(table) for table in TABLES]
    yield "newcomer"
    sys.modules.pop("newcomer", None)
    for table, rows in zip(TABLES, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.fixture
def rows(newcomer, monkeypatch, tmp_path):
    """The module with its rows in our tables."""
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(newcomer)


def _losses(folder):
    return [event["loss"] for event in events_of(folder) if "loss" in event]


def test_a_run_takes_a_model_data_and_a_strategy_from_their_rows_and_exports_no_model_that_it_is_not(
    rows, tmp_path, capsys
):
    assert main([*TRAIN, "--model", "running-mean", "--data", "squares", "--strategy", "ddp-fp16"]) == 0
    assert summary_of("mine")["status"] == "ok"
    assert 'source = "squares"' in (tmp_path / "mine" / "config.toml").read_text()
    assert main(["export", "mine", "hf"]) == 2
    assert "source: a RunningMeanConfig has no form in Hugging Face's transformers; " in capsys.readouterr().err


def test_a_run_takes_them_from_a_module_of_the_current_folder(newcomer, tmp_path):
    words = ["--model", "newcomer:RunningMeanConfig", "--data", "newcomer:Squares"]
    assert main([*TRAIN, *words, "--strategy", "newcomer:CompressedDdp", "--comm", "newcomer:GatherCommunicator"]) == 0
    assert summary_of("mine")["status"] == "ok"


@pytest.mark.slow
def test_two_ranks_train_over_the_new_communicator_as_over_torch(newcomer, tmp_path):
    forked.start_server()
    losses = []
    for out, comm in (("gather", "newcomer:GatherCommunicator"), ("torch", "torch")):
        words = ["--model", "newcomer:RunningMeanConfig", "--data", "newcomer:Squares", "--strategy", "zero3"]
        words += ["--comm", comm, "--nproc", "2", "--out", out]
        assert forked.Popen([sys.executable, "-m", "zeroshard", *TRAIN, *words]).wait(600) == 0
        losses.append(_losses(tmp_path / out))
    assert len(losses[0]) >= 4
    assert losses[0] == losses[1]


def test_the_row_says_whether_a_rank_alone_makes_the_communicator(rows):
    for alone in (False, True):
        COMMUNICATORS["gather"] = CommEntry(rows.GatherCommunicator, alone=alone)
        with ExitStack() as stack:
            comm = join(World(), "gather", "zero2", torch.device("cpu"), stack).comm
        assert isinstance(comm, rows.GatherCommunicator) is alone


def test_the_new_operation_is_served_and_told(rows):
    x = torch.randn(3000)
    assert kernels.describe(x.device, "reference", ("squared_relu",)) == {"SquaredReLU": "reference"}
    wanted = rows.squared_relu_reference(x)
    assert torch.equal(rows.squared_relu(x, kernels="reference"), wanted)
    if HAS_TRITON and INTERPRETED:
        assert torch.equal(rows.squared_relu(x, kernels="triton"), wanted)


@pytest.mark.parametrize("key", ["strategy", "comm"])
def test_a_message_lists_what_has_a_row_and_no_more_once_it_is_gone(key, rows):
    name, table = {"strategy": ("ddp-fp16", STRATEGIES), "comm": ("gather", COMMUNICATORS)}[key]
    assert validate(TrainConfig, {key: name}).model_dump()[key] == name
    with pytest.raises(UserError) as refused:
        validate(TrainConfig, {key: "nothing"})
    assert refused.value.todo == f"choose one of {'auto, ' * (key == 'comm')}{', '.join(table)}, module:name"
    del table[name]
    with pytest.raises(UserError, match=f"{name}.* is not a choice"):
        validate(TrainConfig, {key: name})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "nowhere:Config"], "model: nowhere cannot be imported (ModuleNotFoundError: "),
        (["--model", "newcomer:Nothing"], "model: newcomer has no 'Nothing'; "),
        (["--data", "newcomer:Nothing"], "data.source: newcomer has no 'Nothing'; "),
        (["--strategy", "newcomer:Nothing"], "strategy: newcomer has no 'Nothing'; "),
        (["--model", "json:dumps"], "model: json:dumps cannot be called with no arguments (missing a required arg"),
        (["--model", "json:JSONDecoder"], "model: json:JSONDecoder has made a JSONDecoder, which has no build, "),
        (["--data", "json:JSONDecoder"], "data.source: json:JSONDecoder cannot be called with SourceRequest ("),
        (["--strategy", "json:decoder"], "strategy: json:decoder is no class or function; "),
        (["--callback", "StopsEarly"], "callback: 'StopsEarly' names no class; write module:Class"),
        (["--callback", "nowhere:StopsEarly"], "callback: nowhere cannot be imported (ModuleNotFoundError: "),
        (["--callback", "newcomer:Squares"], "callback: newcomer:Squares is no callback; "),
        (
            ["--callback", "newcomer:Typo"],
            "callback: newcomer:Typo has on_evaluate, and there is no such event; did you mea",
        ),
        (["--callback", "newcomer:StopsEarly", "newcomer:StopsEarly"], "callback: one of them is given twice; "),
        (
            ["--callback", "newcomer:Two"],
            "callback: newcomer:Two cannot be called with the run (missing a required argument: ",
        ),
        (["--callback", "newcomer:Says"], "callback: newcomer:Says.on_step returned 'yes'; return True to end the run"),
        (["--callback", "newcomer:Keeps"], "callback: newcomer:Keeps.state_dict() cannot be saved as JSON ("),
    ],
)
def test_an_address_that_leads_nowhere_is_told_in_a_line(words, line, newcomer, tmp_path, capsys):
    with (tmp_path / "newcomer.py").open("a") as module:
        module.write(WRONG)
    assert main([*TRAIN, *words]) == 2
    assert line in capsys.readouterr().err


EVALUATED = [5.0, 4.0, 3.0, 2.0, 2.5, 2.25, 2.75, 3.0, 2.5, 1.0]  # after each step, the first before any


@pytest.mark.parametrize("parts", [(9,), (4, 9), (5, 9)])
def test_a_callback_of_users_ends_a_run_resumed_or_not_after_the_same_step_evaluated_and_saved(
    parts, newcomer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Evaluation, "losses", lambda self, step: {"val_loss": EVALUATED[step]})
    words = [*TRAIN, "--callback", "newcomer:StopsEarly", "--eval-interval", "1"]
    for number, max_steps in enumerate(parts):
        resume = ["--resume", "auto"] if number else []
        assert main([*words, "--max-steps", str(max_steps), "--decay-steps", "9", *resume]) == 0
    summary = summary_of("mine")
    assert (summary["step"], summary["val_loss"], summary["last_checkpoint_step"]) == (7, 3.0, 7)
    assert main(["train", "--config", "mine/config.toml", "--out", "other"]) == 2
    assert (
        "names the code 'newcomer:StopsEarly', and code that a file names is not run unasked" in capsys.readouterr().err
    )


def test_all_ranks_end_a_run_if_one_wants_to_and_events_come_in_order(tiny_config, monkeypatch):
    events = []

    class Listens(Callback):
        def __init__(self, run):
            self.rank = run.strategy.comm.rank

        def __getattribute__(self, name):
            if name.startswith(("on_", "before_", "close")) and not object.__getattribute__(self, "rank"):
                events.append(name)
            return super().__getattribute__(name)

        def on_step(self, record):
            return record.step == 2 and self.rank == 1

    monkeypatch.setattr(sys.modules[__name__], "Listens", Listens, raising=False)
    config = tiny_config(callback=[f"{__name__}:Listens"], max_steps=6, eval_interval=0)
    found = run_threads(lambda comm: train_on(comm, config), 2)
    assert [(int(status), run.progress.step) for status, run in found] == [(0, 2)] * 2
    step = ["before_step", "on_update", "on_step"]
    assert events == ["on_start", *step, *step, "on_eval", "before_end", "on_checkpoint", "on_end", "close"]
    assert summary_of(config.out)["last_checkpoint_step"] == 2


# file -> (a place of it, what stands there with the made-up setting `echo`): the steps of "A setting" on the page
ECHO = {
    "settings/engine.py": [
        (
            "    prefetch: Free[int] = Field(",
            '    echo: int = Field(0, ge=0, le=9, description="How often: hello.")\n    prefetch: Free[int] = Field(',
        ),
        ("    prefetch: int = 1\n", "    prefetch: int = 1\n    echo: int = 0\n"),
    ],
    "zero/engine.py": [
        ("        prefetch: int = 1,\n", "        prefetch: int = 1,\n        echo: int = 0,\n"),
        ("        self._accumulate = ", "        self.echo = echo\n        self._accumulate = "),
    ],
}
USES_ECHO = """
import sys, torch
from zeroshard.cli.verbs.base import checked_settings
from zeroshard.comm import LocalCommunicator
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.command import arguments
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.request import Request
from zeroshard.lab.planner.run_plan import predict
from zeroshard.lab.sweep.cases import SweepConfig, cases_of
from zeroshard.settings.engine import EngineSettings
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import load_config
from zeroshard.train.setup.build import build_run

words = "--echo 3 --device cpu --data synthetic --data.max-tokens 4000 --seq-len 16 --out made-up --max-steps 2"
config = checked_settings(TrainConfig, {}, words.split(), "")
assert arguments(checked_settings(PlanConfig, {}, ["--echo", "3"], ""))["echo"] == Request(echo=3).echo == 3
try:
    checked_settings(TrainConfig, {}, ["--echo", "10"], "")
except UserError as error:
    print("refused:", error)
jobs = []
run = build_run(config, LocalCommunicator(), torch.device("cpu"), lambda job: jobs.append(job) or predict(job))
run.close()
assert run.strategy.zero.echo == 3 and [job.echo for job in jobs] == [3]
assert load_config("made-up/config.toml").echo == 3 and run.config["echo"] == 3
found = cases_of(SweepConfig(base={"data": "synthetic"}, axes={"echo": [1, 2]}, out="tried"))
print("cases:", [case.config.echo for case in found])
sys.path.insert(0, sys.argv[1])
import reference
print("lines:", sum(page.count("How often: hello.") for page in reference.pages().values()))
"""


def test_a_made_up_setting_is_added_in_few_files(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "zeroshard", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in ECHO.items():
        path = tmp_path / "zeroshard" / name
        text = path.read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        path.write_text(text)
    command = [sys.executable, "-c", USES_ECHO, str(ROOT / "docs")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("refused:", "cases:", "lines:"))]
    assert lines == ["refused: echo: 10 is above 9; give 9 or less", "cases: [1, 2]", "lines: 2"]
    assert len(ECHO) <= 4


def test_what_an_engine_is_asked_for_is_named_once():
    """The record has the arguments of `Zero` with their defaults; flags that leave a choice open become None."""
    engine = inspect.signature(Zero).parameters
    assert {each.name: each.default for each in fields(EngineSettings)} == {
        each.name: engine[each.name].default for each in fields(EngineSettings)
    }
    others = {"model", "stage", "units", "comm", "precision", "init", "device", "buffers", "secondary_shard_size"}
    assert set(engine) - others == {each.name for each in fields(EngineSettings)}
    nothing = dict.fromkeys(("accumulate", "reproducible", "shard_size", "frozen_format"))
    assert TrainConfig().as_asked == {**nothing, "prefetch": 1}
    given = {"prefetch": 0, "accumulate": "local", "shard_size": 2}
    config = TrainConfig(strategy="zero3", lora=4, base={"format": "nf4", "double": True, "only": "*.mlp.*"}, **given)
    assert config.as_asked == {**nothing, **given, "frozen_format": FrozenFormat(double=True, only=("*.mlp.*",))}
