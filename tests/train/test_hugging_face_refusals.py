"""What cannot be used of a Hugging Face model is said in one line, with status 2."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import make_model, require_transformers
from zeroshard.cli import main
from zeroshard.data.tokenizer import train_bpe
from zeroshard.models import model_config


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory):
    """A folder with as many ids as there are bytes, and more."""
    folder = tmp_path_factory.mktemp("whole")
    make_model("llama", vocab_size=300).save_pretrained(folder)
    return folder


@pytest.fixture
def model(whole_model, tmp_path, monkeypatch):
    """A copy, to be damaged; nobody is asked for what is not there."""
    require_transformers()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(whole_model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def refusal(capsys, tmp_path):
    """`refusal(name, *words)`: the one line that a training run ends with."""

    def ask(name, *words):
        capsys.readouterr()
        out = ["--out", str(tmp_path / "run"), "--device", "cpu", "--max-steps", "30", "--seq-len", "12"]
        data = [] if "--data" in words else ["--data", "synthetic", "--data.dir", str(tmp_path / "tokens")]
        assert main(["train", "--model", name, *out, *data, *words]) == 2
        found = capsys.readouterr()
        assert re.fullmatch(r"error: [^\n]+: [^\n]+; [^\n]+\n", found.err), found.err
        assert not (tmp_path / "run" / "config.toml").exists()
        return found.err

    return ask


def changed(model, **changes):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "without a causal language model head"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "without a causal language model head"),
        ({"model_type": "unheard-of"}, "which this transformers does not know"),
        ({"model_type": "unheard-of", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, "--model.trust-remote-code"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"vocab_size": 100}, "has 100 ids, and the data's tokenizer 256"),
    ],
)
def test_a_configuration_that_cannot_be_used(model, refusal, changes, said):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert said in refusal(f"hf:{model}")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "is not a JSON object"),
        (lambda model: (model / "model.safetensors").unlink(), "--model.from-config"),
        (lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"), "is a pickle"),
        (lambda model: cut(model / "model.safetensors"), "no whole safetensors file"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../a"}}'),
            "has no weight_map of files beside it",
        ),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "is missing",
        ),
        (lambda model: rewritten(model, "model.norm.weight", None), "model.norm.weight is not among the weights"),
        (lambda model: rewritten(model, "other.weight", torch.ones(2)), "the model has no place for other.weight"),
        (lambda model: rewritten(model, "model.norm.weight", torch.ones(3)), "has shape [16] in the model and [3]"),
        (lambda model: rewritten(model, "model.norm.weight", torch.ones(16, dtype=torch.int8)), "is of dtype I8"),
    ],
)
def test_a_damaged_folder(model, refusal, break_it, said):
    break_it(model)
    assert said in refusal(f"hf:{model}")


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def rewritten(model, name, tensor):
    state = load_file(model / "model.safetensors")
    state = {key: value for key, value in {**state, name: tensor}.items() if value is not None}
    save_file(state, model / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("hf:", (), "names no model"),
        ("hf:/no/such/folder", (), "there is no folder /no/such/folder"),
        ("hf:meta-llama/Llama-3.1-8B", (), "the hub was not reached"),
        ("hf:{model}/config.json", (), "is a file"),
        ("hf:{model}", ("--model.n-embd", "32"), "takes its own from config.json"),
        ("hf:{model}", ("--model.n-layer", "1"), "add --model.from-config"),
        ("hf:{model}", ("--model.attention", "flash_attention_2"), "cannot"),
        ("hf:{model}", ("--model.attention", "flex_attention"), "no backward of flex_attention on a CPU; use sdpa"),
        ("hf:{model}", ("--seq-len", "1000"), "is above the 64"),
        ("hf:{model}", ("--data", "python-stdlib", "--data.tokenizer", "bytes"), "gives other ids"),
        ("hf:{bare}", ("--data", "python-stdlib"), "has no tokenizer.json"),
    ],
)
def test_words_that_do_not_go_together(model, refusal, name, words, said):
    bare = shutil.copytree(model, model.parent / "bare")
    tokenizer = train_bpe(260, ["the quick brown fox jumps over the lazy dog"])
    (model / "tokenizer.json").write_text(tokenizer.to_json())
    assert said in refusal(name.format(model=model, bare=bare), *words)


def test_text_of_a_folder_that_has_none(model, capsys):
    for verb in ("generate", "eval"):
        assert main([verb, "hf:/no/such/folder", *(["--data-dir", "x"] if verb == "eval" else [])]) == 2
    assert main(["generate", f"hf:{model}"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


@pytest.mark.redundant(but=["lm_head.weight"])
@pytest.mark.parametrize("stored", ["lm_head.weight", "transformer.wte.weight"])
def test_a_second_tensor_for_one_place_is_not_dropped(model, refusal, capsys, stored):
    if stored.startswith("transformer"):  # two names for the embedding itself
        sizes = {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        transformers = require_transformers()
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(model)
    tensors = load_file(model / "model.safetensors")
    kept = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    other = "wte.weight" if stored == kept else stored
    save_file({**tensors, other: tensors[kept].clone()}, model / "model.safetensors", {"format": "pt"})
    assert main(["generate", f"hf:{model}", "--max-new-tokens", "1"]) == 2  # for want of a tokenizer, not of weights
    assert "tokenizer.json" in capsys.readouterr().err
    save_file({**tensors, other: tensors[kept] + 1}, model / "model.safetensors", {"format": "pt"})
    said = "differs from .*, and the model has one tensor for both; with"
    assert re.search(said, refusal(f"hf:{model}"))
    for words in (["generate", f"hf:{model}"], ["eval", f"hf:{model}", "--data-dir", "tokens"]):
        assert main(words) == 2


def test_an_untied_head_is_read_as_transformers_reads_it(model):
    changed(model, tie_word_embeddings=False)
    tensors = load_file(model / "model.safetensors")
    head = torch.randn(tensors["model.embed_tokens.weight"].shape)
    save_file({**tensors, "lm_head.weight": head}, model / "model.safetensors", {"format": "pt"})
    theirs = require_transformers().AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.randint(300, (1, 9))
    with torch.no_grad():
        assert torch.allclose(model_config(f"hf:{model}").build().eval()(tokens), theirs(tokens).logits, atol=1e-5)
