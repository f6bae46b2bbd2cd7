"""Training on examples: the loss of what counts, the same however the global batch is spread."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import chats
from soak import soaking
from tiny_runs import built, events_of, summary_of, trained
from zeroshard.cli import main
from zeroshard.data import load_tokenizer
from zeroshard.host.errors import UserError
from zeroshard.lab.run_folders import read_run
from zeroshard.train.config.command_settings import EvalConfig
from zeroshard.train.inference.evaluation import local_score
from zeroshard.train.loop.loop import take_step
from zeroshard.train.setup.run_folder import tokenizer_folder


@pytest.fixture
def chat_config(tiny_config, tmp_path):
    """`chat_config(data={}, **changes)`: a run on conversations."""
    path = chats.write_rows(tmp_path / "rows.jsonl", chats.conversations(80))

    def make(data=None, **changes):
        table = {"source": "text", "path": (str(path),), "format": "chat", "template": "chatml"}
        table |= {"dir": str(tmp_path / "tokens"), **(data or {})}
        return tiny_config(**{"data": table, "seq_len": 100, "max_steps": 3, "eval_interval": 0, **changes})

    return make


SPREADS = [("zero1", 1, 2), ("zero2", 2, 2), ("zero3", 4, 1)]
MORE_SPREADS = [("zero0", 2, 1), ("zero3", 2, 2)]  # with --soak


def test_a_loss_is_the_mean_over_what_counts_of_the_whole_batch_however_it_is_spread(chat_config, tmp_path):
    """Micro-batches and ranks have different numbers of targets; the gradient is that of one process all the same."""

    def run(strategy, world_size, accumulate):
        name = f"{strategy}-{world_size}-{accumulate}"
        sizes = {"micro_batch_size": 8 // world_size // accumulate, "grad_accum_steps": accumulate}
        config = chat_config(strategy=strategy, out=str(tmp_path / name), eval_rows=5, max_steps=2, **sizes)
        return trained(config, world_size)

    whole = run("zero0", 1, 1)
    for spread in SPREADS + MORE_SPREADS * soaking():
        found = run(*spread)
        for key, values in whole.items():
            assert found[key] == pytest.approx(values, rel=2e-5), (spread, key)


@pytest.mark.redundant
def test_packed_rows_are_spread_and_gone_on_with_as_others_are_and_validate_alike(chat_config, tmp_path):
    """One process with the whole batch, two ranks at stage 3, and a run that stopped on the way."""

    path = chats.write_rows(tmp_path / "pairs.jsonl", chats.pairs(80))

    def config(name, **changes):
        data = {"packing": True, "format": "prompt", "template": "", "path": (str(path),), **changes.pop("data", {})}
        sizes = {"seq_len": 64, "micro_batch_size": 4, "decay_steps": 4, "max_steps": 4, "eval_rows": 100}
        return chat_config(data, out=str(tmp_path / name), **{**sizes, **changes})

    whole = trained(config("whole"))
    spread = trained(config("spread", strategy="zero3", micro_batch_size=1, grad_accum_steps=2), 2)
    for key, values in whole.items():
        assert spread[key] == pytest.approx(values, rel=2e-5), key
    trained(config("half", max_steps=2))
    assert trained(config("half", resume="auto")) == {key: whole[key] for key in (3, 4, "val")}
    alone = config("half", resume="auto", max_steps=5, data={"packing": False})
    with pytest.raises(UserError, match=r"data\.packing: the prepared tokens are not those"):
        built(alone)
    (start,) = events_of(tmp_path / "whole", "start")
    assert start["rows"]["filled"] > 0.7
    assert start["rows"]["examples"] > start["rows"]["rows"]
    no_change = {"max_steps": 1, "lr": 1e-9, "min_lr": 1e-9, "warmup_steps": 0}
    single = config("single", init_from=str(tmp_path / "whole"), data={"packing": False}, **no_change)
    assert trained(single)["val"] == pytest.approx(whole["val"], rel=1e-5)
    assert local_score(EvalConfig(run=str(tmp_path / "whole"))).loss == pytest.approx(whole["val"][0], rel=1e-5)


@pytest.mark.redundant
def test_a_loss_is_that_of_the_answers_alone(chat_config):
    run = built(chat_config(micro_batch_size=4, model="gpt2-demo"))
    tokens, targets = run.corpus.batches(0, 0)
    with torch.no_grad():
        logits = run.strategy.model(tokens)
    counts = targets != -100
    expected = cross_entropy(logits[counts].double(), targets[counts])
    assert 0 < counts.sum() < counts.numel() / 2
    record, _ = take_step(run, 0, lambda: 0)
    assert record.loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.redundant
def test_a_run_keeps_its_template_and_is_evaluated_on_the_answers(chat_config, tmp_path):
    path = chats.write_tokenizer(
        tmp_path / "model",
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    )
    config = chat_config({"tokenizer": f"json:{path}", "template": ""}, eval_rows=100)
    seen = trained(config)
    kept = tokenizer_folder(Path(config.out))
    assert load_tokenizer(kept).vocab_size == 259
    assert (kept / "chat_template.jinja").read_text().startswith("{% for m in messages %}[")
    assert json.loads((kept / "special_tokens_map.json").read_text()) == {"eos_token": "<|im_end|>"}
    scores = local_score(EvalConfig(run=config.out))
    assert scores.loss == pytest.approx(seen["val"][0], rel=1e-5)
    assert scores.bits_per_byte is None
    assert 0 < scores.num_tokens < 200


@pytest.mark.redundant
def test_each_validation_set_is_logged_by_its_name(chat_config, tmp_path):
    rows = chats.conversations(20, seed=1)
    for name, some in (("a", rows[:9]), ("b", rows[9:])):
        chats.write_rows(tmp_path / f"{name}.jsonl", some)
    sets = tuple(f"{name}={tmp_path}/{name}.jsonl" for name in "ab")
    config = chat_config({"val_path": sets, "tokenizer": "bpe:260"}, eval_interval=2, eval_rows=100)
    trained(config, 2)
    evals = events_of(config.out, "eval")
    assert [line["step"] for line in evals] == [0, 2, 3]
    assert all({"loss", "val_loss/a", "val_loss/b"} <= line.keys() for line in evals)
    assert len({evals[-1][key] for key in ("loss", "val_loss/a", "val_loss/b")}) == 3
    summary = summary_of(config.out)
    assert {key: summary[key] for key in ("val_loss/a", "val_loss/b")} == {
        key: evals[-1][key] for key in ("val_loss/a", "val_loss/b")
    }
    read = read_run(config.out)
    assert read.validation_sets == ["a", "b"]
    assert read.evaluations[-1].named == {name: evals[-1][f"val_loss/{name}"] for name in "ab"}
    (folder,) = tmp_path.glob("text-a-*")
    scores = local_score(EvalConfig(run=config.out, data_dir=str(folder), split="train"))
    assert scores.loss == pytest.approx(evals[-1]["val_loss/a"], rel=1e-5)


REFUSALS = [
    (["--data.format", "chat"], "data.template: the tokenizer bytes has no chat template"),
    (["--data.format", "chat", "--data.template", "no.jinja"], "data.template: no.jinja cannot be read"),
    (["--data.format", "chat", "--data.template", "chatml", "--data.messages", "talk"], "no column 'talk'"),
    (["--data.format", "prompt"], "has no column 'prompt'"),
    (["--data.format", "chat", "--data.template", "chatml", "--seq-len", "2"], "has a target within 2 tokens"),
    (["--data.format", "chat", "--data.template", "chatml", "--micro-batch-size", "99"], "one batch needs 99"),
]


@pytest.mark.redundant(but=["data.template: no.jinja cannot"])
@pytest.mark.parametrize(("words", "line"), REFUSALS, ids=[line[:30] for _, line in REFUSALS])
def test_what_cannot_be_is_refused_in_a_line(words, line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    chats.write_rows(tmp_path / "rows.jsonl", chats.conversations(70))
    assert main(["train", "--data", "text", "--data.path", "rows.jsonl", "--out", "run", *words]) == 2
    err = capfd.readouterr().err
    assert re.fullmatch(rf"error: [^\n]*{line}[^\n]*\n", err), err


@pytest.mark.redundant
def test_a_folder_of_examples_is_not_read_as_text(chat_config, tmp_path):
    trained(chat_config())
    data = {"format": "text", "template": "", "messages": "messages"}
    with pytest.raises(UserError, match=r"data\.dir: "):
        built(chat_config(data, out=str(tmp_path / "other")))
