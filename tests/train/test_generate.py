import pytest
import torch

from zeroshard.errors import UserError
from zeroshard.train.build import make_model
from zeroshard.train.config import GenerateConfig
from zeroshard.train.generate import run_generate, sample
from zeroshard.train.loop import run_training


@pytest.fixture
def model(tiny_config):
    return make_model(tiny_config(), 256, "cpu")


def _draw(model, num_tokens=20, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return list(sample(model, torch.tensor([7]), num_tokens, generator=generator, **kwargs))


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


def test_text_may_grow_longer_than_the_model_can_see(model):
    assert len(_draw(model, model.config.seq_len + 5)) == model.config.seq_len + 5


def test_a_prompt_without_tokens_is_refused(model):
    with pytest.raises(ValueError, match="prompt"):
        list(sample(model, torch.tensor([], dtype=torch.int64), 1))


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_trained_run_writes_what_it_learned(text_config, capsys, tmp_path, strategy):
    config = text_config(strategy=strategy, max_steps=60, lr=0.02, eval_interval=0)
    run_training(config)
    (tmp_path / "text.txt").unlink()  # a run needs nothing but its own folder
    for file in sorted((tmp_path / "tokens").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    capsys.readouterr()
    generate = GenerateConfig(run=config.out, prompt="abc", max_new_tokens=7, temperature=0.0)
    assert run_generate(generate) == 0
    assert capsys.readouterr().out == "abcd\nabcd\n\n"
    assert run_generate(GenerateConfig(run=config.out, max_new_tokens=4, temperature=0.0)) == 0
    assert capsys.readouterr().out == "abcd\n"


def test_a_folder_without_a_run_or_a_checkpoint_is_refused(tiny_config, tmp_path):
    with pytest.raises(UserError, match=r"run: .* holds no run"):
        run_generate(GenerateConfig(run=str(tmp_path / "nowhere")))
    config = tiny_config(max_steps=2)
    run_training(config)
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"run: .* has no complete checkpoint"):
        run_generate(GenerateConfig(run=config.out))
