"""`zeroshard report RUNS --to TRACKER`: what a tracker gets of runs that it did not follow."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from run_folders import FACTORS, write_run, write_sweep
from zeroshard.cli import main


class FakeTrackio(ModuleType):
    """What trackio was told, run by run."""

    def __init__(self):
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None)
        self.runs = []

    def init(self, **told):
        self.runs.append((told, {}))

    def log(self, values, step):
        self.runs[-1][1].setdefault(step, {}).update(values)

    def finish(self):
        pass


@pytest.fixture
def trackio(monkeypatch):
    module = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_runs_that_were_not_tracked_are_sent_once_and_those_of_a_sweep_as_a_group(tmp_path, trackio, capsys):
    write_sweep(tmp_path / "widths", bandwidths=("1Gbit/s",), num_steps=3)
    write_run(tmp_path / "alone", num_steps=4, named={"maths": 1.5})
    tracked = write_run(tmp_path / "tracked")
    text = (tracked / "config.toml").read_text()
    (tracked / "config.toml").write_text(text + '\n[track]\nto = ["trackio"]\n')
    assert main(["report", str(tmp_path), "--to", "trackio"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tracked}: not sent, trackio has it already",
        "5 runs sent to trackio",
    ]
    names = [told["name"].rpartition(" ")[0] for told, _ in trackio.runs]
    assert names == [*FACTORS, "alone"]
    assert [told["group"] for told, _ in trackio.runs] == ["widths"] * 4 + [None]
    told, values = trackio.runs[-1]
    assert told["config"]["model.name"] == "gpt2-demo"
    assert [values[step]["train/loss"] for step in (1, 2, 3, 4)] == [4.9, 4.8, 4.7, 4.6]
    assert (values[4]["val/loss"], values[4]["val/maths/loss"]) == (4.0, 1.5)
    assert values[1]["exposed/grads_backward_ms"] == 20.0
    assert main(["report", str(tmp_path), "--to", "trackio"]) == 0
    assert capsys.readouterr().out.endswith("0 runs sent to trackio\n")
    assert len(trackio.runs) == 5


def test_a_tracker_that_is_not_installed_is_named_by_the_flag_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(tmp_path), "--to", "trackio"]) == 2
    assert capsys.readouterr().err == "error: to: trackio is not installed; pip install 'zeroshard[trackio]'\n"
