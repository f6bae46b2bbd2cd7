"""Runs on several weighted sources: the same however they are spread, resumed or written, and told what they took."""

import re
from pathlib import Path

import pytest

import chats
from tiny_runs import built, events_of, summary_of, trained
from zeroshard.cli import main
from zeroshard.errors import UserError
from zeroshard.inference.evaluation import local_score
from zeroshard.train.config.command_settings import EvalConfig
from zeroshard.train.config.toml import load_config


@pytest.fixture
def mixed(tiny_config, tmp_path):
    """`mixed(name, data={}, **changes)`: a run on two sources, of short and of long completions."""
    short = [{"prompt": f"{i}", "completion": "x" * (i % 3 + 1)} for i in range(90)]
    long = [{"prompt": f"{i}", "completion": "yz" * (i % 9 + 9)} for i in range(60)]
    for name, rows in (("short", short), ("long", long)):
        chats.write_rows(tmp_path / f"{name}.jsonl", rows)
    weights = (f"{tmp_path}/short.jsonl=3", f"{tmp_path}/long.jsonl=1")

    def make(name, data=None, **changes):
        table = {"source": "text", "mix": weights, "format": "prompt", "dir": str(tmp_path / "tokens"), **(data or {})}
        sizes = {"seq_len": 64, "micro_batch_size": 8, "max_steps": 6, "decay_steps": 6, "eval_interval": 0}
        sizes["eval_rows"] = 20
        return tiny_config(**{"data": table, "out": str(tmp_path / name), **sizes, **changes})

    return make


@pytest.mark.parametrize("packing", [False, True])
def test_a_mixed_run_is_the_same_however_it_is_spread_and_resumed(mixed, packing):
    data = {"packing": packing}
    whole = trained(mixed("whole", data))
    spread = trained(mixed("spread", data, strategy="zero3", micro_batch_size=2, grad_accum_steps=2), 2)
    for key, values in whole.items():
        assert spread[key] == pytest.approx(values, rel=2e-5), key
    trained(mixed("half", data, max_steps=3))
    rest = trained(mixed("half", data, resume="auto"))
    assert rest == {key: whole[key] for key in (4, 5, 6, "val")}


def test_it_is_told_how_much_of_each_source_a_run_takes(mixed, capsys):
    config = mixed("run", max_steps=20)
    trained(config)
    (start,), summary = events_of(config.out, "start"), summary_of(config.out)
    (short, of_short), (long, of_long) = start["rows"]["mix"].items()
    assert (Path(short).name, Path(long).name) == ("short.jsonl", "long.jsonl")
    assert of_short["rows"] + of_long["rows"] == 20 * 8
    assert 0.6 < of_short["rows"] / 160 < 0.9
    assert of_short["tokens"] < of_long["tokens"]  # its rows are many, and short
    assert summary["tokens_by_source"] == {short: of_short["tokens"], long: of_long["tokens"]}
    run = built(mixed("again", max_steps=20))
    counted = sum(int((run.corpus.batches(step, 0)[0] != 0).sum()) for step in range(20))  # ids of padding are 0
    assert counted == of_short["tokens"] + of_long["tokens"]
    assert re.search(r"long\.jsonl \d\d\.\d % of tokens, [\d.]+ epochs", capsys.readouterr().out)


def test_plain_text_is_mixed_too_and_evaluated_by_its_folders(tiny_config, tmp_path):
    for name, word in (("a", "alpha "), ("b", "beta ")):
        (tmp_path / f"{name}.txt").write_text(word * 400)
    toml = tmp_path / "mix.toml"
    toml.write_text(
        f'[data]\nsource = "text"\ndir = "{tmp_path}/tokens"\n[data.mix]\n"{tmp_path}/a.txt" = 0.9\n'
        f'"{tmp_path}/b.txt" = 0.1\n'
    )
    data = load_config(toml).data
    assert data.weights == {f"{tmp_path}/a.txt": 0.9, f"{tmp_path}/b.txt": 0.1}
    config = tiny_config(data=data, seq_len=16, micro_batch_size=4, max_steps=3, out=str(tmp_path / "run"))
    seen = trained(config)
    again = load_config(Path(config.out) / "config.toml")
    assert again.data == data
    with pytest.raises(UserError, match=r"data_dir: the run mixes 2 sources; name one of .*tokens.*, .*tokens"):
        local_score(EvalConfig(run=config.out))
    folders = sorted((tmp_path / "tokens").iterdir())
    scores = [local_score(EvalConfig(run=config.out, data_dir=str(folder))).loss for folder in folders]
    assert min(scores) < seen["val"][0] < max(scores)


def test_a_source_of_weight_0_is_left_out_and_other_weights_are_another_run(mixed, tmp_path):
    weights = (f"{tmp_path}/short.jsonl=1", f"{tmp_path}/nothing.jsonl=0")
    run = built(mixed("run", {"mix": weights}))
    assert "mix" not in run.corpus.facts
    trained(mixed("other", max_steps=2))
    changed = (f"{tmp_path}/short.jsonl=2", f"{tmp_path}/long.jsonl=1")
    resumed = mixed("other", {"mix": changed}, resume="auto")
    with pytest.raises(UserError, match=r"data\.mix: the prepared tokens are not those"):
        built(resumed)


def test_a_mixed_file_that_is_not_there_is_refused_in_a_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    chats.write_rows(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(70)])
    assert main(["train", "--data", "text", "--out", "run", "--data.mix", "a.jsonl=1", "gone.jsonl=2"]) == 2
    assert re.fullmatch(r"error: data\.path: [^\n]*gone\.jsonl[^\n]*\n", capfd.readouterr().err)
