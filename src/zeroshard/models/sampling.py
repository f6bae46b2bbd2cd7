"""Draws a token from a model's logits: by temperature, among the likeliest, or the likeliest."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.host.errors import UserError


def draw(logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Draw one token [1] from the logits [V]; the other arguments are those of `sample`.

    Raises:
        UserError: a logit is NaN or Inf.
    """
    if not logits_V.isfinite().all():
        what = "the model computes NaN/Inf, as its weights or their dtype make it"
        raise UserError("run", what, "take an earlier checkpoint, or another --dtype")
    if temperature == 0.0:
        return logits_V.argmax(keepdim=True)
    if 0 < top_k < logits_V.numel():
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    scaled_V = logits_V / temperature
    if not scaled_V.max().isfinite():  # so low that the quotients overflow: the limit, the likeliest tokens alone
        scaled_V = torch.where(logits_V == logits_V.max(), 0.0, float("-inf"))
    chances_V = torch.softmax(scaled_V, dim=-1)
    if top_p < 1.0:
        sorted_V, places_V = chances_V.sort(descending=True)
        # A token is excluded if the likelier ones already reach top_p; the likeliest is always included.
        is_beyond_V = sorted_V.cumsum(0) - sorted_V >= top_p
        is_beyond_V[0] = False  # a top_p that is 0 in float32
        chances_V = chances_V.index_fill(0, places_V[is_beyond_V], 0.0)
    return torch.multinomial(chances_V, 1, generator=generator)
