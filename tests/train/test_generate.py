import re
from pathlib import Path

import pytest
import torch

import token_texts
from zeroshard.data.tokenizer import ByteTokenizer
from zeroshard.host.errors import UserError
from zeroshard.models import build_model
from zeroshard.models.cache import KVCache
from zeroshard.train.config.command_settings import GenerateConfig
from zeroshard.train.inference.generate import decoded, load_for_text, run_generate, sample
from zeroshard.train.inference.generate import draw as _draw_one
from zeroshard.train.setup.assemble import make_model
from zeroshard.train.start import run_training


@pytest.fixture
def model(tiny_config):
    return make_model(tiny_config(), 256, "cpu")


def _draw(model, num_tokens=20, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return list(sample(model, torch.tensor([7]), num_tokens, generator=generator, **kwargs))


@pytest.mark.redundant
def test_a_seed_decides_the_draws(model):
    assert _draw(model) == _draw(model)
    assert _draw(model) != _draw(model, seed=1)


def test_temperature_zero_and_top_one_take_the_likeliest_token(model):
    likeliest = _draw(model, temperature=0.0)
    assert likeliest == _draw(model, temperature=0.0, seed=1)
    assert likeliest == _draw(model, top_k=1)


def test_top_k_draws_from_the_k_likeliest_alone(model):
    logits = model(torch.tensor([[7]]))[0, -1]
    allowed = set(logits.topk(3).indices.tolist())
    drawn = {_draw(model, 1, seed=seed, top_k=3, temperature=5.0)[0] for seed in range(60)}
    assert drawn == allowed


def test_a_token_follows_the_newest_that_the_model_can_see(model):
    model.double()
    window, context = model.config.seq_len, [7]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(30.0)  # untrained it says one thing over and over, whatever it sees
        for _ in range(window + 5):
            context.append(int(model(torch.tensor([context[-window:]]))[0, -1].argmax()))
    assert len(set(context)) > 20
    assert list(sample(model, torch.tensor([7]), window + 5, temperature=0.0)) == context[1:]


def _drawn(logits, temperature=1.0, top_k=0, top_p=1.0):
    """What may be drawn, as far as two hundred draws show."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(200)]
    return {int(_draw_one(torch.tensor(logits), temperature, top_k, top_p, each)) for each in generators}


@pytest.mark.parametrize(("top_p", "num"), [(0.24, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_as_many_tokens_are_left_as_just_have_the_probability(top_p, num):
    assert len(_drawn([0.0] * 4, top_p=top_p)) == num


def test_a_low_temperature_leaves_the_likeliest_and_a_high_one_nearly_all_alike():
    assert _drawn([0.0, 2.0, 0.0], temperature=0.1) == {1}
    assert _drawn([0.0, 2.0, 0.0], temperature=50.0) == {0, 1, 2}


@pytest.mark.redundant(but=["1e-320"])
@pytest.mark.parametrize("temperature", [1e-38, 1e-42, 1e-45, 1e-320, 5e-324])
def test_a_temperature_whose_quotients_overflow_leaves_the_likeliest(temperature):
    assert _drawn([1.0, 2.0, -3.0], temperature) == {1}
    assert _drawn([-1.0, -2.0, -1.0], temperature) == {0, 2}
    assert _drawn([0.0, 2.0, 0.0], temperature, top_k=1) == {1}
    assert _drawn([0.0, 2.0, 0.0], temperature, top_p=1e-300) == {1}
    assert _drawn([0.0, 2.0, 0.0], temperature=1e308) == {0, 1, 2}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_computes_nan_is_said_and_draws_nothing(wrong, temperature):
    with pytest.raises(UserError, match=r"^run: the model computes NaN/Inf"):
        _drawn([0.0, wrong], temperature)


def test_a_prompt_without_tokens_is_refused(model):
    with pytest.raises(ValueError, match="prompt"):
        list(sample(model, torch.tensor([], dtype=torch.int64), 1))


@pytest.mark.redundant
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.soak)])
def test_a_trained_run_writes_what_it_learned(text_config, capsys, tmp_path, strategy):
    config = text_config(strategy=strategy, max_steps=60, lr=0.02, eval_interval=0)
    run_training(config)
    (tmp_path / "text.txt").unlink()  # a run needs nothing but its own folder
    for file in sorted((tmp_path / "tokens").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    capsys.readouterr()
    asked = GenerateConfig(run=config.out, prompt="abc", max_new_tokens=7, temperature=0.0)
    assert run_generate(asked) == 0
    assert capsys.readouterr().out == "abcd\nabcd\n\n"
    assert run_generate(GenerateConfig(run=config.out, max_new_tokens=4, temperature=0.0)) == 0
    assert capsys.readouterr().out == "abcd\n"


def test_a_folder_without_a_run_or_a_checkpoint_is_refused(tiny_config, tmp_path):
    with pytest.raises(UserError, match=r"run: there is no folder .*/nowhere; give a run folder"):
        run_generate(GenerateConfig(run=str(tmp_path / "nowhere")))
    config = tiny_config(max_steps=2)
    run_training(config)
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"run: .* has no complete checkpoint"):
        run_generate(GenerateConfig(run=config.out))


@pytest.mark.parametrize("name", ["gpt2-demo", "llama-tiny"])
def test_the_cache_changes_no_token(name):
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "seq_len": 24, "vocab_size": 64}
    model = build_model(name, overrides=shape).double()
    prompt = torch.arange(5)
    draws = [list(sample(model, prompt, 40, temperature=0.0, use_cache=use)) for use in (True, False)]
    assert draws[0] == draws[1]
    cache = KVCache(2, 24)
    with torch.no_grad():
        tokens = torch.randint(64, (2, 20))
        pieces = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 15), (15, 20))]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=1e-9, atol=1e-9)


def test_a_token_costs_one_token(model):
    lengths = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    _draw(model, 6)
    assert lengths == [1] * 6


def test_a_model_that_keeps_documents_apart_forgets_the_last_one(model):
    model.eos_id = 3
    alone = list(sample(model, torch.tensor([3, 7]), 8, temperature=0.0))
    assert list(sample(model, torch.tensor([5, 6, 3, 7]), 8, temperature=0.0)) == alone
    assert list(sample(model, torch.tensor([5, 6, 3, 7]), 8, temperature=0.0, use_cache=False)) == alone


def test_an_end_of_document_may_end_the_text(model):
    tokens = _draw(model, 20)
    assert _draw(model, 20, stop=tokens[4]) == tokens[: tokens.index(tokens[4]) + 1]


def test_text_comes_as_it_is_drawn_and_characters_come_whole():
    tokenizer = ByteTokenizer()
    pieces = list(decoded(tokenizer, iter("aé☃\n!".encode() + b"\xc3")))
    assert pieces == ["a", "é", "☃", "\n", "!", "\ufffd"]


@pytest.mark.parametrize("kind", token_texts.KINDS)
def test_a_continuation_is_the_text_that_follows_the_prompts(kind, tmp_path):
    tokenizer, ids = token_texts.tokenizer_of(kind, tmp_path)
    whole = tokenizer.decode(ids)
    assert whole.startswith("the quick brown fox")
    for at in range(len(ids)):
        prompt = tokenizer.decode(ids[:at])
        if not prompt.endswith("\ufffd"):
            pieces = list(decoded(tokenizer, iter(ids[at:]), ids[:at]))
            assert prompt + "".join(pieces) == whole
            assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("prompt", ["", "the"])
def test_what_is_printed_has_the_spaces_of_the_text(model, tmp_path, monkeypatch, capsys, prompt):
    tokenizer, _ = token_texts.tokenizer_of("metaspace", tmp_path)
    drawn = tokenizer.encode_piece("the as it can")[len(tokenizer.encode_piece(prompt)) :].tolist()
    monkeypatch.setattr("zeroshard.train.inference.generate.load_for_text", lambda *_: (model, tokenizer))
    monkeypatch.setattr("zeroshard.train.inference.generate.sample", lambda *_, **__: iter(drawn))
    assert run_generate(GenerateConfig(run="r", prompt=prompt)) == 0
    assert capsys.readouterr().out == "the as it can\n"


def test_ids_that_pad_a_vocabulary_are_never_drawn():
    model = build_model("gpt2-demo", vocab_size=300, seq_len=16, overrides={"n_layer": 1, "n_head": 2, "n_embd": 16})
    with torch.no_grad():
        model.wte.weight[200:] *= 100  # would be nearly all that is drawn
    prompt = torch.tensor([1])
    for temperature in (0.0, 1.0):
        drawn = list(sample(model, prompt, 40, temperature=temperature, num_ids=200))
        assert max(drawn) < 200
    assert max(sample(model, prompt, 40)) >= 200


@pytest.mark.redundant
def test_a_configuration_that_is_not_the_checkpoints_is_told_in_a_line(text_config):
    config = text_config(max_steps=2, eval_interval=0)
    assert run_training(config) == 0
    path = Path(config.out) / "config.toml"
    path.write_text(re.sub(r"n_embd = \d+", "n_embd = 32", path.read_text()))
    with pytest.raises(UserError, match=r": saved with shape \(.*\), the model's is \(.*\); load it into the model"):
        run_generate(GenerateConfig(run=config.out, prompt="a"))


def test_the_command_prints_each_text_below_its_seed(text_config, capsys):
    config = text_config(max_steps=1, warmup_steps=0, eval_interval=0)
    assert run_training(config) == 0
    asked = {"run": config.out, "prompt": "a", "max_new_tokens": 4, "seed": 7}
    capsys.readouterr()
    alone = []
    for seed in (7, 8):
        assert run_generate(GenerateConfig(**asked | {"seed": seed})) == 0
        alone.append(f"--- seed {seed}\n{capsys.readouterr().out}")
    assert run_generate(GenerateConfig(**asked, samples=2)) == 0
    assert capsys.readouterr().out == "".join(alone)


@pytest.mark.redundant
def test_a_model_computes_in_the_type_that_was_asked_for(text_config):
    config = text_config(max_steps=1, warmup_steps=0, eval_interval=0)
    assert run_training(config) == 0
    model, _ = load_for_text(Path(config.out), dtype="bfloat16")
    assert model(torch.tensor([[7]])).dtype is torch.bfloat16
