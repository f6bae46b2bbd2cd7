"""`zeroshard plan --gpu a,b,c`: compares the plans of several GPUs, and says which one is the cheapest or fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.host.columns import columns
from zeroshard.lab.planner.advice import GIB, describe
from zeroshard.lab.planner.plan_rows import Plan
from zeroshard.lab.planner.price import Cost, count, dollars, duration

RANGE = "4 of 5 runs between"


@dataclass(frozen=True)
class Offer:
    """A plan for one kind of GPU, and the cost of its best row; None if no row fits."""

    plan: Plan
    cost: Cost | None

    @property
    def name(self) -> str:
        """Name of the GPU."""
        return self.plan.device.name

    @property
    def row(self) -> str:
        """The best row in words; empty if none fits."""
        return "" if self.plan.best is None else describe(self.plan.best, self.plan.num_gpus)

    @property
    def tokens_for_a_dollar(self) -> tuple[float, float]:
        """Lowest and highest tokens per dollar of the best row; per second if no price is known."""
        assert self.plan.best is not None
        assert self.cost is not None
        dollars_per_s = self.plan.num_gpus * self.cost.dollars_per_h or 1.0
        least, most = self.plan.best.tokens_per_s_range
        return least / dollars_per_s, most / dollars_per_s


@dataclass(frozen=True)
class Refusal:
    """A kind of GPU that could not be planned, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The GPUs that were compared, in the order in which they were given, and the dtype that was asked for."""

    answers: Sequence[Offer | Refusal]
    dtype: str

    @property
    def offers(self) -> list[Offer]:
        """The GPUs that could be planned."""
        return [each for each in self.answers if isinstance(each, Offer)]

    @property
    def best(self) -> Offer | None:
        """The offer with the lowest cost per token among those that fit, or the fastest one if no prices are known."""
        fitting = [(offer.cost, offer) for offer in self.offers if offer.cost is not None]
        order = [(cost.dollars_per_billion, -cost.tokens_per_s) for cost, _ in fitting]
        return fitting[order.index(min(order))][1] if fitting else None

    @property
    def unsure(self) -> list[str]:
        """GPUs that may be better than the best one within the ranges of rates: in tokens per dollar or second."""
        best = self.best
        others = (offer for offer in self.offers if offer is not best and offer.cost is not None)
        return [each.name for each in others if best and each.tokens_for_a_dollar[1] > best.tokens_for_a_dollar[0]]

    def sentence(self) -> str:
        """A sentence that recommends a GPU and says how sure that is."""
        best = self.best
        if best is None or best.cost is None:
            return "Nothing fits on any of them: plan one of them alone to hear which change would help."
        others = [offer.cost for offer in self.offers if offer.cost is not None and offer is not best]
        if best.cost.dollars_per_h:
            kind, verb, worse = "cheapest", "costs", "more"
            by = [other.dollars_per_billion / best.cost.dollars_per_billion - 1 for other in others]
        else:
            kind, verb, worse = "fastest", "is", "slower"
            by = [1 - other.tokens_per_s / best.cost.tokens_per_s for other in others]
        asked = best.cost.dollars_per_h or best.cost.num_tokens
        text = f"The {kind} is {best.name}, {best.row}{f': {best.cost.sentence()}' if asked else '.'}"
        text += f" The next one {verb} {min(by):.0%} {worse}." if by else ""
        unsure = " or ".join(self.unsure)
        return f"{text} By the ranges of their rates it may as well be {unsure}." if unsure else text

    def text(self) -> str:
        """The comparison as text: a table with a line for each GPU, and sentences."""
        best = self.best
        costs = [offer.cost for offer in self.offers if offer.cost is not None]
        priced, num_tokens = any(cost.dollars_per_h for cost in costs), max((c.num_tokens for c in costs), default=0)
        titles = ["GPU", "fits", "take", "memory", "tokens/s", RANGE]
        titles += ["$/h", "$ for 1B tokens"] * priced + [f"{count(num_tokens)} tokens"] * bool(num_tokens)
        titles += ["$ for them"] * (priced and bool(num_tokens))
        rows = [self._cells(o) if isinstance(o, Offer) else [o.name, "not planned"] for o in self.answers]
        table = columns([titles, *([*row, *[""] * (len(titles) - len(row))] for row in rows)], range(3, len(titles)))
        marks = ["  ", *("> " if each is best else "  " for each in self.answers)]
        first = self.offers[0].plan
        head = f"{first.workload.name}, {self.dtype}, {first.workload.optimizer}, sequences of {first.workload.seq_len}"
        others = [offer for offer in self.offers if offer.plan.dtype != self.dtype]
        refused = [each for each in self.answers if isinstance(each, Refusal)]
        return "\n".join(
            [
                f"{head}, {first.num_gpus:,} GPU{'s' * (first.num_gpus > 1)}",
                "",
                *(mark + line for mark, line in zip(marks, table, strict=True)),
                "",
                self.sentence(),
                *(f"{o.name} does not compute in {self.dtype}: planned in {o.plan.dtype}." for o in others),
                *(f"{each.name} is not planned: {each.reason}." for each in refused),
            ]
        )

    def _cells(self, offer: Offer) -> list[str]:
        best, cost, plan = offer.plan.best, offer.cost, offer.plan
        name = offer.name if plan.dtype == self.dtype else f"{offer.name}, {plan.dtype}"
        if best is None or cost is None:
            return [name, "no", "", f"{min(row.needed_bytes for row in plan.rows) / GIB:,.1f} GiB"]
        least, most = best.tokens_per_s_range
        between = "" if least == most else f"{least:,.0f} to {most:,.0f}"
        cells = [name, "yes", offer.row, f"{best.needed_bytes / GIB:.1f} GiB", f"{best.tokens_per_s:,.0f}", between]
        if cost.dollars_per_h:
            cells += [f"{cost.dollars_per_h:g}", dollars(cost.dollars_per_billion)]
        if cost.num_tokens:
            cells += [duration(cost.hours)] + [dollars(cost.dollars)] * (cost.dollars_per_h > 0)
        return cells

    def as_dict(self) -> dict[str, Any]:
        """The comparison as a dict, for JSON; a GPU without a plan has no rows, and the reason as ``refused``."""
        return {
            "plans": [
                {"gpu": {"name": each.name}, "rows": [], "best": None, "cost": None, "refused": each.reason}
                if isinstance(each, Refusal)
                else {**each.plan.as_dict(), "cost": None if each.cost is None else each.cost.as_dict()}
                for each in self.answers
            ],
            "best": None if self.best is None else self.best.name,
            "unsure": self.unsure,
            "advice": self.sentence(),
        }
