"""Which `WeightTransport` and which `GradientReducer` a buffer gets: the one place that knows all of them."""

from __future__ import annotations

from torch import Tensor

from zeroshard.comm import Communicator, Work
from zeroshard.wire_formats import Format
from zeroshard.zero.buffers.plain import BufferFacts
from zeroshard.zero.buffers.reduction import GradientReducer, GradientReduction, PlainReduction
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.core.weights import WeightTransport
from zeroshard.zero.rank_groups import Nodes
from zeroshard.zero.transport.exact_sums import ExactReducer
from zeroshard.zero.transport.node_copy import NodeTransport, TransportOverNodes
from zeroshard.zero.transport.node_reduce import NodeReduce
from zeroshard.zero.transport.wire import AcrossReplicas, PackedReduce, PackedTransport, Rounding


class AllMembers:
    """Chooses by the wire formats, the groups of ranks and the row of the stage table."""

    def transport(self, buffer: BufferFacts) -> WeightTransport:
        """Return the transport of the buffer's weights."""
        comm, strategy = buffer.rank_groups.shard_group, buffer.strategy
        transport = TransportOverNodes(comm, buffer.layout)
        if comm.world_size == 1 or strategy.optim is not SHARD:
            return transport
        form, shard_params = buffer.precision.weights_format(buffer.dtype), strategy.params is SHARD
        if form is not None:
            transport = PackedTransport(comm, buffer.layout, form, compares=not shard_params)
        if shard_params and strategy.secondary_shard_size is not None and buffer.rank_groups.node_group is not None:
            return NodeTransport(transport, buffer.rank_groups.node_group)
        return transport

    def reducer(self, buffer: BufferFacts) -> GradientReducer:
        """Return the reducer of the buffer's gradients."""
        rank_groups, precision, everywhere = buffer.rank_groups, buffer.precision, buffer.strategy.optim is not SHARD
        ranks = rank_groups.shard_group, rank_groups.replicate_group, buffer.layout
        form = precision.gradients_format(buffer.dtype)
        if rank_groups.reproducible is not None:
            sent = precision.gradient_dtype(buffer.dtype)
            return ExactReducer(*ranks, everywhere=everywhere, dtype=sent, device=buffer.device)
        if form is not None and not everywhere:
            rounding = Rounding(precision.rounding_seed, buffer.name, rank_groups.world.rank)
            return PackedReducer(*ranks, form, rank_groups.nodes, rounding)
        return GradientReducer(*ranks, everywhere=everywhere)


ALL = AllMembers()


class PackedReducer(GradientReducer):
    """Reduces gradients in a wire format.

    Args:
        comm, replicate_group, layout: as `GradientReducer`.
        form: the wire format. With replicas only the sum over them uses it.
        nodes: the nodes, if gradients are summed inside a node first; else None.
        rounding: rounding keys of this buffer.
    """

    needs_even_shards = True

    def __init__(
        self,
        comm: Communicator,
        replicate_group: Communicator,
        layout: FlatLayout,
        form: Format,
        nodes: Nodes | None,
        rounding: Rounding,
    ) -> None:
        super().__init__(comm, replicate_group, layout, everywhere=False)
        self._form, self._nodes, self.rounding = form, nodes, rounding

    def begin(self, local: Tensor) -> GradientReduction:
        """Return a reduction of ``local [padded_numel]``. Collective."""
        if self.replicate_group.world_size > 1:
            within = PlainReduction(self.comm, self.layout, local, everywhere=False)
            return PackedOverReplicas(within, self.replicate_group, self._form, self.rounding)
        if self.comm.world_size == 1:
            return super().begin(local)
        if self._nodes is None:
            return PackedReduce(self.comm, self._form, local, self.rounding)
        return NodeReduce(self._nodes, self._form, local, self.rounding)

    def end_step(self) -> None:
        """Record that gradients are cleared: the next reduction belongs to the next step."""
        self.rounding.end_step()

    @property
    def saved_step(self) -> int:
        """The step that numbers the next rounding."""
        return self.rounding.next_step

    def load_step(self, step: int) -> None:
        """Round as in this step, which lags behind the run's if parameters were frozen for a time."""
        self.rounding.loaded(step)

    def resume_at(self, step: int) -> None:
        """Round as in this step, unless a checkpoint had one."""
        self.rounding.begin_at(step)

    def continue_from(self, other: GradientReducer) -> None:
        """Round as ``other`` would have done."""
        if other.saved_step is not None:
            self.rounding.resume_at(other.saved_step)


class PackedOverReplicas:
    """A reduction in the shard group, then `AcrossReplicas`, which reads the shard that it gives."""

    def __init__(self, within: PlainReduction, replicate_group: Communicator, form: Format, rounding: Rounding) -> None:
        self._within, self._replicate_group, self._form, self._rounding = within, replicate_group, form, rounding
        self._across: AcrossReplicas | None = None
        self.num_left = 3

    @property
    def packed(self) -> Tensor | None:
        """What arrives from the replicas."""
        return None if self._across is None else self._across.packed

    def issue(self, target: Tensor) -> Work:
        """Issue the next of three collectives."""
        self.num_left -= 1
        if self.num_left == 2:
            return self._within.issue(target)
        if self._across is None:
            self._across = AcrossReplicas(self._replicate_group, self._form, target, self._rounding)
        return self._across.issue(target)

    def deliver(self, target: Tensor) -> None:
        """Write the sum over replicas to ``target``."""
        assert self._across is not None
        self._across.deliver(target)
