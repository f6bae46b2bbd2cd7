import json
import math
import re
import sys

import numpy as np
import pytest
import torch

import forked
from zeroshard.comm import run_threads
from zeroshard.data import TokenDataset, load_tokenizer
from zeroshard.data.joining import num_text_bytes
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.tokenizer import train_bpe
from zeroshard.host.errors import UserError
from zeroshard.integrations.hf_export import run_export
from zeroshard.settings.validate import validate
from zeroshard.train.config.command_settings import EvalConfig, ExportConfig
from zeroshard.train.inference.evaluation import Scores, in_words, local_score, run_eval, score
from zeroshard.train.inference.generate import load_for_text
from zeroshard.train.start import run_training

CPU = torch.device("cpu")


@pytest.fixture
def run(text_config, made_once):
    """A trained run on bytes; its folder, with the text and its tokens beside it."""

    def train(folder):
        (folder / "text.txt").write_text("abcd\n" * 2000)
        data = {"source": "text", "path": (str(folder / "text.txt"),), "dir": str(folder / "tokens")}
        run_training(text_config(max_steps=3, ema_decay=0.5, out=str(folder / "run"), data=data))

    return made_once("trained-on-text", train) / "run"


@pytest.mark.redundant
def test_all_of_a_split_is_scored_to_the_last_row(run):
    scores = local_score(EvalConfig(run=str(run), micro_batch_size=1))
    tokens = TokenDataset.open(run.parent / "tokens", "val")
    num_rows = (tokens.num_tokens - 1) // 16
    model, _ = load_for_text(run)
    ids = torch.from_numpy(tokens.window(0, num_rows * 16 + 1).astype(np.int64))
    with torch.no_grad():
        loss = model(ids[:-1].view(-1, 16), ids[1:].view(-1, 16)).item()
    assert scores.loss == pytest.approx(loss, rel=1e-6)
    assert scores.perplexity == pytest.approx(math.exp(loss))
    assert (scores.num_tokens, scores.num_bytes, scores.step) == (num_rows * 16, num_rows * 16, 3)
    assert scores.bits_per_byte == pytest.approx(loss / math.log(2))


@pytest.mark.redundant(but=["zero3-2-2"])
@pytest.mark.parametrize(
    ("strategy", "share", "world"), [("zero0", 1, 2), ("zero2", 1, 2), ("zero3", 2, 2), ("none", 1, 2), ("none", 2, 4)]
)
def test_every_strategy_and_world_has_the_same_score(run, strategy, share, world):
    one = local_score(EvalConfig(run=str(run)))
    config = EvalConfig(run=str(run), strategy=strategy, sequence_parallel=share)
    for scores in run_threads(lambda comm: score(config, comm, CPU), world):
        assert scores.loss == pytest.approx(one.loss, rel=1e-6)
        assert (scores.num_tokens, scores.num_bytes) == (one.num_tokens, one.num_bytes)


@pytest.mark.redundant
def test_the_average_has_a_score_of_its_own(run):
    last, average = (local_score(EvalConfig(run=str(run), weights=weights)) for weights in ("last", "ema"))
    assert last.loss != average.loss


def test_some_batches_may_be_enough(run):
    assert local_score(EvalConfig(run=str(run), batches=2, micro_batch_size=4)).num_tokens == 2 * 4 * 16


def test_other_text_may_be_scored_and_another_tokenizer_is_refused(run, tmp_path):
    (tmp_path / "other.txt").write_text("dcba\n" * 500)
    spec = DataSpec("text", (str(tmp_path / "other.txt"),))
    other = prepare(spec, tmp_path / "other")
    worse = local_score(EvalConfig(run=str(run), data_dir=str(other), split="train"))
    assert worse.loss != local_score(EvalConfig(run=str(run))).loss
    wrong = prepare(DataSpec("text", spec.paths, "bpe:258"), tmp_path / "wrong")
    with pytest.raises(UserError, match=r"data_dir: .*another tokenizer \(bpe:258\) than .* \(bytes\); prepare"):
        local_score(EvalConfig(run=str(run), data_dir=str(wrong)))


def test_a_hugging_face_folder_has_the_score_of_the_run_that_it_came_from(run, tmp_path):
    assert run_export(ExportConfig(source=str(run), out=str(tmp_path / "hf"))) == 0
    theirs = EvalConfig(run=str(tmp_path / "hf"), data_dir=str(run.parent / "tokens"), seq_len=16)
    assert local_score(theirs).loss == pytest.approx(local_score(EvalConfig(run=str(run))).loss, rel=1e-6)
    with pytest.raises(UserError, match=r"data_dir: a Hugging Face folder says nothing of data"):
        local_score(EvalConfig(run=str(tmp_path / "hf")))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_text_is_scored_without_a_prepare_before_it(run, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    text, file = "dcba\n" * 500, tmp_path / f"other.{kind}"
    file.write_text(text if kind == "txt" else json.dumps({"text": text}) + "\n")
    prepared = prepare(DataSpec("text", (str(file),), val_fraction=0.0), tmp_path / "other")
    theirs = local_score(EvalConfig(run=str(run), data_dir=str(prepared), split="train"))
    assert local_score(EvalConfig(run=str(run), data=str(file))) == theirs
    assert run_export(ExportConfig(source=str(run), out=str(tmp_path / "hf"))) == 0
    hugging_face = local_score(EvalConfig(run=f"hf:{tmp_path / 'hf'}", data=str(file), seq_len=16))
    assert (hugging_face.loss, hugging_face.num_tokens) == (pytest.approx(theirs.loss, rel=1e-6), theirs.num_tokens)
    with pytest.raises(UserError, match=r"^data: is given beside data_dir; give one of the two"):
        validate(EvalConfig, {"run": str(run), "data": str(file), "data_dir": "data/mine"})
    with pytest.raises(UserError, match=r"no\.txt"):
        local_score(EvalConfig(run=str(run), data=str(tmp_path / "no.txt")))


def test_a_folder_with_nothing_in_it_is_named(tmp_path):
    with pytest.raises(UserError, match=r"^run: .*holds no run .*; give a run folder"):
        local_score(EvalConfig(run=str(tmp_path)))
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.toml").touch()
    for path, line in (
        (tmp_path, f"holds no run (no config.toml) and no Hugging Face model; give a run folder, as {tmp_path}/first"),
        (tmp_path / "no", f"run: there is no folder {tmp_path}/no; give a run folder, as runs/NAME"),
        (tmp_path / "first" / "config.toml", "config.toml is a file, not a run folder; "),
    ):
        with pytest.raises(UserError, match=re.escape(line)):
            local_score(EvalConfig(run=str(path)))


def test_tokens_without_text_have_no_bits(tiny_config):
    config = tiny_config(max_steps=2)
    run_training(config)
    scores = local_score(EvalConfig(run=config.out))
    assert (scores.bits_per_byte, scores.num_bytes) == (None, 0)
    assert "bits" not in in_words(scores)


@pytest.mark.redundant
def test_one_line_is_printed_for_people_or_machines(run, capsys):
    assert run_eval(EvalConfig(run=str(run))) == 0
    words = capsys.readouterr().out
    assert run_eval(EvalConfig(run=str(run), json_line=True)) == 0
    scores = Scores(**json.loads(capsys.readouterr().out))
    assert words == in_words(scores) + "\n"
    assert words.startswith(f"loss {scores.loss:.4f}  perplexity ")


def test_an_evaluation_on_two_ranks_prints_its_line_alone(run):
    words = [sys.executable, "-m", "zeroshard", "eval", str(run), "--nproc", "2"]
    done = forked.run(words, capture_output=True, text=True, timeout=600, check=False)
    said = in_words(local_score(EvalConfig(run=str(run)))) + "\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


@pytest.mark.parametrize("name", ["bpe", "bytes"])
def test_the_bytes_of_ids_are_those_of_their_text(name, tmp_path):
    text = "über the cat sat ☃ on the mat\n" * 20
    if name == "bpe":
        tokenizer = train_bpe(265, [text])
        ids = np.append(tokenizer.encode(text), tokenizer.eos_id)
    else:
        (tmp_path / "a.txt").write_text(text)
        tokenizer = load_tokenizer(prepare(DataSpec("text", (str(tmp_path / "a.txt"),)), tmp_path / "d"))
        ids = tokenizer.encode(text)
    assert num_text_bytes(tokenizer, ids) == len(text.encode())
    halves = num_text_bytes(tokenizer, ids[:31]) + num_text_bytes(tokenizer, ids[31:])
    assert halves == len(text.encode())
