import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zeroshard.checkpoint import latest
from zeroshard.data import read_meta
from zeroshard.host.errors import UserError
from zeroshard.integrations.hf_import import run_import
from zeroshard.integrations.nanogpt_weights import import_nanogpt
from zeroshard.models import GPT2, GPT2Config
from zeroshard.train.config.command_settings import ImportConfig
from zeroshard.train.config.toml import load_config
from zeroshard.train.inference.generate import load_weights
from zeroshard.train.setup.run_folder import tokenizer_folder
from zeroshard.train.start import run_training

ARGS = {"vocab_size": 65, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16, "bias": False, "dropout": 0.2}


def ckpt(path, *, prefix="_orig_mod.", args=ARGS, **more):
    """What nanoGPT's train.py saves, made of a model of ours."""
    activation = "gelu" if "bias" in args else "gelu_tanh"
    sizes = (args["vocab_size"], 32, 2, 2, 16)
    model = GPT2(GPT2Config(*sizes, bias=args.get("bias", True), activation=activation), seed=5)
    theirs = {}
    for name, tensor in model.state_dict().items():
        inner = f"transformer.h.{name.removeprefix('blocks.')}" if name.startswith("blocks.") else f"transformer.{name}"
        theirs[prefix + ("lm_head.weight" if name == "lm_head.weight" else inner)] = tensor
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    content = {"model": theirs, "optimizer": optimizer, "model_args": args, "iter_num": 9}
    torch.save({**content, "best_val_loss": torch.tensor(1.5), "config": {"out_dir": "out"}, **more}, path)
    return model


def nanogpt_logits(weights, tokens_BT, approximate):
    """What nanoGPT's model.py computes: two blocks, two heads, without biases."""

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"])

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"])

    x = weights["wte.weight"][tokens_BT] + weights["wpe.weight"][: tokens_BT.shape[1]]
    for at in ("h.0", "h.1"):
        parts = linear(f"{at}.attn.c_attn", norm(f"{at}.ln_1", x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(f"{at}.attn.c_proj", mixed)
        hidden = F.gelu(linear(f"{at}.mlp.c_fc", norm(f"{at}.ln_2", x)), approximate=approximate)
        x = x + linear(f"{at}.mlp.c_proj", hidden)
    return norm("ln_f", x) @ weights["wte.weight"].t()


@pytest.mark.parametrize("is_early", [False, True])
def test_logits_are_those_of_nanogpts_own_code(tmp_path, capsys, is_early):
    ckpt(tmp_path / "ckpt.pt")
    content = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    for tensor in content["model"].values():
        tensor.mul_(20)  # so that the two forms of GELU differ by more than rounding does
    if is_early:  # its first versions: always biases, and no such argument
        del content["model_args"]["bias"]
        wide = {
            name.replace(".weight", ".bias"): tensor[..., 0].clone() * 0 for name, tensor in content["model"].items()
        }
        no_bias = ("wte", "wpe", "lm_head")
        content["model"] |= {name: zeros for name, zeros in wide.items() if not any(each in name for each in no_bias)}
        for name in [name for name in wide if ".ln_" in name]:
            content["model"][name] = torch.zeros(16)
    torch.save(content, tmp_path / "ckpt.pt")
    assert run_import(ImportConfig(source=str(tmp_path / "ckpt.pt"), out=str(tmp_path / "run"))) == 0
    assert ("the exact GELU" in capsys.readouterr().out) != is_early
    weights = {name.removeprefix("_orig_mod.").removeprefix("transformer."): t for name, t in content["model"].items()}
    config = load_config(tmp_path / "run" / "config.toml")
    assert (config.model.dropout, config.model.bias, config.seq_len) == (0.2, is_early, 32)
    ours = load_weights(config, 65, latest(tmp_path / "run" / "checkpoints"))
    tokens = torch.randint(65, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = {kind: nanogpt_logits(weights, tokens, kind) for kind in ("none", "tanh")}
    kind, other = ("tanh", "none") if is_early else ("none", "tanh")
    assert torch.allclose(ours(tokens), expected[kind], atol=1e-5)
    assert not torch.allclose(ours(tokens), expected[other], atol=1e-5)


def test_two_tensors_for_one_place_are_refused_and_none_is_dropped(tmp_path):
    ckpt(tmp_path / "ckpt.pt")
    content = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    for name in ("_orig_mod.lm_head.weight", "transformer.wte.weight"):
        changed = {**content["model"], name: content["model"]["_orig_mod.transformer.wte.weight"] + 1}
        torch.save({**content, "model": changed}, tmp_path / "other.pt")
        with pytest.raises(UserError, match="differs from another tensor of the same place"):
            import_nanogpt(tmp_path / "other.pt", tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_gpt2s_ids_keep_their_tokenizer(tmp_path):
    ckpt(tmp_path / "ckpt.pt", args={**ARGS, "vocab_size": 50_304})
    import_nanogpt(tmp_path / "ckpt.pt", tmp_path / "run")
    meta = read_meta(tokenizer_folder(tmp_path / "run"))
    assert (meta.tokenizer, meta.eos_id, meta.vocab_size) == ("gpt2", 50_256, 50_304)


def test_a_run_of_its_weights_can_be_trained_on(tmp_path):
    ckpt(tmp_path / "ckpt.pt")
    import_nanogpt(tmp_path / "ckpt.pt", tmp_path / "run")
    config = load_config(tmp_path / "run" / "config.toml").model_dump()
    config["data"] |= {"source": "bin", "path": (str(tmp_path / "t.bin"),), "tokenizer": "none"}
    config["data"]["dir"] = str(tmp_path / "tokens")
    (torch.arange(4000) % 65).to(torch.uint16).numpy().tofile(tmp_path / "t.bin")
    changes = {"resume": "auto", "max_steps": 2, "warmup_steps": 1, "device": "cpu", "eval_batches": 2}
    assert run_training(type(load_config(tmp_path / "run" / "config.toml")).model_validate({**config, **changes})) == 0


class _Code:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_file_with_code_in_it_is_refused_and_not_run(tmp_path, capsys):
    ckpt(tmp_path / "ckpt.pt", extra=_Code())
    with pytest.raises(UserError, match=r"source: .*ckpt\.pt holds more than tensors and plain values"):
        import_nanogpt(tmp_path / "ckpt.pt", tmp_path / "run")
    assert "executed" not in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "ckpt.pt"
    path.write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match=r"source: .*ckpt\.pt (cannot be read|holds more)"):
        import_nanogpt(path, tmp_path / "run")
    torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(UserError, match="has no `model` in it"):
        import_nanogpt(path, tmp_path / "run")
    torch.save({"model": {"a": torch.zeros(1)}}, path)
    with pytest.raises(UserError, match="has no `model_args` with vocab_size"):
        import_nanogpt(path, tmp_path / "run")
    torch.save({"model": {"a": torch.zeros(1)}, "model_args": ARGS}, path)
    with pytest.raises(UserError, match=r"a has shape \(1,\), and no such tensor is due"):
        import_nanogpt(path, tmp_path / "run")
    torch.save({"model": {7: torch.zeros(1)}, "model_args": ARGS}, path)
    with pytest.raises(UserError, match="`model` holds more than weights by name"):
        import_nanogpt(path, tmp_path / "run")
    for key, value, said in [("dropout", "x", "'x' is of the wrong type"), ("n_embd", 2**40, "1099511627776 is above")]:
        torch.save({"model": {"a": torch.zeros(1)}, "model_args": {**ARGS, key: value}}, path)
        with pytest.raises(UserError, match=rf"^model\.{key}: {said}"):
            import_nanogpt(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()
