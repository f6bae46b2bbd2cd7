"""Checks the fabric settings of a plan, without torch: settings of the command are checked before it is imported."""

from __future__ import annotations

from zeroshard.errors import UserError

MOST_OVERSUBSCRIPTION = 1000.0


def require_fabric(oversubscription: float, pod_nodes: int) -> None:
    """Raise UserError if these values describe no possible fabric."""
    number = isinstance(oversubscription, int | float) and not isinstance(oversubscription, bool)
    if not number or not 1 <= oversubscription <= MOST_OVERSUBSCRIPTION:
        what = f"{oversubscription!r} is no ratio of a pod's bandwidth to that of its way out"
        todo = f"give 1 (none) to {MOST_OVERSUBSCRIPTION:g}, as 2 for 2 : 1"
        raise UserError("oversubscription", what, todo)
    if pod_nodes and oversubscription == 1:
        what = f"{pod_nodes} changes nothing where each node has all of its bandwidth to all others"
        raise UserError("pod_nodes", what, "give --oversubscription too, or leave it out")
