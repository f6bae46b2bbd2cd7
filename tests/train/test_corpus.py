import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import small_tables as made
from tiny_runs import built, trained
from zeroshard.comm import LocalCommunicator
from zeroshard.data import TokenDataset, load_tokenizer
from zeroshard.data import tables as tables_module
from zeroshard.data.lanes import Lanes
from zeroshard.data.meta import read_meta, write_meta
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.host.errors import UserError
from zeroshard.train.config.command_settings import EvalConfig
from zeroshard.train.inference.evaluation import _warn_of_overlap, local_score
from zeroshard.train.setup.corpus import open_corpus
from zeroshard.train.setup.run_folder import tokenizer_folder
from zeroshard.train.start import run_training


@pytest.fixture
def streamed(tiny_config, tmp_path, monkeypatch):
    """`streamed(**changes)`: a run that trains straight from a folder of tables."""
    monkeypatch.setattr(tables_module, "PART_BYTES", 2000)
    (tmp_path / "set").mkdir()
    for i in range(2):
        made.write_table(tmp_path / "set" / f"{i}.parquet", made.documents(400, seed=i))

    def make(data=None, **changes):
        table = {"source": "text", "path": (str(tmp_path / "set"),), "streaming": True, **(data or {})}
        return tiny_config(data=table, **changes)

    return make


@pytest.mark.redundant
def test_a_streamed_run_that_goes_on_has_the_losses_of_one_that_never_stopped(streamed, tmp_path):
    constant = {"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0}  # a schedule would follow max_steps
    changes = {"global_batch_size": 4, "max_steps": 7, "eval_interval": 0, **constant}
    whole = trained(streamed(**changes, out=str(tmp_path / "whole")))
    half = streamed(**changes, out=str(tmp_path / "half"))
    trained(half.model_copy(update={"max_steps": 4}))
    assert load_tokenizer(tokenizer_folder(Path(half.out))).name == "bytes"  # text is written without the stream
    wide = shutil.copytree(half.out, tmp_path / "wide")
    rest = trained(half.model_copy(update={"resume": "auto"}))
    assert list(rest) == [5, 6, 7, "val"]
    assert rest == {step: whole[step] for step in rest}
    rest = trained(half.model_copy(update={"resume": "auto", "out": str(wide)}), 2)
    assert rest == {step: pytest.approx(whole[step], rel=1e-5) for step in rest}  # sums over ranks: another order


@pytest.mark.redundant
def test_a_stream_that_goes_on_reads_on_from_where_it_was(streamed, monkeypatch):
    """What lies before it is not encoded again; another batch takes the next rows, and the run says so."""
    config = streamed(max_steps=12, eval_interval=0)
    run_training(config)
    took, take = [], Lanes.take
    monkeypatch.setattr(Lanes, "take", lambda self, *args: (took.append(self._split), take(self, *args))[1])
    lines = trained(config.model_copy(update={"resume": "auto", "max_steps": 13}))
    assert list(lines) == [13, "val"]
    assert took.count("train") <= 2


@pytest.mark.redundant
def test_a_stream_of_another_batch_goes_on_with_the_next_row(streamed, capsys):
    run_training(streamed(max_steps=3, eval_interval=0))
    config = streamed(max_steps=4, eval_interval=0, grad_accum_steps=3, resume="auto")
    assert built(config).corpus.batches.position(4)["row"] == 3 * 2 + 3 * 2
    line = "resume: a step had 32 tokens, now it has 96: data continue with the next row of the stream"
    assert line in capsys.readouterr().err


def test_what_validates_in_a_prepared_folder_was_never_streamed(streamed, tmp_path, capsys):
    """At the same fraction or a smaller one; at a larger one, or by another rule of split, a line warns."""
    config = streamed(max_steps=2, eval_interval=0)
    run_training(config)
    corpus = open_corpus(config.model_copy(update={"micro_batch_size": 8000}), LocalCommunicator(), 1)
    streamed_text = b"".join(bytes(row.tolist()) for row in corpus.batches(0, 0)[0])
    assert corpus.position(1)["epoch"] >= 1  # all of it
    corpus.close()
    for fraction in (0.05, 0.1, 0.3):
        spec = DataSpec("text", config.data.path, val_fraction=fraction)
        folder = prepare(spec, tmp_path / str(fraction), num_workers=1)
        val = TokenDataset.open(folder, "val")
        documents = bytes(val.window(0, val.num_tokens).tolist()).split(b"\n")[:-1]
        leaked = [each for each in documents if each + b"\n" in streamed_text]
        assert bool(leaked) == (fraction > 0.1)
        capsys.readouterr()
        _warn_of_overlap(Path(config.out), folder)
        err = capsys.readouterr().err
        assert ("the run held out 0.1 of its text, and this folder" in err) == bool(err) == (fraction > 0.1)
    meta = read_meta(folder)
    write_meta(folder, replace(meta, spec={**meta.spec, "split": "another-1"}))
    local_score(EvalConfig(run=config.out, data_dir=str(folder), batches=1))
    assert "may hold for validation what the run was trained on: the run held out other" in capsys.readouterr().err


@pytest.mark.redundant
def test_other_tables_are_refused_when_a_run_goes_on(streamed, tmp_path):
    config = streamed(max_steps=2)
    run_training(config)
    made.write_table(tmp_path / "set" / "2.parquet", made.documents(400, seed=2))
    with pytest.raises(UserError, match="the prepared tokens are not those that the checkpoint was trained on"):
        run_training(config.model_copy(update={"resume": "auto", "max_steps": 3}))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"max_tokens": 5}, r"data\.max_tokens: 5 cannot bound a stream"),
        ({"tokenizer": "bpe:300"}, r"data\.tokenizer: bpe:300 would have to be trained before the first step"),
        ({"source": "python-stdlib", "path": ()}, r"data\.streaming: the source python-stdlib is no table of texts"),
        ({"document_mask": True}, r"data\.document_mask: the tokenizer bytes has no id that ends a document"),
    ],
)
def test_what_cannot_be_streamed_is_refused(streamed, data, line):
    with pytest.raises(UserError, match=line):
        run_training(streamed(data=data))


@pytest.mark.redundant(but=["ddp"])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_run_may_keep_attention_inside_documents(tiny_config, tmp_path, strategy):
    made.write_table(tmp_path / "a.jsonl", made.documents(300))
    data = {"source": "text", "path": (str(tmp_path / "a.jsonl"),), "tokenizer": "bpe:270", "dir": str(tmp_path / "d")}
    ours = {}
    for mask in (False, True):
        config = tiny_config(data={**data, "document_mask": mask}, strategy=strategy, out=str(tmp_path / str(mask)))
        ours[mask] = trained(config) if strategy == "zero3" else run_training(config)
    if strategy == "zero3":
        assert ours[True] != ours[False]
