"""A run that begins from the weights of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import chats
from zeroshard.comm import LocalCommunicator
from zeroshard.errors import UserError
from zeroshard.train.config.config import load_config
from zeroshard.train.loop.loop import run_training, train
from zeroshard.train.setup.build import build_run


@pytest.fixture
def first(text_config, tmp_path):
    """A run that is done."""
    config = text_config(out=str(tmp_path / "first"), max_steps=3, warmup_steps=0, eval_interval=0)
    assert run_training(config) == 0
    return Path(config.out)


@pytest.fixture
def second(tiny_config, first, tmp_path):
    """`second(**changes)`: a run on pairs that begins from it, and does not say of which model."""
    rows = chats.write_rows(tmp_path / "pairs.jsonl", chats.pairs(80))

    def make(model=None, **changes):
        data = {"source": "text", "path": (str(rows),), "format": "prompt", "dir": str(tmp_path / "pairs")}
        values = {
            "data": data,
            "init_from": str(first),
            "out": str(tmp_path / "second"),
            "model": model or {},
            **changes,
        }
        return tiny_config(**values)

    return make


def built(config):
    return build_run(config, LocalCommunicator(), torch.device("cpu"))


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
def test_a_run_begins_with_the_weights_of_another_and_its_own_schedule(second, first, text_config, strategy):
    theirs = built(text_config(out=str(first), max_steps=4, warmup_steps=0, resume="auto"))
    weights = theirs.strategy.state_dict()
    theirs.close()
    run = built(second(strategy=strategy))
    try:
        assert run.first_step == 0
        assert run.learning_rate(0) < run.learning_rate(1)
        found = run.strategy.state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert not run.strategy.optimizer.state_dict()["state"]
        assert train(run) == 0
    finally:
        run.close()


def test_a_run_that_goes_on_does_not_begin_anew(second, first):
    assert run_training(second()) == 0
    (first / "config.toml").unlink()
    first.rename(first.with_name("gone"))
    with pytest.raises(UserError, match="init_from"):
        built(second(out=second().out + "-2"))
    config = Path(second().out) / "config.toml"
    again = load_config(config).model_copy(update={"resume": "auto", "max_steps": 7})
    run = built(again)
    run.close()
    assert run.first_step == 6


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": {"n_layer": 1}}, "model.n_layer: the checkpoint's model has 2, this one 1"),
        ({"model": {"n_head": 4}}, "model.n_head: the checkpoint's model has 2, this one 4"),
        ({"init_from": "nowhere"}, "init_from: nowhere holds no run"),
    ],
)
def test_another_model_is_refused(second, changes, line):
    with pytest.raises(UserError, match=line):
        built(second(**changes))


def test_another_tokenizer_is_refused(second, tmp_path):
    path = chats.write_tokenizer(tmp_path / "tokenizer")
    data = second().data.model_copy(update={"tokenizer": f"json:{path}"})
    with pytest.raises(UserError, match=r"data\.tokenizer: json:.* gives other ids than .* \(bytes\); leave it out"):
        built(second(data=data))


def test_what_is_no_run_is_refused(second, tmp_path, first):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is a Hugging Face folder, and no run; make a run of it by `zeroshard import"):
        built(second(init_from=str(tmp_path)))
    for path in (first / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(UserError, match="has no complete checkpoint yet"):
        built(second())
