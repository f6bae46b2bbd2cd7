"""A run that begins from the weights of another one."""

import shutil
from pathlib import Path

import pytest
import torch

import chats
from hf_models import make_model
from tiny_runs import built
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.integrations.hf_export import run_export
from zeroshard.train.config.command_settings import ExportConfig
from zeroshard.train.config.toml import load_config
from zeroshard.train.start import run_training


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the first run is kept, once one test has made it."""
    return tmp_path_factory.mktemp("kept") / "first"


@pytest.fixture
def first(text_config, tmp_path, kept):
    """A run that is done: a copy of one, for tests that change it."""
    config = text_config(out=str(kept), max_steps=3, warmup_steps=0, eval_interval=0)
    if not kept.exists():
        assert run_training(config) == 0
    shutil.copytree(kept, tmp_path / "first")
    return tmp_path / "first"


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


@pytest.mark.redundant
@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
def test_a_run_begins_with_the_weights_of_another_and_its_own_schedule(second, first, text_config, strategy):
    weights = weights_of(text_config(out=str(first), max_steps=4, warmup_steps=0, resume="auto"))
    run = built(second(strategy=strategy))
    assert run.first_step == 0
    assert run.learning_rate(0) < run.learning_rate(1)
    _assert_same(run.strategy.state_dict(), weights)
    assert not run.strategy.optimizer.state_dict()["state"]


@pytest.mark.redundant
def test_a_run_that_goes_on_does_not_begin_anew(second, first):
    assert run_training(second()) == 0
    (first / "config.toml").unlink()
    first.rename(first.with_name("gone"))
    with pytest.raises(UserError, match="init_from"):
        built(second(out=second().out + "-2"))
    config = Path(second().out) / "config.toml"
    again = load_config(config).model_copy(update={"resume": "auto", "max_steps": 7})
    assert built(again).first_step == 6


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
    with pytest.raises(UserError, match=r"init_from: .* is no GPT-2 or LLaMA .* --model hf:\S+ instead"):
        built(second(init_from=str(tmp_path)))
    with pytest.raises(UserError, match=r"holds no run .*, no checkpoint and no Hugging Face model; give a run as"):
        built(second(init_from=str(first / "checkpoints")))
    with pytest.raises(UserError, match=r"model: there is no folder no/such/place; give a folder, or OWNER/NAME"):
        built(second(init_from="hf:no/such/place"))
    for path in (first / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(UserError, match="has no complete checkpoint yet"):
        built(second())


def weights_of(config):
    """Of a run before its first step."""
    return built(config).strategy.state_dict()


def _assert_same(found, weights):
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.redundant
def test_a_checkpoint_is_begun_with_as_its_run_is(second, first):
    steps = sorted((first / "checkpoints").glob("step-*"))
    weights, same = weights_of(second()), weights_of(second(init_from=str(steps[-1]), out=second().out + "-2"))
    _assert_same(weights, same)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_exported_folder_is_begun_with_as_its_run_is(second, first, tmp_path, strategy):
    """GPT-2's matrices lie transposed there; model and tokenizer are the folder's."""
    assert run_export(ExportConfig(source=str(first), out=str(tmp_path / "exported"))) == 0
    weights = weights_of(second())
    data = second().data.model_copy(update={"dir": str(tmp_path / "as-exported")})
    config = second(data=data, init_from=str(tmp_path / "exported"), out=str(tmp_path / "third"), strategy=strategy)

    def rank(comm):
        run = built(config, comm)
        return run.strategy.state_dict(), run.config["data"]["tokenizer"]

    for found, tokenizer in run_threads(rank, 2):
        _assert_same(found, weights)
        assert tokenizer == f"json:{tmp_path}/exported/tokenizer.json"


PLAIN = {"vocab_size": 256, "rope_scaling": None}


@pytest.mark.parametrize(
    ("kind", "changes", "model"),
    [("llama", PLAIN, ""), ("gpt_neox", {"vocab_size": 256}, "hf"), ("mixtral", {"vocab_size": 256}, "hf")],
)
def test_weights_of_a_hugging_face_folder_are_those_of_transformers(second, tmp_path, kind, changes, model):
    theirs = make_model(kind, seed=1, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    make_model(kind, seed=2, **changes).save_pretrained(tmp_path / "ours")
    asked = {"data": second().data.model_copy(update={"tokenizer": "bytes"}), "init_from": str(tmp_path / "theirs")}
    named = {"name": f"hf:{tmp_path}/ours"} if model else {}
    run = built(second(model=named, dtype="float32", seq_len=24, **asked))
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        found, expected = run.strategy.model.eval()(tokens), theirs(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
