"""A run that keeps a moving average: evaluated and logged beside the weights, resumed, and written text with."""

from pathlib import Path

import pytest
import torch

from tiny_runs import events_of, train_on
from zeroshard.comm import LocalCommunicator
from zeroshard.host.errors import UserError
from zeroshard.parallel import STRATEGIES
from zeroshard.train.config.command_settings import GenerateConfig
from zeroshard.train.inference.generate import load_for_text, run_generate
from zeroshard.train.loop.loop import take_step
from zeroshard.train.loop.saving import Saving
from zeroshard.train.setup.build import build_run
from zeroshard.zero.ema.average import Ema

CPU = torch.device("cpu")


def trained(comm, config, until=None):
    _, run = train_on(comm, config, until=until)
    if run.strategy.ema is None:
        return run.strategy.state_dict(), None
    with run.strategy.ema.weights():
        average = run.strategy.state_dict()
    return run.strategy.state_dict(), average


@pytest.mark.redundant
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name in ("zero3", "ddp") else pytest.mark.soak) for name in STRATEGIES]
)
def test_an_average_is_logged_resumes_to_the_bit_and_changes_no_step(strategy, tiny_config, gloo_ranks):
    config = tiny_config(strategy=strategy, ema_decay=0.5, max_steps=4, eval_interval=2)
    plain = config.model_copy(update={"ema_decay": 0.0, "out": f"{config.out}-plain"})
    parts = config.model_copy(update={"out": f"{config.out}-parts"})
    ranks = gloo_ranks(2)
    whole = ranks.run(trained, config)
    without = ranks.run(trained, plain)
    ranks.run(trained, parts, 2)
    resumed = ranks.run(trained, parts.model_copy(update={"resume": "auto"}))
    for (weights, average), (alone, none), (weights_then, average_then) in zip(whole, without, resumed, strict=True):
        assert none is None
        for name, tensor in weights.items():
            assert torch.equal(alone[name], tensor)
            assert torch.equal(weights_then[name], tensor)
            assert torch.equal(average_then[name], average[name])
        assert any(not torch.equal(average[name], weights[name]) for name in weights)
    evals = events_of(config.out, "eval")
    assert [event["step"] for event in evals] == [0, 2, 4]
    assert evals[0]["ema_loss"] == evals[0]["loss"]
    assert all(event["ema_loss"] != event["loss"] for event in evals[1:])
    assert events_of(parts.out, "eval")[-1] == evals[-1]
    assert events_of(config.out, "end")[0]["ema_val_loss"] == evals[-1]["ema_loss"]
    assert "ema_loss" not in events_of(plain.out, "eval")[-1]
    assert "ema_val_loss" not in events_of(plain.out, "end")[0]


def test_a_step_that_is_not_taken_leaves_the_average_alone(tiny_config):
    run = build_run(tiny_config(dtype="float16", ema_decay=0.5), LocalCommunicator(), CPU)
    for step, factor in ((0, 1.0), (1, 1e12)):
        before = {key: state["ema"].clone() for key, state in run.strategy.ema.state.items()}
        handle = run.strategy.model.register_forward_hook(lambda module, args, loss, factor=factor: loss * factor)
        assert take_step(run, step, lambda: False)[0].skipped == (factor > 1)
        handle.remove()
        same = all(torch.equal(before[key], state["ema"]) for key, state in run.strategy.ema.state.items())
        assert same == (factor > 1)
    run.close()


def test_a_save_under_way_has_its_own_copy_before_the_average_is_shown(tiny_config, monkeypatch):
    heard = []
    settle, swap = Saving.settle, Ema._swap
    monkeypatch.setattr(Saving, "settle", lambda self: (heard.append("settle"), settle(self))[1])
    monkeypatch.setattr(Ema, "_swap", lambda self: (heard.append("swap"), swap(self))[1])
    train_on(LocalCommunicator(), tiny_config(ema_decay=0.5, eval_interval=1))
    shown = [place for place, word in enumerate(heard) if word == "swap"][::2]  # and back
    assert len(shown) == 7
    assert all(heard[place - 1] == "settle" for place in shown)


def test_the_weights_that_are_asked_for_are_loaded(text_config):
    config = text_config(max_steps=3, ema_decay=0.5, eval_interval=0)
    expected = dict(zip(("last", "ema"), trained(LocalCommunicator(), config), strict=True))
    assert not torch.equal(expected["last"]["wte.weight"], expected["ema"]["wte.weight"])
    for weights, tensors in expected.items():
        model, _ = load_for_text(Path(config.out), weights)
        for name, param in model.named_parameters():
            assert torch.equal(param, tensors[name]), f"{weights}: {name}"


def test_an_average_that_nobody_kept_is_refused(text_config):
    config = text_config(max_steps=2, eval_interval=0)
    trained(LocalCommunicator(), config)
    with pytest.raises(UserError, match="holds no moving average; train with --ema-decay") as refusal:
        run_generate(GenerateConfig(run=config.out, weights="ema"))
    assert refusal.value.field == "weights"
