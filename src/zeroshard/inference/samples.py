"""Draws several continuations of one prompt as a batch: one forward pass for all of them, not one for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import ExitStatus
from zeroshard.inference.chat import until
from zeroshard.inference.generate import answered, decoded, draw, ids_of, load_with_prompt, options_of, sample
from zeroshard.models import LanguageModel
from zeroshard.train.config.command_settings import GenerateConfig


def run_samples(config: GenerateConfig, loaded: Callable[[], None] = lambda: None) -> int:
    """Print ``config.samples`` texts, each below a line that names its seed; returns the exit status.

    Args:
        config: settings of `zeroshard generate`.
        loaded: called once all texts are drawn, before anything is printed.

    Raises:
        UserError: as `zeroshard.inference.generate.run_generate`.
    """
    model, tokenizer, ids, end = load_with_prompt(config)
    seeds = range(config.seed, config.seed + config.samples)
    generators = [torch.Generator(ids.device).manual_seed(seed) for seed in seeds]
    options = options_of(config, tokenizer)
    drawn = samples(model, ids, config.max_new_tokens, generators, **options)
    loaded()
    for seed, tokens in zip(seeds, drawn, strict=True):
        print(f"--- seed {seed}")
        print(config.prompt + "".join(until(decoded(tokenizer, answered(config, tokens, options["stop"])), end)))
    return int(ExitStatus.OK)


@torch.no_grad()
def samples(
    model: LanguageModel,
    prompt_T: Tensor,
    num_tokens: int,
    generators: Sequence[torch.Generator],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: int | Collection[int] | None = None,
    num_ids: int | None = None,
) -> list[list[int]]:
    """The tokens of each text, in the order of ``generators``: the same that `sample` draws with that generator.

    A text that has ended stays in the batch until all have ended; its further tokens are discarded. If the model's
    attention stays inside documents, texts begin new documents at different positions, so they are drawn one by one.

    Args:
        model, prompt_T, num_tokens, temperature, top_k, top_p, stop, num_ids: as in `sample`.
        generators: random generators, one for each text, on the model's device.

    Raises:
        ValueError: an empty prompt.
    """
    options: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "num_ids": num_ids}
    if model.eos_id is not None:
        each = (sample(model, prompt_T, num_tokens, generator=g, stop=stop, **options) for g in generators)
        return [list(tokens) for tokens in each]
    if prompt_T.numel() == 0:
        raise ValueError("prompt: it has no tokens; give at least one")
    model.eval()
    context_BT = prompt_T.expand(len(generators), -1)
    drawn: list[list[int]] = [[] for _ in generators]
    going_on, stops = set(range(len(generators))), ids_of(stop)
    cache = model.new_cache() if prompt_T.numel() < model.config.seq_len else None
    for _ in range(num_tokens):
        context_BT = context_BT[:, -model.config.seq_len :]
        if cache is not None and cache.num_tokens < context_BT.shape[1]:
            logits_BTV = model(context_BT[:, cache.num_tokens :], cache=cache)
        else:  # once the context window slides, every token's position changes, so the cache is useless
            cache, logits_BTV = None, model(context_BT)
        rows = logits_BTV[:, -1, :num_ids].float()
        tokens_B = torch.cat(
            [draw(row, temperature, top_k, top_p, generator) for row, generator in zip(rows, generators, strict=True)]
        )
        context_BT = torch.cat([context_BT, tokens_B[:, None]], dim=1)
        for place in sorted(going_on):
            drawn[place].append(int(tokens_B[place]))
            if drawn[place][-1] in stops:
                going_on.discard(place)
        if not going_on:
            break
    return drawn
