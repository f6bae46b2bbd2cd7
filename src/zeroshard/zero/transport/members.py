"""Which `WeightTransport` and which `GradientReducer` a buffer gets: the one place that knows all of them."""

from __future__ import annotations

from torch import Tensor

from zeroshard.comm import Communicator, Work
from zeroshard.settings.wire_formats import Format, Rounding
from zeroshard.zero.buffers.plain import BufferFacts, Members
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.reduction import GradientReducer, GradientReduction, PlainReducer
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.core.weights import WeightTransport
from zeroshard.zero.transport.exact_sums import ExactReducer
from zeroshard.zero.transport.node_copy import NodeTransport, PlainOverNodes, TransportOverNodes
from zeroshard.zero.transport.node_reduce import NodeReduce
from zeroshard.zero.transport.wire import AcrossReplicas, PackedReduce, PackedTransport


class AllMembers(Members):
    """Chooses by the wire formats, the groups of ranks and the row of the stage table."""

    def transport(self, buffer: BufferFacts) -> WeightTransport:
        """Return the transport of the buffer's weights."""
        comm, strategy = buffer.rank_groups.shard_group, buffer.strategy
        transport: TransportOverNodes = (plain := PlainOverNodes(comm, buffer.layout))
        if comm.world_size == 1 or strategy.optim is not SHARD:
            return plain
        form, shard_params = buffer.precision.weights_format(buffer.dtype), strategy.params is SHARD
        if form is not None:
            transport = PackedTransport(comm, buffer.layout, form, compares=not shard_params)
        if shard_params and strategy.secondary_shard_size is not None and buffer.rank_groups.node_group is not None:
            compute_dtype = buffer.precision.compute_dtype(buffer.dtype)
            return NodeTransport(transport, buffer.rank_groups.node_group, compute_dtype, buffer.device)
        return transport

    def reducer(self, buffer: BufferFacts) -> GradientReducer:
        """Return the reducer of the buffer's gradients."""
        facts = buffer.layout, buffer.strategy, buffer.rank_groups
        precision, form = buffer.precision, buffer.precision.gradients_format(buffer.dtype)
        if buffer.rank_groups.reproducible is not None:
            return ExactReducer(*facts, dtype=precision.gradient_dtype(buffer.dtype), device=buffer.device)
        if form is not None and buffer.strategy.optim is SHARD:
            rounding = Rounding(precision.rounding_seed, buffer.name, buffer.rank_groups.world.rank)
            return PackedReducer(*facts, form, rounding)
        return PlainReducer(*facts)


ALL = AllMembers()


class PackedReducer:
    """Reduces gradients in a wire format.

    Args:
        layout, strategy, rank_groups: as `GradientReducer`; with ``rank_groups.nodes``, gradients are summed inside a
            node first.
        form: the wire format. With replicas only the sum over them uses it.
        rounding: rounding keys of this buffer.
    """

    needs_even_shards = True
    running_sum = None

    def __init__(
        self, layout: FlatLayout, strategy: ShardingStrategy, rank_groups: RankGroups, form: Format, rounding: Rounding
    ) -> None:
        self._plain = PlainReducer(layout, strategy, rank_groups)
        self._form, self._nodes, self._keys = form, rank_groups.nodes, rounding
        self.rounding = rounding

    def begin(self, local: Tensor) -> GradientReduction:
        """Return a reduction of ``local [padded_numel]``. Collective."""
        comm, replicate_group = self._plain.comm, self._plain.replicate_group
        if replicate_group.world_size > 1:
            return PackedOverReplicas(self._plain.begin(local), replicate_group, self._form, self._keys)
        if comm.world_size == 1:
            return self._plain.begin(local)
        if self._nodes is None:
            return PackedReduce(comm, self._form, local, self._keys)
        return NodeReduce(self._nodes, self._form, local, self._keys)


class PackedOverReplicas:
    """A reduction in the shard group, then `AcrossReplicas`, which reads the shard that it gives."""

    def __init__(
        self, within: GradientReduction, replicate_group: Communicator, form: Format, rounding: Rounding
    ) -> None:
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
