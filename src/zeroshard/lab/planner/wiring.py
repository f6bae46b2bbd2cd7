"""Derives the links between GPUs from users' descriptions: network cards of a node, oversubscription, a TPU slice.

`zeroshard.lab.predict.cluster` needs each GPU's bandwidth to other nodes. With R network cards in a node of G GPUs that
is R / G of a card: NCCL's channels use all cards of a node, and each GPU uses the card of its own rail if it has one. A
GPU without one sends over NVLink to a GPU that is attached to the card (PXN: Mandakolathur and Jeaugey 2022, "Doubling
all2all Performance with NVIDIA Collective Communication Library 2.12", NVIDIA's developer blog).
"""

from __future__ import annotations

import math
from dataclasses import replace

from zeroshard.errors import UserError
from zeroshard.lab.predict.cluster import Cluster, Fabric
from zeroshard.lab.predict.hardware import LINKS, TORUS_CHIPS, Calibration, Link


def with_rails(link: Link, rails: int, gpus_per_node: int) -> Link:
    """Each GPU's share of a node's ``rails`` network cards of type ``link``; 0: ``link`` is per GPU already."""
    if rails in (0, gpus_per_node):
        return link
    cards = f"{rails} {'card' if rails == 1 else 'cards'} of {link.bytes_per_s / 1e9:g} GB/s"
    return replace(
        link,
        bytes_per_s=link.bytes_per_s * rails / gpus_per_node,
        name=f"{rails} x {link.name}",
        source=f"{cards} for the {gpus_per_node} GPUs of a node; {link.source}",
    )


def within_node(given: Link | None, found: Calibration, num_gpus: int, gpus_per_node: int) -> Link | None:
    """The link between a node's GPUs: the given one, else the measured one, else the GPU's own; None: there is none.

    A "node" of TPUs is a slice, connected by the TPUs' own links. Only a complete pod is a torus: in a smaller slice
    the wrap-around links are missing, and the link counts with half its bandwidth.

    Raises:
        UserError: no slice has this number of TPU chips.
    """
    device = found.device
    if device.device_type == "tpu":
        _require_slices(device.name, num_gpus, gpus_per_node)
    if given is not None or found.link is not None:
        return given or found.link
    link = LINKS[device.link] if device.link else None
    if link is not None and link.axes > 1 and min(num_gpus, gpus_per_node) < TORUS_CHIPS:
        return replace(link, bytes_per_s=link.bytes_per_s / 2, name=f"{link.name}, a part of a torus")
    return link


def _require_slices(name: str, num_chips: int, per_slice: int) -> None:
    if per_slice > TORUS_CHIPS:
        what = f"{per_slice} chips of a {name} are no slice, of which the largest has {TORUS_CHIPS}"
        raise UserError("gpus_per_node", what, f"give {TORUS_CHIPS} or fewer")
    if num_chips > per_slice and per_slice < TORUS_CHIPS:
        what = f"with {num_chips} chips of a {name}, {per_slice} in each slice leave links unused that join up to"
        todo = f"give --gpus-per-node {min(2 ** math.ceil(math.log2(num_chips)), TORUS_CHIPS)}, the chips of a slice"
        raise UserError("gpus_per_node", f"{what} {TORUS_CHIPS}", todo)


def cluster(
    num_places: int, ranks_per_node: int, within: Link | None, between: Link, found: Calibration, fabric: Fabric
) -> Cluster:
    """Make the cluster of these links. Only CUDA devices have NCCL's protocols for small messages between nodes."""
    if found.device.device_type != "cuda":
        between = replace(between, protocols=())
    return Cluster(num_places, ranks_per_node, within or between, between, fabric=fabric)
