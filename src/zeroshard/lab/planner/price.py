"""What a plan costs: dollars an hour and GPU as people write them, hours and dollars for a number of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zeroshard.errors import UserError, shown

BILLION = 1e9
MOST_PER_H = 1e6


def parse_prices(text: str, num_gpus: int) -> list[float]:
    """Dollars an hour of each of ``num_gpus`` kinds of GPU: ``2.5/h``, or one for each, ``2.5/h,1.2/h``.

    Raises:
        UserError: a price without ``/h``, one that is nothing or beyond all prices, or too few of them.
    """
    prices = [_price(part.strip()) for part in text.split(",")] if text else []
    if len(prices) == 1:
        return prices * num_gpus
    if prices and len(prices) != num_gpus:
        raise UserError(
            "price", f"{len(prices)} prices for {num_gpus} GPUs", "give one for each of --gpu, or one for all"
        )
    return prices


def _price(text: str) -> float:
    match = re.fullmatch(r"\$?(\d+(?:\.\d+)?)/h", text)
    if match is None:
        what = f"{shown(text, 40)} is no price"
        raise UserError("price", what, "write dollars an hour of one GPU, as 2.5/h")
    price = float(match[1])
    if not 0 < price <= MOST_PER_H:
        raise UserError(
            "price", f"{shown(text, 40)} is no price of a GPU", f"give more than 0 and at most {MOST_PER_H:g}/h"
        )
    return price


@dataclass(frozen=True)
class Cost:
    """Of training on so many tokens.

    Attributes:
        num_gpus: that are rented.
        tokens_per_s: of all of them.
        num_tokens: 0: none were named.
        dollars_per_h: of one GPU; 0: no price was named.
    """

    num_gpus: int
    tokens_per_s: float
    num_tokens: int = 0
    dollars_per_h: float = 0.0

    @property
    def hours(self) -> float:
        """For all tokens."""
        return self.num_tokens / self.tokens_per_s / 3600

    @property
    def dollars(self) -> float:
        """For all tokens."""
        return self.hours * self.num_gpus * self.dollars_per_h

    @property
    def dollars_per_billion(self) -> float:
        """For 10^9 tokens."""
        return BILLION / self.tokens_per_s / 3600 * self.num_gpus * self.dollars_per_h

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what was not asked for is None."""
        return {
            "num_tokens": self.num_tokens or None,
            "hours": self.hours if self.num_tokens else None,
            "dollars_per_h": self.dollars_per_h or None,
            "dollars": self.dollars if self.num_tokens and self.dollars_per_h else None,
            "dollars_per_billion": self.dollars_per_billion if self.dollars_per_h else None,
        }

    def sentence(self) -> str:
        """``10B tokens take 5.1 hours and cost $1,633 at $2.5 an hour and GPU.``; without what was not asked for."""
        at = f"at ${self.dollars_per_h:g} an hour and GPU"
        if not self.num_tokens:
            return f"A billion tokens cost {dollars(self.dollars_per_billion)} {at}."
        takes = f"{count(self.num_tokens)} tokens take {duration(self.hours)}"
        return f"{takes} and cost {dollars(self.dollars)} {at}." if self.dollars_per_h else f"{takes}."


def dollars(value: float) -> str:
    """``$1,633``, below 100 with cents, below a cent with two digits."""
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}" if value >= 0.01 else f"${value:.2g}"


def count(value: int) -> str:
    """``10B`` for 10,000,000,000."""
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return str(value)


def duration(hours: float) -> str:
    """``5.1 hours``, ``3.2 days``, ``40 minutes``, ``2.5 seconds``."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.3g} minutes" if hours * 60 >= 1 else f"{hours * 3600:.3g} seconds"
