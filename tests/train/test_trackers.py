import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from tiny_runs import events_of
from zeroshard.host.errors import UserError
from zeroshard.settings.tables import TrackConfig
from zeroshard.train.records.records import StepRecord
from zeroshard.train.records.trackers import TrackedRun, trackers, values_of
from zeroshard.train.start import run_training

MEMORY, WAITS = {"params": 2**21, "master": 0}, {"blocks.0/grads/backward": 0.5, "blocks.1/grads/backward": 0.25}
RECORD = StepRecord(3, 2.5, 0.9, 1e-3, 0.1, 96, 960.0, memory_bytes=MEMORY, exposed_s=WAITS)


class Recorder:
    """A tracker that remembers, and fails where it is told to."""

    def __init__(self, fails_in=""):
        self.calls, self._fails_in = [], fails_in

    def _note(self, name, *args):
        self.calls.append((name, *args))
        if name == self._fails_in:
            raise ConnectionError("no network\nat all")

    def start(self, facts):
        self._note("start", dict(facts))

    def log(self, values, step):
        self._note("log", dict(values), step)

    def finish(self, summary):
        self._note("finish", dict(summary))


def tell_all(observer):
    observer.on_start({"step": 0, "kernels": {"LayerNorm": "reference"}})
    observer.on_step(RECORD)
    observer.on_eval(3, {"val_loss": 2.25, "ema_val_loss": 2.125})
    observer.on_checkpoint(3, Path("x"))
    observer.on_end({"status": "ok", "loss": 2.5, "table": {}})
    observer.close()
    observer.close()


def test_a_tracker_hears_of_everything_in_order():
    tracker = Recorder()
    tell_all(TrackedRun("ours", tracker, {"lr": 0.1, "data": {"source": "text"}}))
    facts = {"lr": 0.1, "data.source": "text", "run.step": 0, "run.kernels.LayerNorm": "reference"}
    assert tracker.calls == [
        ("start", facts),
        ("log", values_of(RECORD), 3),
        ("log", {"val/loss": 2.25, "val/ema_loss": 2.125}, 3),
        ("finish", {"status": "ok", "loss": 2.5}),
    ]


def test_what_is_not_known_is_left_out():
    assert values_of(RECORD) == {
        "train/loss": 2.5,
        "train/grad_norm": 0.9,
        "train/lr": 1e-3,
        "train/tokens": 96.0,
        "train/num_skipped": 0.0,
        "speed/tokens_per_s": 960.0,
        "speed/step_s": 0.1,
        "speed/exposed_s": 0.75,
        "exposed/grads_backward_ms": 750.0,
        "memory/params_MiB": 2.0,
    }


@pytest.mark.parametrize("fails_in", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_left_alone(fails_in, capsys):
    tracker = Recorder(fails_in)
    tell_all(TrackedRun("ours", tracker, {}))
    assert capsys.readouterr().err == "warning: ours failed (no network at all); the run continues without it\n"
    assert [call[0] for call in tracker.calls].count(fails_in) == 1
    assert tracker.calls[-1][0] == fails_in


@pytest.mark.redundant
def test_tensorboard_has_the_numbers_of_the_log(tiny_config):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_config(track="tensorboard")
    assert run_training(config) == 0
    events = EventAccumulator(str(Path(config.out) / "tensorboard"))
    events.Reload()
    losses = {line["step"]: line["loss"] for line in events_of(config.out, "step")}
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(losses)
    assert [event.step for event in events.Scalars("val/loss")] == [0, 3, 6]


class FakeWandb(ModuleType):
    """What W&B was told, run by run; as there, a ``step`` that goes back is dropped."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.runs = []

    def Settings(self, **kwargs):
        return kwargs

    def init(self, **kwargs):
        self.told, self.rows, self.axes = kwargs, [], {}
        self.runs.append((kwargs, self.rows, self.axes))
        return self

    def define_metric(self, name, **kwargs):
        self.axes[name] = kwargs

    def log(self, values, step=None):
        self.rows.append((values, step))

    @property
    def summary(self):
        return {}

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_going_on_is_the_same_run_and_going_back_another_one(tiny_config, wandb):
    """W&B counts what is logged by itself, and drops what is said to be of an earlier step."""
    track = {"to": ["wandb"], "group": "widths"}
    config = tiny_config(track=track, checkpoint_interval=2, max_steps=4, eval_interval=0)
    assert run_training(config) == 0
    ((told, rows, axes),) = wandb.runs
    assert told["group"] == "widths"
    assert axes["*"] == {"step_metric": "step"}
    assert [values["step"] for values, _ in rows if "train/loss" in values] == [1, 2, 3, 4]
    assert {step for _, step in rows} == {None}
    assert run_training(config.model_copy(update={"resume": "auto", "max_steps": 5})) == 0
    back = str(Path(config.out) / "checkpoints" / "step-00000002")
    assert run_training(config.model_copy(update={"resume": back})) == 0
    first, again, branch = (told["id"] for told, _, _ in wandb.runs)
    assert first == again != branch


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tiny_config, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"track\.to: trackio is not installed; pip install 'zeroshard\[trackio\]'"):
        trackers(TrackConfig(to=("trackio",)), tmp_path, {})
