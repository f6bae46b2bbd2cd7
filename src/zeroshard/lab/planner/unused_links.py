"""Finds settings of links between nodes that have no effect because all GPUs are in one node, to tell the user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.predict.cluster import Cluster

SETTINGS = ("network", "rails", "oversubscription", "pod_nodes")


def unused_links(config: PlanConfig, clusters: Iterable[Cluster]) -> list[str]:
    """The names in `SETTINGS` that are not at their defaults and have no effect.

    Args:
        config: the plan's settings.
        clusters: the clusters that were planned. GPUs without links of their own use the network within a node too.
    """
    one_node = config.gpus <= config.gpus_per_node and config.ask != "fewest-gpus"
    if not one_node or any(each.within is each.between for each in clusters if config.gpus > 1):
        return []
    fields = PlanConfig.model_fields
    return [name for name in SETTINGS if getattr(config, name) != fields[name].default]


def told(names: Sequence[str], num_gpus: int) -> list[str]:
    """A sentence for the user about the unused settings ``names``; an empty list if there are none."""
    if not names:
        return []
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
    verb = "is" if len(names) == 1 else "are"
    if num_gpus == 1:
        return [f"{flags} {verb} not used: one GPU sends nothing."]
    return [
        f"{flags} {verb} not used: all {num_gpus} GPUs are in one node, whose links are --within-node's; for GPUs in "
        "several nodes give --gpus-per-node."
    ]
