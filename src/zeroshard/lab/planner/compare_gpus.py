"""`zeroshard plan --gpu a,b,c`: compares the plans of several GPUs, and says which one is the cheapest or fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.columns import columns
from zeroshard.lab.planner.advice import GIB, describe
from zeroshard.lab.planner.plan_rows import Plan, Row
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


@dataclass(frozen=True)
class Refusal:
    """A kind of GPU that could not be planned, and the reason."""

    name: str
    reason: str


Answers = Sequence[Offer | Refusal]


def offers(plans: Sequence[Plan | Refusal], prices: Sequence[float], num_tokens: int) -> list[Offer | Refusal]:
    """Add costs to plans. ``prices``: dollars per hour of a GPU, one for each plan; empty: no prices are known."""
    found: list[Offer | Refusal] = []
    for index, plan in enumerate(plans):
        cost_of = prices[index] if prices else 0.0
        found.append(plan if isinstance(plan, Refusal) else Offer(plan, plan.cost(num_tokens, cost_of)))
    return found


def planned(found: Answers) -> list[Offer]:
    """The offers among ``found``, without refusals."""
    return [each for each in found if isinstance(each, Offer)]


def cheapest(found: Answers) -> Offer | None:
    """The offer with the lowest cost per token among those that fit, or the fastest one if no prices are known."""
    fitting = [(offer.cost, offer) for offer in planned(found) if offer.cost is not None]
    if not fitting:
        return None
    return min(fitting, key=lambda pair: (pair[0].dollars_per_billion, -pair[0].tokens_per_s))[1]


def text(found: Answers, dtype: str) -> str:
    """The comparison as text: a table with a line for each GPU, and a sentence; ``dtype``: the requested dtype."""
    best = cheapest(found)
    costs = [offer.cost for offer in planned(found) if offer.cost is not None]
    priced = bool(costs) and costs[0].dollars_per_h > 0
    titles = ["GPU", "fits", "take", "memory", "tokens/s", RANGE]
    titles += ["$/h"] * priced + ["$ for 1B tokens"] * priced
    num_tokens = costs[0].num_tokens if costs else 0
    titles += [f"{count(num_tokens)} tokens"] * bool(num_tokens) + ["$ for them"] * (priced and bool(num_tokens))
    rows = [
        [each.name, "not planned", *[""] * (len(titles) - 2)]
        if isinstance(each, Refusal)
        else _cells(each, len(titles), dtype, priced=priced)
        for each in found
    ]
    marks = ["  ", *("> " if offer is best else "  " for offer in found)]
    table = columns([titles, *rows], right=range(3, len(titles)))
    lines = [mark + line for mark, line in zip(marks, table, strict=True)]
    first = planned(found)[0].plan
    workload = first.workload
    head = f"{workload.name}, {dtype}, {workload.optimizer}, sequences of {workload.seq_len}"
    return "\n".join(
        [
            f"{head}, {first.num_gpus:,} GPU{'s' * (first.num_gpus > 1)}",
            "",
            *lines,
            "",
            sentence(found),
            *_remarks(found, dtype),
        ]
    )


def _remarks(found: Answers, dtype: str) -> list[str]:
    """Sentences on the GPUs that are planned in another dtype, and on those that are not planned."""
    others = [offer for offer in planned(found) if offer.plan.dtype != dtype]
    told = [f"{each.name} does not compute in {dtype}: planned in {each.plan.dtype}." for each in others]
    return told + [f"{each.name} is not planned: {each.reason}." for each in found if isinstance(each, Refusal)]


def _cells(offer: Offer, width: int, dtype: str, *, priced: bool) -> list[str]:
    best, cost, plan = offer.plan.best, offer.cost, offer.plan
    name = offer.name if plan.dtype == dtype else f"{offer.name}, {plan.dtype}"
    if best is None or cost is None:
        least = min(plan.rows, key=lambda row: row.needed_bytes)
        return [name, "no", "", f"{least.needed_bytes / GIB:,.1f} GiB", *[""] * (width - 4)]
    row = describe(best, plan.cluster.world_size, plan.num_gpus)
    cells = [name, "yes", row, f"{best.needed_bytes / GIB:.1f} GiB", f"{best.tokens_per_s:,.0f}", _range(best)]
    if priced:
        cells += [f"{cost.dollars_per_h:g}", dollars(cost.dollars_per_billion)]
    if cost.num_tokens:
        cells += [duration(cost.hours)] + [dollars(cost.dollars)] * priced
    return cells


def _range(row: Row) -> str:
    """The likely range of the row's tokens/s, as text; empty if the device was measured."""
    if row.spread == (1.0, 1.0):
        return ""
    least, most = row.tokens_per_s_range
    return f"{least:,.0f} to {most:,.0f}"


def unsure(found: Answers) -> list[str]:
    """GPUs that may be better than the recommended one within the ranges of rates: in tokens per dollar or second."""
    best = cheapest(found)
    if best is None:
        return []
    least, _ = _for_a_dollar(best)
    return [
        offer.name
        for offer in planned(found)
        if offer is not best and offer.cost is not None and _for_a_dollar(offer)[1] > least
    ]


def _for_a_dollar(offer: Offer) -> tuple[float, float]:
    """Lowest and highest tokens per dollar; per second if no price is known."""
    row, cost = offer.plan.best, offer.cost
    assert row is not None
    assert cost is not None
    dollars_per_s = cost.num_gpus * cost.dollars_per_h or 1.0
    least, most = row.tokens_per_s_range
    return least / dollars_per_s, most / dollars_per_s


def sentence(found: Answers) -> str:
    """A sentence that recommends a GPU and says how sure that is."""
    best = cheapest(found)
    if best is None or best.cost is None:
        return "Nothing fits on any of them: plan one of them alone to hear which change would help."
    others = [offer.cost for offer in planned(found) if offer.cost is not None and offer is not best]
    plan = best.plan
    row = describe(plan.best, plan.cluster.world_size, plan.num_gpus) if plan.best is not None else ""
    start = f"{best.name}, {row}: {best.cost.sentence()}" if best.cost.dollars_per_h or best.cost.num_tokens else ""
    if best.cost.dollars_per_h:
        more = [other.dollars_per_billion / best.cost.dollars_per_billion - 1 for other in others]
        kind = "The cheapest is"
        after = f" The next one costs {min(more):.0%} more." if more else ""
    else:
        more = [1 - other.tokens_per_s / best.cost.tokens_per_s for other in others]
        kind = "The fastest is"
        after = f" The next one is {min(more):.0%} slower." if more else ""
    others_named = " or ".join(unsure(found))
    if others_named:
        after += f" By the ranges of their rates it may as well be {others_named}."
    return f"{kind} {start or f'{best.name}, {row}.'}{after}"


def as_dict(found: Answers) -> dict[str, Any]:
    """The comparison as a dict, for JSON; a GPU without a plan has no rows, and the reason as ``refused``."""
    best = cheapest(found)
    return {
        "plans": [
            {"gpu": {"name": each.name}, "rows": [], "best": None, "cost": None, "refused": each.reason}
            if isinstance(each, Refusal)
            else {**each.plan.as_dict(), "cost": None if each.cost is None else each.cost.as_dict()}
            for each in found
        ],
        "best": None if best is None else best.name,
        "unsure": unsure(found),
        "advice": sentence(found),
    }
