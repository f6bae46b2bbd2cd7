"""The cost of a plan: parses prices in dollars per hour and GPU, and computes hours and dollars for a token count."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zeroshard.host.errors import UserError, shown

BILLION = 1e9
MOST_PER_H = 1e6


def parse_prices(text: str, num_kinds: int) -> list[float]:
    """Dollars per hour for each of ``num_kinds`` kinds of GPU, from ``2.5/h,1.2/h`` or one for all; zeros if empty.

    Raises:
        UserError: a price has no ``/h``, is 0 or above `MOST_PER_H`, or the number of prices does not match.
    """
    prices = [_price(part.strip()) for part in text.split(",")] if text else [0.0]
    if len(prices) == 1:
        return prices * num_kinds
    if len(prices) != num_kinds:
        what = f"{len(prices)} prices for {num_kinds} GPUs"
        raise UserError("price", what, "give one for each of --gpu, or one for all")
    return prices


def _price(text: str) -> float:
    match = re.fullmatch(r"\$?(\d+(?:\.\d+)?)/h", text)
    if match is None:
        raise UserError("price", f"{shown(text, 40)} is no price", "write dollars an hour of one GPU, as 2.5/h")
    if not 0 < float(match[1]) <= MOST_PER_H:
        todo = f"give more than 0 and at most {MOST_PER_H:g}/h"
        raise UserError("price", f"{shown(text, 40)} is no price of a GPU", todo)
    return float(match[1])


@dataclass(frozen=True)
class Cost:
    """The cost of training on a number of tokens."""

    num_gpus: int  # number of GPUs that are rented
    tokens_per_s: float  # tokens per second of all GPUs together
    num_tokens: int = 0  # number of tokens; 0: not given
    dollars_per_h: float = 0.0  # price of one GPU per hour; 0: not given

    @property
    def hours(self) -> float:
        """Hours for all tokens."""
        return self.num_tokens / self.tokens_per_s / 3600

    @property
    def dollars(self) -> float:
        """Dollars for all tokens."""
        return self.hours * self.num_gpus * self.dollars_per_h

    @property
    def dollars_per_billion(self) -> float:
        """Dollars for 10^9 tokens."""
        return BILLION / self.tokens_per_s / 3600 * self.num_gpus * self.dollars_per_h

    def as_dict(self) -> dict[str, Any]:
        """The cost as a dict, for JSON; a value that was not asked for is None."""
        return {
            "num_tokens": self.num_tokens or None,
            "hours": self.hours if self.num_tokens else None,
            "dollars_per_h": self.dollars_per_h or None,
            "dollars": self.dollars if self.num_tokens and self.dollars_per_h else None,
            "dollars_per_billion": self.dollars_per_billion if self.dollars_per_h else None,
        }

    def sentence(self) -> str:
        """``10B tokens take 5.1 hours and cost $1,633 at $2.5 an hour and GPU.``, or the requested part of it."""
        at = f"at ${self.dollars_per_h:g} an hour and GPU"
        if not self.num_tokens:
            return f"A billion tokens cost {dollars(self.dollars_per_billion)} {at}."
        takes = f"{count(self.num_tokens)} tokens take {duration(self.hours)}"
        return f"{takes} and cost {dollars(self.dollars)} {at}." if self.dollars_per_h else f"{takes}."


def dollars(value: float) -> str:
    """Format dollars: ``$1,633``; below 100 with cents, below a cent with two digits."""
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}" if value >= 0.01 else f"${value:.2g}"


def count(value: int) -> str:
    """Format a count: ``10B`` for 10,000,000,000."""
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return str(value)


def duration(hours: float) -> str:
    """Format hours: ``5.1 hours``, ``3.2 days``, ``40 minutes``, ``2.5 seconds``."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.3g} minutes" if hours * 60 >= 1 else f"{hours * 3600:.3g} seconds"
