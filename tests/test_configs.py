"""Every file in configs/ is a run that could start, and the recipes are what they say."""

from pathlib import Path

import pytest

from zeroshard.train.config.toml import load_config
from zeroshard.train.setup.schedule import accumulation_steps

CONFIGS = Path(__file__).parent.parent / "configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*.toml"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_configuration(name):
    assert load_config(CONFIGS / name).max_steps > 0


def test_nanogpt_s_recipes_have_its_numbers():
    gpt2 = load_config(CONFIGS / "gpt2-124m.toml")
    assert accumulation_steps(gpt2, world_size=8) == 5
    assert gpt2.global_batch_size * gpt2.seq_len == 12 * 1024 * 5 * 8  # tokens a step
    assert (gpt2.lr, gpt2.min_lr, gpt2.warmup_steps, gpt2.max_steps) == (6e-4, 6e-5, 2000, 600_000)
    char = load_config(CONFIGS / "shakespeare-char.toml")
    model = (char.model.n_layer, char.model.n_head, char.model.n_embd, char.seq_len, char.model.dropout)
    assert model == (6, 6, 384, 256, 0.2)
    assert (char.lr, char.min_lr, char.warmup_steps, char.max_steps, char.beta2) == (1e-3, 1e-4, 100, 5000, 0.99)
