"""A model, a data source, a strategy, a communicator and a kernel that are no part of the package.

They are those of docs/how-to/extend.md, written into a module of the current folder as a user would.
"""

import importlib
import sys
from contextlib import ExitStack

import pytest
import torch

import forked
from pages import ROOT, blocks_of
from tiny_runs import events_of, summary_of
from zeroshard import kernels
from zeroshard.cli import main
from zeroshard.comm.registry import COMMUNICATORS, CommEntry
from zeroshard.data.registry import SOURCES
from zeroshard.host.errors import UserError
from zeroshard.host.launch.environment import World
from zeroshard.kernels import OPERATIONS
from zeroshard.kernels.launch import HAS_TRITON, INTERPRETED
from zeroshard.models import PRESETS
from zeroshard.parallel import STRATEGIES
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.validate import validate
from zeroshard.train.setup.ranks import join

TABLES = (PRESETS, SOURCES, STRATEGIES, COMMUNICATORS, OPERATIONS)
TRAIN = ["train", "--device", "cpu", "--max-steps", "4", "--warmup-steps", "1", "--eval-batches", "2"]
TRAIN += ["--seq-len", "32", "--out", "mine"]


@pytest.fixture
def module_text():
    """The classes of the page, without its run and what takes the rows away again."""
    code = [block.code for block in blocks_of(ROOT / "docs/how-to/extend.md") if block.language == "python"]
    return "\n".join(code[:5])


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
    assert refused.value.todo == f"choose one of auto, {', '.join(table)}, module:name"
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
    ],
)
def test_an_address_that_leads_nowhere_is_told_in_a_line(words, line, newcomer, capsys):
    assert main([*TRAIN, *words]) == 2
    assert line in capsys.readouterr().err
