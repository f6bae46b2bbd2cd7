"""One tokenizer has one end of text, wherever its files are read, kept, prepared, trained on, exported or imported."""

import json
import shutil

import numpy as np
import pytest

import chats
from hf_models import make_model
from zeroshard.cli import main
from zeroshard.data.meta import read_meta
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.tokenizer import load_tokenizer, read_tokenizer, tokenizer_identity
from zeroshard.train.config.command_settings import GenerateConfig
from zeroshard.train.inference.generate import chat_of, load_for_text, options_of

END = "<|im_end|>"  # what the folder names; by its spelling it would be <|endoftext|>


@pytest.fixture
def folder(tmp_path):
    """A tokenizer whose end is named in `tokenizer_config.json`, with a second end of answers."""
    path = chats.write_tokenizer(tmp_path / "theirs", "{{ messages[0].content }}", bos_token="<|im_start|>")
    write(path.with_name("generation_config.json"), eos_token_id=[258, 256])
    return path.parent


def write(path, **content):
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_start|>", "lstrip": False}}}, "<|im_start|>"),
        ({"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {}}, "<|endoftext|>"),
        ({"tokenizer_config.json": {"eos_token": "<gone>"}, "config.json": {"eos_token_id": 258}}, "<|im_end|>"),
        ({"generation_config.json": {"eos_token_id": [258, 256]}}, "<|im_end|>"),
        ({"config.json": {"eos_token_id": 9999}}, "<|endoftext|>"),
        ({}, "<|endoftext|>"),
    ],
)
def test_the_end_of_a_text_is_the_one_that_the_files_name(tmp_path, files, end):
    path = chats.write_tokenizer(tmp_path)
    path.with_name("tokenizer_config.json").unlink()
    for name, content in files.items():
        write(tmp_path / name, **content)
    tokenizer = read_tokenizer(path)
    assert (tokenizer.eos_token, tokenizer.token(tokenizer.eos_id)) == (end, end)
    assert (tokenizer_identity(f"json:{path}") == tokenizer_identity(f"json:{alone(path)}")) == (end == "<|endoftext|>")


def alone(path):
    """The same file where nothing is beside it."""
    (path.parent / "alone").mkdir()
    return shutil.copy(path, path.parent / "alone")


@pytest.mark.redundant(but=["jsonl-1"])
@pytest.mark.parametrize(("kind", "workers"), [("jsonl", 1), ("txt", 2)])
def test_documents_end_with_it_in_every_process(folder, tmp_path, kind, workers):
    texts = [f"text {number}" for number in range(90)]
    files = []
    if kind == "jsonl":
        files = [chats.write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])]
    else:
        (tmp_path / "in").mkdir()
        for number, text in enumerate(texts):
            files.append(tmp_path / "in" / f"{number:03d}.txt")
            files[-1].write_text(text)
    spec = DataSpec("text", tuple(map(str, files)), f"json:{folder}/tokenizer.json", 0.1)
    out = prepare(spec, tmp_path / "out", num_workers=workers)
    meta, tokenizer = read_meta(out), load_tokenizer(out)
    assert (meta.eos_id, tokenizer.eos_token, tokenizer.stop_ids) == (258, END, (256, 258))
    ids = np.fromfile(out / meta.splits["train"].shards[0].file, "<u2")
    assert (ids == 258).sum() + (np.fromfile(out / meta.splits["val"].shards[0].file, "<u2") == 258).sum() == 90
    assert not (ids == 256).any()
    assert read_tokenizer(out / "tokenizer.json").eos_id == 258  # as a tokenizer of further validation sets


def run_on(folder, tmp_path, *words, generation=(258, 256)):
    make_model("llama", vocab_size=270, eos_token_id=258, rope_scaling=None).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if generation:
        write(folder / "generation_config.json", eos_token_id=generation)
    sizes = ["--seq-len", "16", "--micro-batch-size", "2", "--max-steps", "1", "--eval-batches", "1"]
    return main(["train", *sizes, "--warmup-steps", "0", "--device", "cpu", "--out", str(tmp_path / "run"), *words])


@pytest.mark.redundant(but=["True"])
@pytest.mark.parametrize("imported", [False, True])
def test_template_and_ends_survive_training_and_export(folder, tmp_path, imported):
    transformers = pytest.importorskip("transformers")
    rows = chats.write_rows(tmp_path / "a.jsonl", [{"text": f"text {number} " * 9} for number in range(90)])
    data = ["--data", str(rows), "--data.dir", str(tmp_path / "tokens")]
    if imported:
        make_model("llama", vocab_size=270, eos_token_id=258, rope_scaling=None).save_pretrained(folder)
        write(folder / "generation_config.json", eos_token_id=[258, 256])
        assert main(["import", str(folder), str(tmp_path / "first")]) == 0
        assert (
            run_on(
                folder, tmp_path, "--config", f"{tmp_path}/first/config.toml", "--init-from", f"{tmp_path}/first", *data
            )
            == 0
        )
    else:
        assert run_on(folder, tmp_path, "--model", f"hf:{folder}", *data) == 0
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/out"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token, theirs.eos_token_id, theirs.bos_token) == (END, 258, "<|im_start|>")
    messages = [{"role": "user", "content": "hello"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "hello"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sorted(model.generation_config.eos_token_id) == [256, 258]
    for place in (f"{tmp_path}/run", f"hf:{tmp_path}/out", f"{tmp_path}/out"):
        tokenizer = load_for_text(place if place.startswith("hf:") else tmp_path / place.rpartition("/")[2])[1]
        config = GenerateConfig(run=place, message="hello")
        assert options_of(config, tokenizer)["stop"] == (256, 258)
        assert tokenizer.decode(chat_of(config, tokenizer).ids) == "hello"


def test_a_run_of_conversations_exports_the_template_that_it_was_trained_with(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    rows = chats.write_rows(tmp_path / "a.jsonl", chats.conversations(40))
    words = [
        "--data.format",
        "chat",
        "--data.template",
        str(tmp_path / "own.jinja"),
        "--data.dir",
        f"{tmp_path}/tokens",
    ]
    assert run_on(folder, tmp_path, "--model", f"hf:{folder}", "--data", str(rows), *words, "--seq-len", "64") == 0
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/out"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == f"[user]a{END}"
