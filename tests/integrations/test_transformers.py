"""What we write opens in Hugging Face's `transformers` and computes the same, and what it writes opens here."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from zeroshard import checkpoint
from zeroshard.checkpoint.read_as import WeightsOnly
from zeroshard.cli import main
from zeroshard.comm import run_threads
from zeroshard.data.joining import prompt_ids
from zeroshard.data.tokenizer import load_tokenizer, make_tokenizer
from zeroshard.models import GPT2, GPT2Config, Llama, LlamaConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import load_config
from zeroshard.train.setup.assemble import make_model, model_table
from zeroshard.train.setup.run_folder import tokenizer_folder
from zeroshard.zero import Zero

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

TOLERANCE = 1e-5  # fp32, absolute: logits here are of order 1, and sums are taken in another order
GPT2_SHAPE = GPT2Config(vocab_size=61, seq_len=24, n_layer=3, n_head=4, n_embd=32)
LLAMA_SHAPE = LlamaConfig(vocab_size=61, seq_len=24, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, ffn_hidden=48)
SHAPES = {
    "gpt2": GPT2_SHAPE,
    "gpt2-no-bias": replace(GPT2_SHAPE, bias=False),
    "gpt2-exact-gelu": replace(GPT2_SHAPE, activation="gelu"),
    "llama": LLAMA_SHAPE,
    "llama-tied": replace(LLAMA_SHAPE, tie_embeddings=True, rope_theta=5e5, norm_eps=1e-6),
    "llama-no-groups": replace(LLAMA_SHAPE, n_kv_head=4),
}
TEXT = "Two models, one answer.\n  def f(x):\n\treturn x  # déjà vu ☃"


def build(config):
    """A model whose every parameter, biases and norms too, is large enough to matter."""
    model = (GPT2 if isinstance(config, GPT2Config) else Llama)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.2)
    return model.eval()


def save_run(folder: Path, model, tokenizer: str = "") -> Path:
    """A run folder with one checkpoint of the model, written at stage 3 by 2 ranks."""
    config = TrainConfig(model=model_table(model.config), strategy="zero3", seq_len=8, out=str(folder))
    extra = {"config": config.model_dump(mode="json")}

    def save(comm):
        zero = Zero(build(model.config), stage=3, comm=comm)
        checkpoint.save(folder / "checkpoints" / "step-00000007", zero, step=7, extra=extra)

    run_threads(save, 2)
    (folder / "config.toml").write_text("")
    if tokenizer:
        from zeroshard.data.meta import DataMeta, SourceMeta, SplitMeta, write_meta

        kept = tokenizer_folder(folder)
        kept.mkdir()
        none = {split: SplitMeta(0, ()) for split in ("train", "val")}
        write_meta(kept, DataMeta({}, SourceMeta("text", 0, 0, ""), tokenizer, "", 256, "uint16", none))
    return folder


@torch.no_grad()
def logits(model, vocab_size):
    tokens = torch.randint(vocab_size, (3, 19), generator=torch.Generator().manual_seed(2))
    out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def opened(folder, **kwargs):
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, **kwargs
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@pytest.mark.redundant(but=["gpt2-no-bias"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_we_export_gives_the_same_logits_there(tmp_path, capsys, name):
    model = build(SHAPES[name])
    run = save_run(tmp_path / "run", model)
    assert main(["export", str(run), str(tmp_path / "hf"), "--max-shard-size", "20KB"]) == 0
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 1
    theirs = opened(tmp_path / "hf", dtype=torch.float32)
    assert type(theirs).__name__ == ("GPT2LMHeadModel" if "gpt2" in name else "LlamaForCausalLM")
    ours = logits(model, 61)
    assert ours.std() > 0.5  # a model that says nothing would agree with any
    torch.testing.assert_close(logits(theirs, 61), ours, rtol=0, atol=TOLERANCE)


@pytest.mark.redundant(but=["gpt2"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_they_save_gives_the_same_logits_here(tmp_path, name):
    theirs = their_model(SHAPES[name])
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")  # several files and an index
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    ours = from_run(tmp_path / "run")
    expected = logits(theirs, 61)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(ours, 61), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.redundant
def test_bfloat16_is_half_the_bytes_and_rounded_once(tmp_path):
    model = build(GPT2_SHAPE)
    run = save_run(tmp_path / "run", model)
    assert main(["export", str(run), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    theirs = opened(tmp_path / "hf", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    exact = model.state_dict()["blocks.0.mlp.c_fc.weight"].bfloat16()
    assert torch.equal(theirs.transformer.h[0].mlp.c_fc.weight, exact.t())
    # And back: the checkpoint keeps what the file has, a run computes with it in fp32.
    theirs.save_pretrained(tmp_path / "hf-again")
    assert main(["import", str(tmp_path / "hf-again"), str(tmp_path / "again")]) == 0
    assert torch.equal(from_run(tmp_path / "again").state_dict()["blocks.0.mlp.c_fc.weight"], exact.float())


@pytest.mark.redundant
def test_the_byte_tokenizer_gives_the_same_ids_there(tmp_path):
    import transformers

    run = save_run(tmp_path / "run", build(replace(GPT2_SHAPE, vocab_size=256)), tokenizer="bytes")
    assert main(["export", str(run), str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert theirs(TEXT)["input_ids"] == list(TEXT.encode())
    assert theirs.decode(list(TEXT.encode())) == TEXT
    assert theirs.model_max_length == 24


def test_a_trained_tokenizer_travels_there_and_back(tmp_path):
    """Through a real folder of theirs, and into ids of a run here."""
    import transformers

    ours = make_tokenizer("bpe:300", [TEXT * 40, "the quick brown fox " * 40])
    theirs = their_model(replace(LLAMA_SHAPE, vocab_size=300))
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(ours.to_json())
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    again = load_tokenizer(tokenizer_folder(tmp_path / "run"))
    assert again.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
    assert again.eos_id == ours.eos_id
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    out = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert out(TEXT)["input_ids"] == ours.encode(TEXT).tolist()
    assert out.eos_token == "<|endoftext|>"
    assert out.eos_token_id == ours.eos_id == json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]


def test_the_marks_are_those_that_the_tokenizers_files_say(tmp_path):
    """BOS from tokenizer.json, EOS from tokenizer_config.json, which may be none that we know by its name."""
    import transformers
    from tokenizers import Tokenizer, processors

    inner = Tokenizer.from_str(make_tokenizer("bpe:290", [TEXT * 40]).to_json())
    inner.add_special_tokens(["<begin>", "<finis>"])
    bos, eos = (inner.token_to_id(text) for text in ("<begin>", "<finis>"))
    inner.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", bos)])
    their_model(replace(LLAMA_SHAPE, vocab_size=inner.get_vocab_size())).save_pretrained(tmp_path / "hf")
    inner.save(str(tmp_path / "hf" / "tokenizer.json"))
    said = {"bos_token": "<begin>", "eos_token": {"content": "<finis>", "__type": "AddedToken"}}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(said))
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    kept = load_tokenizer(tokenizer_folder(tmp_path / "run"))
    assert prompt_ids(kept, "the").tolist() == [bos, *inner.encode("the", add_special_tokens=False).ids]
    assert kept.eos_id == eos
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (bos, eos)
    out = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert (out.bos_token_id, out.eos_token_id, out("the")["input_ids"][0]) == (bos, eos, bos)


def their_model(config):
    import transformers

    shared = {"vocab_size": config.vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    if isinstance(config, GPT2Config):
        sizes = {"n_positions": config.seq_len, "n_layer": config.n_layer, "n_head": config.n_head}
        form = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation]
        made = transformers.GPT2Config(**shared, **sizes, n_embd=config.n_embd, activation_function=form)
    else:
        made = transformers.LlamaConfig(
            **shared,
            max_position_embeddings=config.seq_len,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            hidden_size=config.n_embd,
            intermediate_size=config.ffn_width,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tie_embeddings,
        )
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.2)
    return model


def from_run(folder):
    """The model of a run's newest checkpoint, by the way that text generation takes."""
    config = load_config(folder / "config.toml")
    model = make_model(config, config.model.vocab_size, "cpu")
    checkpoint.load(checkpoint.latest(folder / "checkpoints"), WeightsOnly(model, "param"))
    return model.eval()
