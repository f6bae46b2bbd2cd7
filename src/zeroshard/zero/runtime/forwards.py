"""One backward through the graphs of several forwards: of a preference loss, of real and generated samples.

The graph of a forward may also be dropped without a backward. When it is garbage collected differs from rank to rank,
so no rank decides by itself: if several forwards are outstanding, ranks that shard weights agree first.
"""

from __future__ import annotations

import torch

from zeroshard.comm import Communicator
from zeroshard.comm.agree import maxima
from zeroshard.zero.core.forward import Forward, Forwards


def of_several(forwards: Forwards, begun: Forward, comm: Communicator | None) -> list[Forward]:
    """Those of the outstanding forwards that a backward goes through: `Forwards.several`. Collective with ``comm``.

    A rank votes for the place of ``begun`` (-1: it is not outstanding), then for each outstanding forward whether its
    graph is left. The maxima over ranks decide: those up to that place of which any rank has a graph.
    """
    outstanding = forwards.outstanding
    votes = [outstanding.index(begun.index) if begun.index in outstanding else -1]
    votes += [int(forwards.find(index) is not None) for index in outstanding]
    if comm is not None:
        votes = maxima(comm, votes, torch.int64)
    first, *flags = votes
    found = [index for place, index in enumerate(outstanding) if place <= first and flags[place]]
    return [forwards.find(index) or Forward(index) for index in reversed(found)] or [begun]
