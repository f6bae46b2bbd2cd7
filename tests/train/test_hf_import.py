"""From a Hugging Face folder to a run: what it can do afterwards, and what is refused."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from zeroshard import checkpoint
from zeroshard.cli import main
from zeroshard.train.config.toml import load_config


@pytest.fixture(scope="module")
def exported(made_once):
    """A small GPT-2 that learned a text, in Hugging Face's form, with its tokenizer; the text beside it."""
    return made_once("exported", _export)


def _export(folder):
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log\n" * 400)
    words = [
        "train", "--model.n-layer", "1", "--model.n-embd", "32", "--model.n-head", "2", "--device", "cpu",
        "--data", "text", "--data.path", str(text), "--data.tokenizer", "bpe:270", "--data.dir", str(folder / "data"),
        "--seq-len", "16", "--micro-batch-size", "4", "--max-steps", "40", "--lr", "0.02", "--eval-interval", "0",
        "--eval-batches", "2", "--out", str(folder / "run"),
    ]  # fmt: skip
    assert main(words) == 0
    assert main(["export", str(folder / "run"), str(folder / "hf")]) == 0


@pytest.fixture
def text(exported):
    return exported / "text.txt"


@pytest.fixture
def hf(exported, tmp_path):
    return shutil.copytree(exported / "hf", tmp_path / "hf")


def summary(run):
    return json.loads((run / "summary.json").read_text())


def change(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.redundant
def test_an_imported_run_writes_text_and_trains_on_from_its_loss(hf, exported, text, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["import", str(hf), str(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert re.search(r"[\d,]+ parameters, 270 tokens$", told[0])
    assert told[1] == (
        f"to train on: zeroshard train --config {run}/config.toml --resume auto --data text --data.path FILES"
    )
    texts = []
    for folder in (run, exported / "run"):
        assert (
            main(["generate", str(folder), "--prompt", "the cat", "--max-new-tokens", "9", "--temperature", "0"]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("the cat sat on")
    shutil.rmtree(hf)  # a run needs nothing but its own folder
    words = [
        "train", "--config", str(run / "config.toml"), "--resume", "auto", "--data", "text", "--data.path", str(text),
        "--data.dir", str(tmp_path / "data"), "--seq-len", "16", "--micro-batch-size", "4", "--max-steps", "2",
        "--warmup-steps", "0", "--lr", "1e-9", "--min-lr", "0", "--weight-decay", "0", "--eval-batches", "2",
        "--device", "cpu", "--strategy", "zero3",
    ]  # fmt: skip
    assert main(words) == 0
    assert summary(run)["val_loss"] == pytest.approx(summary(exported / "run")["val_loss"], abs=1e-5)
    assert (
        main([*words[:-2], "--max-steps", "3"]) == 0
    )  # its own tokenizer is still the one that the data were made with
    assert summary(run)["step"] == 3


def test_an_imported_run_is_fine_tuned_on_data_that_are_named_and_on_no_other(hf, tmp_path, refusal):
    run = tmp_path / "run"
    assert main(["import", str(hf), str(run)]) == 0
    settings = load_config(run / "config.toml")
    assert (settings.lr, settings.min_lr, settings.data.source) == (2e-5, 2e-6, "unnamed")
    before = sorted(run.rglob("*"))
    line = refusal("train", "--config", run / "config.toml", "--resume", "auto")
    assert line == (
        "error: data: the run was imported and names no data to train on; "
        "add --data text --data.path FILES, or another source, see --help"
    )
    assert refusal("prepare", "--config", run / "config.toml") == line
    assert refusal("eval", run).startswith("error: data_dir: ")
    assert sorted(run.rglob("*")) == before


def test_every_size_of_the_model_is_in_the_configuration(tmp_path):
    from dataclasses import replace

    from zeroshard.models import LlamaConfig, model_config
    from zeroshard.train.setup.assemble import model_overrides, model_table

    shape = LlamaConfig(vocab_size=77, seq_len=40, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, ffn_hidden=24)
    for config in (shape, replace(shape, tie_embeddings=True, rope_theta=123.0, norm_eps=0.25)):
        table = model_table(config)
        assert model_config(table.name, vocab_size=300, overrides=model_overrides(table)) == config


def test_weights_keep_their_dtype_and_a_head_that_is_tied_is_left_out(hf, tmp_path):
    tensors = {name: tensor.half() for name, tensor in load_file(hf / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    assert main(["import", str(hf), str(tmp_path / "run")]) == 0
    manifest = checkpoint.read_manifest(tmp_path / "run" / "checkpoints" / "step-00000000")
    assert {entry.dtype for entry in manifest.tensors} == {"F16"}
    assert manifest.tied == {"lm_head.weight": "wte.weight"}
    assert "lm_head.weight" not in {entry.name for entry in manifest.tensors}
    assert manifest.extra["imported_from"] == "hf"


def test_without_a_tokenizer_there_are_weights_alone(hf, tmp_path, capsys, refusal):
    (hf / "tokenizer.json").unlink()
    assert main(["import", str(hf), str(tmp_path / "run")]) == 0
    assert "no tokenizer" in capsys.readouterr().out
    assert "has no tokenizer; import the model from" in refusal("generate", tmp_path / "run")
    assert load_config(tmp_path / "run" / "config.toml").data.tokenizer == "bytes"
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert not (tmp_path / "again" / "tokenizer.json").exists()


def rewritten(hf, **tensors):
    """Replace tensors of the folder's file."""
    named = {
        f"transformer.{name}.weight" if name == "wte" else f"{name}.weight": each for name, each in tensors.items()
    }
    save_file({**load_file(hf / "model.safetensors"), **named}, hf / "model.safetensors")


def _of_100_ids(hf):
    change(hf / "config.json", vocab_size=100)
    rewritten(hf, wte=load_file(hf / "model.safetensors")["transformer.wte.weight"][:100].clone())


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (
            lambda hf: change(hf / "config.json", model_type="bert"),
            "config.json: model_type: 'bert' cannot be imported",
        ),
        (lambda hf: change(hf / "config.json", n_layer=2), "transformer.h.1.ln_1.weight: is not among the weights"),
        (lambda hf: (hf / "model.safetensors").unlink(), "source: .* holds no model.safetensors"),
        (
            lambda hf: rewritten(hf, lm_head=torch.zeros(270, 32)),
            "lm_head.weight: is tied to transformer.wte.weight and",
        ),
        (lambda hf: rewritten(hf, wte=torch.zeros(270, 32).char()), "transformer.wte.weight: is of dtype I8"),
        (_of_100_ids, "tokenizer.json: has 270 tokens, the model 100"),
        (lambda hf: (hf / "tokenizer.json").write_text("{}"), "data.tokenizer: .*tokenizer.json cannot be read"),
    ],
)
def test_what_cannot_be_imported_is_one_line_and_leaves_nothing(hf, tmp_path, refusal, spoil, line):
    spoil(hf)
    assert re.search(line, refusal("import", hf, tmp_path / "run"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_a_run_folder_that_is_there_is_left_alone(hf, tmp_path, refusal):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("mine")
    assert "is there already; name a new folder" in refusal("import", hf, tmp_path / "run")
    assert (tmp_path / "run" / "config.toml").read_text() == "mine"


def test_tokens_of_a_larger_vocabulary_than_the_models_are_refused(hf, tmp_path, text, refusal):
    assert main(["import", str(hf), str(tmp_path / "run")]) == 0
    words = [
        "train",
        "--config",
        tmp_path / "run" / "config.toml",
        "--resume",
        "auto",
        "--device",
        "cpu",
        "--data",
        "text",
    ]
    other = ["--data.path", text, "--data.tokenizer", "bpe:275", "--data.dir", tmp_path / "data", "--seq-len", "16"]
    assert "model.vocab_size: 270 is below the 275 ids" in refusal(*words, *other)


@pytest.mark.parametrize("fault", ["lost", "no meta", "cut"])
def test_a_lost_or_damaged_tokenizer_of_a_run_is_named_and_training_on_mends_it(
    fault, exported, tmp_path, refusal, capsys
):
    run, checked = tmp_path / "run", ("generate", "eval", "export", "train")
    shutil.copytree(exported / "run", run)
    kept = run / "tokenizer"
    if fault == "lost":
        shutil.rmtree(kept)
    elif fault == "no meta":
        (kept / "meta.json").unlink()
    else:
        os.truncate(kept / "tokenizer.json", 100)
    words = {"eval": ["--data-dir", exported / "data"], "export": [tmp_path / "hf"]}
    start = ["--init-from", run, "--data", "text", "--data.path", exported / "text.txt", "--out", tmp_path / "next"]
    for verb in checked:
        if fault == "cut" and verb in ("eval", "train"):
            continue  # which read no tokenizer.json of the run, or read it as a file of the user's
        if fault == "lost" and verb == "export":  # the weights are there
            assert main(["export", str(run), str(tmp_path / "bare")]) == 0
            assert capsys.readouterr().out.endswith(f"no tokenizer: {kept} is not there\n")
            continue
        said = refusal(verb, *(start if verb == "train" else [run, *words.get(verb, [])]))
        assert said.startswith(f"error: run: {kept}")
        assert said.endswith("or train it on by --resume auto, which writes it again")
    again = ["--config", str(run / "config.toml"), "--out", str(run), "--resume", "auto", "--max-steps", "41"]
    assert main(["train", *again]) == 0
    assert main(["export", str(run), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "tokenizer.json").exists()
