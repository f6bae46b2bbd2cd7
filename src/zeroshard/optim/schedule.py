"""The learning rate as a pure function of the step: a resumed run needs no scheduler state, only the step number.

    lr |    /----\\            linear warm-up, then half a cosine (or a line, or nothing, or wsd) down to min_lr
       |   /      \\___
       |  /           \\____    0 .. warmup_steps .. max_steps
       +--------------------

WSD (warm-up, stable, decay) stays at the peak and decays linearly in its last steps; a run can be prolonged from any
step before the decay. MiniCPM, arXiv:2404.06395; linear, over a fifth of the run: Hägele et al. 2024, arXiv:2405.18392.
Cosine: SGDR, arXiv:1608.03983, equation 5, without restarts. Warm-up, and 10 % of the peak as ``min_lr``:
GPT-3, arXiv:2005.14165, appendix B.

DeepSpeed's schedulers (``warmup="deepspeed-..."``) compute a rate after each step, for the next one: it is a step late.
Their warm-up is logarithmic unless they are told otherwise. https://deepspeed.readthedocs.io/en/latest/schedulers.html
"""

from __future__ import annotations

from math import cos, isfinite, log, pi
from typing import Literal, get_args

Decay = Literal["cosine", "linear", "constant", "wsd"]
Warmup = Literal["linear", "deepspeed-log", "deepspeed-linear"]


def learning_rate(
    step: int,
    *,
    lr: float,
    min_lr: float,
    warmup_steps: int,
    max_steps: int,
    decay: Decay = "cosine",
    decay_share: float = 0.2,
    warmup: Warmup = "linear",
    warmup_lr: float = 0.0,
) -> float:
    """Return the learning rate of step ``step``, counted from 0.

    Warm-up: step 0 has ``lr / warmup_steps``, never 0, and step ``warmup_steps - 1`` has ``lr``. Cosine and linear
    decay start from ``lr`` at step ``warmup_steps``, WSD's later. All reach ``min_lr`` at step ``max_steps``, the first
    that a run of ``max_steps`` steps does not take; later steps stay there. A run that is shorter than its warm-up ends
    during it.

    Args:
        step: the step, >= 0.
        lr: the peak learning rate.
        min_lr: the learning rate at the end of the decay, at most ``lr``.
        warmup_steps: how many steps warm up; 0 for none.
        max_steps: how many steps the run has, including warm-up.
        decay: ``"cosine"``, ``"linear"``, ``"wsd"``, or ``"constant"``, which stays at ``lr`` and ignores ``min_lr``.
        decay_share: the share of ``max_steps``, at the end, in which ``"wsd"`` decays; rounded to whole steps, at least
            1.
        warmup: ``"linear"``, as above; or ``"deepspeed-log"`` and ``"deepspeed-linear"``, the rates of DeepSpeed's
            `WarmupLR` (with ``decay="constant"``), `WarmupDecayLR` (``"linear"``) and `WarmupCosineLR` (``"cosine"``)
            of so many ``warmup_num_steps`` and ``total_num_steps``.
        warmup_lr: the rate from which DeepSpeed's warm-up climbs.

    Raises:
        ValueError: a rate is negative, NaN or Inf; ``min_lr`` is above ``lr``; a count is negative; the decay or the
            warm-up is unknown, or they do not go together; the share is outside (0, 1].
    """
    for name, rate in (("lr", lr), ("min_lr", min_lr), ("warmup_lr", warmup_lr)):
        if not (isfinite(rate) and rate >= 0):
            raise ValueError(f"{name}: {rate} is not a finite number >= 0")
    for name, count in (("step", step), ("warmup_steps", warmup_steps), ("max_steps", max_steps)):
        if count < 0:
            raise ValueError(f"{name}: {count} is below 0")
    if decay not in get_args(Decay):
        raise ValueError(f"decay: {decay!r} is not one of {', '.join(get_args(Decay))}")
    if warmup not in get_args(Warmup) or (warmup != "linear" and decay == "wsd"):
        raise ValueError(f"warmup: {warmup!r} is not one of {', '.join(get_args(Warmup))}, or not with {decay!r}")
    if not 0 < decay_share <= 1:
        raise ValueError(f"decay_share: {decay_share} is not above 0 and at most 1")
    if warmup != "linear":
        warmup_steps, step = max(2, warmup_steps), step - 1
        if step < warmup_steps:
            share = step / warmup_steps if warmup == "deepspeed-linear" else log(max(step, 0) + 1) / log(warmup_steps)
            # before its first step their cosine's rate is 0, whatever its warm-up climbs from
            return 0.0 if step < 0 and decay == "cosine" else warmup_lr + (lr - warmup_lr) * max(0.0, share)
        step += decay == "cosine"  # theirs alone is not late
    elif step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if decay == "constant":
        return lr
    if min_lr > lr:
        raise ValueError(f"min_lr: {min_lr} is above lr {lr}")
    if step >= max_steps:
        return min_lr
    begin = max(warmup_steps, max_steps - max(1, round(decay_share * max_steps))) if decay == "wsd" else warmup_steps
    progress = max(0.0, (step - begin) / (max_steps - begin))  # 0 when decay begins, 1 at max_steps
    peak_share = (1 + cos(pi * progress)) / 2 if decay == "cosine" else 1 - progress
    return peak_share * lr + (1 - peak_share) * min_lr
