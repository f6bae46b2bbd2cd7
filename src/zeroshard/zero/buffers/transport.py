"""`WeightTransport`: how the unsharded weights of one flat buffer come to be from the shards of all ranks.

A gather has three steps: `prepare` makes this rank's shard ready to be sent (on a GPU on the stream ``copy_in``),
`start` issues the collective, and `finish` does what is left once that is done. `invalidate` says that the master
weights have changed since. These are the members; a new one is a subclass, and a line in
`zeroshard.zero.transport.members`:

| transport         | what is sent                                                                                    |
|-------------------|-------------------------------------------------------------------------------------------------|
| `WeightTransport` | each rank's shard, in the compute dtype                                                         |
| `PackedTransport` | its codes and scales in a wire format, decoded by every rank                                    |
| `NodeTransport`   | either of them once a step between nodes; later gathers are of a second copy inside the node    |
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work
from zeroshard.wire_formats import Format
from zeroshard.zero.buffers.written_weights import take_where_it_differs
from zeroshard.zero.core.layout import FlatLayout


class WeightTransport:
    """The plain transport of one buffer; ``comm``: the ranks that hold the shards; ``layout``: the buffer's."""

    def __init__(self, comm: Communicator, layout: FlatLayout) -> None:
        self.comm, self.layout = comm, layout
        self._own = slice(*layout.interval(comm.rank))
        self._sent: Tensor | None = None

    def attach(self, full: Tensor) -> None:
        """Allocate what stays from one gather to the next; called once, before the first gather."""

    def prepare(self, full: Tensor, master: Tensor, *, changed: bool) -> None:
        """Make this rank's shard ready.

        Args:
            full: ``[padded_numel]`` in the compute dtype; it has memory.
            master: ``[own_numel]``, the master weights of this rank's shard; may be a view of ``full``.
            changed: whether this rank's shard of ``full`` is older than ``master``.
        """
        own = full[self._own]
        if master.dtype == full.dtype:
            own = master
        elif changed:
            own.copy_(master)
        self._sent = own

    def start(self, full: Tensor) -> Work:
        """Issue the collective."""
        assert self._sent is not None
        sent, self._sent = self._sent, None
        return self.layout.gather(self.comm, full, sent)

    def finish(self, full: Tensor) -> bool:
        """Complete ``full`` after the collective; return whether memory was written that `prepare` reads later."""
        return False

    def invalidate(self) -> None:
        """Record that master weights have changed, on every rank."""

    def take_written(self, master: Tensor, written: Tensor) -> None:
        """Copy to ``master [n]`` what a user has written into its part of the weights, ``written [n]``."""
        if written.dtype == master.dtype:
            master.copy_(written)
        else:
            take_where_it_differs(master, written)

    # -- what `NodeTransport` asks of the transport between nodes -----------------------------------------------

    def expect(self, full: Tensor) -> None:
        """As `prepare`, for a collective to which this rank gives a shard of `arriving` itself."""

    def arriving(self, full: Tensor) -> Tensor:
        """1-D: where the shards of all ranks arrive."""
        return full

    def arriving_kind(self, full: Tensor) -> tuple[torch.dtype, int]:
        """Dtype and number of elements of `arriving`."""
        return full.dtype, full.numel()

    # -- facts --------------------------------------------------------------------------------------------------

    form: Format | None = None  # the wire format; None: weights are sent in the compute dtype

    @property
    def resident(self) -> list[Tensor]:
        """The tensors that stay from one gather to the next."""
        return []

    @property
    def in_flight(self) -> list[Tensor]:
        """The tensors of a gather in flight, beside the unsharded weights."""
        return []

    def is_rounded(self, master: torch.dtype, compute: torch.dtype) -> bool:
        """Whether weights may be rounded more than to the ``compute`` dtype."""
        return False
