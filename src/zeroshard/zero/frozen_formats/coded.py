"""Frozen weights that a rank keeps as codes and scales, and decodes for each use.

    codes    | parameter 0: scales, codes | parameter 1 | ...     bytes; at stage 3 each rank has a part of them
                       |  `unshard`: at stage 3 an all-gather of the codes; decoded in the compute dtype
    full     |  slot 0  |     slot 1    | ...                     freed after use at every stage, and on one rank

At stages 0 to 2 every rank has all codes, and decoding sends nothing. There it runs on the stream ``copy_in``, beside
the forward of the unit before.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator, Work, empty_for, labelled
from zeroshard.comm.base import DONE
from zeroshard.comm.streams import Mark, Streams
from zeroshard.host.errors import UserError
from zeroshard.optim.named_shards import FROZEN, NamedShard, ShardReader, read_whole, require_shape
from zeroshard.settings.wire_formats import BlockFormat
from zeroshard.zero.buffers.changed_values import bit_sums
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.plain import BufferFacts, Members
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.reduction import GradientReducer
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.core.units import Named, UnitSpec
from zeroshard.zero.core.weights import Weights, WeightTransport
from zeroshard.zero.frozen_formats.settings import FrozenFormat
from zeroshard.zero.meta_models import Init
from zeroshard.zero.transport.wire import dequantise, quantise, record_read


class Codes:
    """Where the codes of a buffer's parameters lie, one parameter after the other.

    Args:
        layout: of the buffer.
        form: the format.
        num_shards: in how many parts of one length the codes are kept.

    Attributes:
        num_bytes: of all codes, padded to whole parts.
    """

    def __init__(self, layout: FlatLayout, form: BlockFormat, num_shards: int) -> None:
        self._layout, self._form = layout, form
        ends = [0]
        for slot in layout.slots:
            ends.append(ends[-1] + form.num_bytes(slot.numel))
        self._used, self._places = ends[-1], list(pairwise(ends))
        part = -(-self._used // num_shards // 16) * 16
        self.num_bytes, self._part = num_shards * part, part

    def part(self, rank: int) -> slice:
        """The bytes of this part."""
        return slice(rank * self._part, (rank + 1) * self._part)

    def encode(self, flat: Tensor) -> Tensor:
        """Return the codes ``[num_bytes]`` uint8 of ``flat [padded_numel]``."""
        codes = torch.zeros(self.num_bytes, dtype=torch.uint8, device=flat.device)
        for index, slot in enumerate(self._layout.slots):
            self.encode_slot(index, flat[slot.offset :][: slot.numel], codes)
        return codes

    def encode_slot(self, index: int, values: Tensor, codes: Tensor) -> None:
        """Write the codes of one parameter's ``values [numel]``."""
        quantise(values, codes[slice(*self._places[index])], self._form)

    def decode(self, codes: Tensor, flat: Tensor) -> Tensor:
        """Fill ``flat [padded_numel]`` with what ``codes`` stand for, and return it."""
        for slot, (start, stop) in zip(self._layout.slots, self._places, strict=True):
            dequantise(codes[start:stop], flat[slot.offset :][: slot.numel], self._form)
        self._layout.zero_padding(flat)
        return flat

    def padded(self, codes: Tensor) -> Tensor:
        """Return the codes with this padding, whatever padding they have."""
        if len(codes) == self.num_bytes:
            return codes
        padded = codes.new_zeros(self.num_bytes)
        padded[: self._used] = codes[: self._used]
        return padded

    def digests(self, codes: Tensor) -> list[int]:
        """A hash of each parameter's codes, the same on any number of ranks; 0 on the meta device."""
        return [digest_of(codes[start:stop]) for start, stop in self._places]


def digest_of(codes: Tensor) -> int:
    """A hash of one parameter's codes; 0 on the meta device."""
    if codes.is_meta:
        return 0
    sums = bit_sums(codes).cpu().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(sums, digest_size=7).digest(), "little")


class CodeTransport:
    """Brings weights from codes: those that this rank has, or at stage 3 those that all ranks gather.

    Args:
        comm, layout: as `WeightTransport`.
        codes: where the codes lie.
        shards: whether each rank has a part of them.
    """

    def __init__(self, comm: Communicator, layout: FlatLayout, codes: Codes, *, shards: bool) -> None:
        self.comm, self.layout = comm, layout
        self.form, self.resident = None, list[Tensor]()
        self.in_flight: list[Tensor] = []
        self._sent: Tensor | None = None
        self._codes, self.sends = codes, shards

    def prepare(self, full: Tensor, master: Tensor, *, changed: bool) -> None:
        """Decode the codes ``master``, or allocate memory for those of all ranks."""
        if not self.sends:
            self._codes.decode(master, full)
            return
        self.in_flight[:] = [empty_for(self.comm, self._codes.num_bytes, torch.uint8, full.device)]
        self._sent = master

    def start(self, full: Tensor) -> Work:
        """Issue the all-gather of the codes."""
        if not self.sends:
            return DONE
        assert self._sent is not None
        sent, self._sent = self._sent, None
        return self.comm.all_gather(self.in_flight[0], sent)

    def copy(self, full: Tensor, master: Tensor, streams: Streams, *after: Mark) -> None:
        """Decode the codes ``master``, of which every rank has all."""
        self._codes.decode(master, full)

    def invalidate(self) -> None:
        """Nothing: codes are decoded for each use."""

    def finish(self, full: Tensor) -> bool:
        """Decode what was gathered."""
        if self.sends:
            codes = self.in_flight.pop()
            self._codes.decode(codes, full)
            record_read(codes)
        return False


class CodedParams(FlatParams):
    """Frozen weights whose master is (a part of) their codes, ``[bytes]`` uint8. Construction is collective.

    Nothing updates them: they have no pieces. What a user writes into them is encoded.

    Attributes:
        digests: a hash of each parameter's codes.
    """

    has_pieces = False
    transport: CodeTransport

    def __init__(self, *args: Any, members: CodedMembers, strategy: ShardingStrategy, **kwargs: Any) -> None:
        super().__init__(*args, strategy=strategy, **kwargs)
        watch, self.watch = self.watch, None  # nothing was written to them yet
        flat = Weights.gather_master(self)
        shards = self.comm.world_size > 1 and strategy.params is SHARD
        self._format = members.form
        self._codes = members.codes(self.layout, members.form, self.comm.world_size if shards else 1)
        self.pieces, self._aliased, self._always_compared = [], False, False
        self.transport = CodeTransport(self.comm, self.layout, self._codes, shards=shards)
        self.take_codes(self._codes.encode(flat))
        if not self.shard_params:  # they are freed after use also where nothing is sent
            self.full = torch.empty_like(self.full)  # memory of torch's own: the storage will be resized
            self._views = self.layout.views(self.full)
        self.shard_optim = self.shard_params = True
        self.sends = shards
        self.reshard()
        self.watch = watch

    def take_codes(self, codes: Tensor) -> None:
        """From now on these are the weights' codes: all of them, with any padding."""
        codes = self._codes.padded(codes)
        self.digests = self._codes.digests(codes)
        own = codes[self._codes.part(self.comm.rank)] if self.transport.sends else codes
        self.master = empty_for(self.comm, len(own), torch.uint8, own.device).copy_(own)
        self._written_at = self._streams.mark()

    def all_codes(self) -> Tensor:
        """Return the codes of all ranks, ``[num_bytes]`` uint8. Collective if ranks have parts of them."""
        if not self.transport.sends:
            return self.master
        codes = empty_for(self.comm, self._codes.num_bytes, torch.uint8, self.master.device)
        with labelled(f"{self.name}/state"):
            self.comm.all_gather(codes, self.master).wait()
        return codes

    def gather_master(self) -> Tensor:
        """Return the weights as they are computed with, ``[padded_numel]`` in the parameters' own dtype. Collective."""
        self.take_changes()
        return self._flat_now().to(self.dtype)

    def _flat_now(self) -> Tensor:
        flat = torch.empty(self.layout.padded_numel, dtype=self.full.dtype, device=self.full.device)
        return self._codes.decode(self.all_codes(), flat)

    def write_back(self) -> None:
        """Encode values that were written into the weights, and show what they have become; a warning says if not all
        of their bits are kept.
        """
        assert self.state.visible, "hidden parameters show NaN"
        self.changes.take_assigned(self._views)
        with torch.no_grad():
            if self._exposed_bits is None or not torch.equal(self._exposed_bits, bit_sums(self.full)):
                codes, written = self._codes.encode(self.full), bit_sums(self.full)
                self.take_codes(codes)
                if not torch.equal(written, bit_sums(self._codes.decode(codes, self.full))):
                    warnings.warn(
                        f"full_params(write_back=True): frozen_format keeps what was written in {self._format.name}, "
                        "which rounds it; call zero.remove() first to have it as it was written",
                        stacklevel=2,
                    )
        self.changes.accept()
        self._exposed_bits = None if self._exposed_bits is None else bit_sums(self.full)

    def beside_values(self, rank: int) -> Iterable[NamedShard]:
        """The digests, from the first rank, in place of values."""
        for slot, param, digest in zip(self.layout.slots, self.params, self.digests, strict=True):
            if rank == 0 and param not in self.absent:
                yield NamedShard(slot.name, FROZEN, (), (0, 1), torch.tensor([digest]))

    def require_saved(self, reader: ShardReader) -> None:
        """Raise UserError unless the checkpoint has these codes' digests, or values that can be encoded."""
        for slot, param, digest in zip(self.layout.slots, self.params, self.digests, strict=True):
            if param in self.absent:
                continue
            if FROZEN not in reader.kinds(slot.name):
                require_shape(reader, slot.name, "param", slot.shape)
            elif int(reader.read(slot.name, FROZEN, (0, 1))) != digest:
                what = f"kept in {self._format.name}, and the checkpoint's run had other codes of it"
                raise UserError(slot.name, what, "give the base and the frozen format that this run began with")

    def load_values(self, reader: ShardReader) -> None:
        """Encode weights that were saved with their values. Collective."""
        given = {}
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            if param not in self.absent and "param" in reader.kinds(slot.name):
                given[param] = read_whole(reader, slot.name, "param", slot.shape)
        self.take_values(given)

    def take_values(self, given: Mapping[nn.Parameter, Tensor]) -> None:
        """Encode the unsharded values ``given``, but for those that codes stand for already. Collective."""
        if given.keys().isdisjoint(self.params):
            return
        codes, flat = self.all_codes().clone(), self._flat_now()
        for index, (slot, param) in enumerate(zip(self.layout.slots, self.params, strict=True)):
            if (source := given.get(param)) is not None:
                values = source.reshape(-1).to(flat.device, self.dtype)
                if not torch.equal(flat[slot.offset :][: slot.numel], values.to(flat.dtype)):
                    self._codes.encode_slot(index, values, codes)
        self.take_codes(codes)

    def widen_master(self) -> bool:
        """Raise ValueError: codes cannot be trained."""
        name = self.layout.slots[0].name
        raise ValueError(
            f"{name}: it is to be trained, but frozen_format keeps it in {self._format.name}, which cannot be trained; "
            "leave it frozen, or set it before Zero()"
        )


class CodedGroup(FlatGroup):
    """A group of frozen weights that are kept as codes."""

    def __init__(self, *args: Any, members: CodedMembers, **kwargs: Any) -> None:
        self._members = members
        super().__init__(*args, members=members, **kwargs)

    def _weights(
        self, facts: BufferFacts, params: Named, init: Init | None, transport: WeightTransport, *, frozen: bool
    ) -> CodedParams:
        if facts.strategy.secondary_shard_size is not None:
            what = f"{facts.strategy.secondary_shard_size} with frozen_format, whose codes have no second copy"
            raise UserError("secondary_shard_size", what, "leave one of them out")
        return CodedParams(
            facts.name,
            params,
            strategy=facts.strategy,
            rank_groups=facts.rank_groups,
            precision=facts.precision,
            init=init,
            layout=facts.layout,
            transport=transport,
            members=self._members,
        )

    @property
    def master_category(self) -> str:
        """``params``: codes are all that there is of the weights between their uses."""
        return "params"

    def restaged(self, strategy: ShardingStrategy) -> FlatGroup:
        """As of `FlatGroup`; the codes stay as they are."""
        assert isinstance(self.params, CodedParams)
        codes = self.params.all_codes()
        made = super().restaged(strategy)
        assert isinstance(made.params, CodedParams)
        made.params.take_codes(codes)
        return made


class CodedMembers(Members):
    """Groups of codes for some frozen parameters of a unit; all else is as ``others`` say.

    Attributes:
        form: their format.
        codes: what encodes and decodes them.
    """

    codes: Callable[[FlatLayout, BlockFormat, int], Codes] = Codes

    def __init__(self, others: Members, form: BlockFormat, chosen: frozenset[nn.Parameter]) -> None:
        self._others, self.form, self._chosen = others, form, chosen

    def transport(self, buffer: BufferFacts) -> WeightTransport:
        """That of the others."""
        return self._others.transport(buffer)

    def reducer(self, buffer: BufferFacts) -> GradientReducer:
        """That of the others."""
        return self._others.reducer(buffer)

    def kind(self, param: nn.Parameter) -> Hashable:
        """Whether it is kept as codes."""
        return param in self._chosen

    def group_class(self, params: list[tuple[str, nn.Parameter]]) -> Callable[..., Any] | None:
        """Codes are a group of their own."""
        if params[0][1] in self._chosen:
            return CodedGroup
        made = self._others.group_class(params) or FlatGroup
        return lambda *args, members, **kwargs: made(*args, members=self._others, **kwargs)


def members_of(
    settings: FrozenFormat, specs: Sequence[UnitSpec], others: Sequence[Members], kept: frozenset[Tensor]
) -> Sequence[Members]:
    """See `FrozenFormat.members`."""
    chosen = chosen_of(settings, specs, kept)
    return [
        CodedMembers(other, settings.form, own) if own else other for other, own in zip(others, chosen, strict=True)
    ]


def chosen_of(
    settings: FrozenFormat, specs: Sequence[UnitSpec], kept: frozenset[Tensor]
) -> list[frozenset[nn.Parameter]]:
    """Return each unit's parameters that are kept as codes: arguments and errors as of `FrozenFormat.members`."""
    apart = kept.union(*(part.parameters(recurse=False) for part in _embeddings_and_heads(specs[0].module)))

    def is_meant(name: str, param: nn.Parameter) -> bool:
        if settings.only is not None:
            return settings.matches(name)
        return param.dim() >= 2 and param not in apart

    def is_chosen(name: str, param: nn.Parameter) -> bool:
        return not param.requires_grad and param.is_floating_point() and is_meant(name, param)

    units = [[], *(spec.params for spec in specs[1:])] if settings.only is None else [spec.params for spec in specs]
    chosen = [frozenset(param for name, param in params if is_chosen(name, param)) for params in units]
    if any(chosen):
        return chosen
    if settings.only is not None:
        what, todo = f"no frozen parameter matches {', '.join(settings.only)}", "correct frozen_format.only"
    else:
        what = "no frozen parameter of two or more dimensions belongs to a unit"
        todo = "freeze the base before Zero(), or leave it out"
        outside = [name for name, param in specs[0].params if is_chosen(name, param)]
        if outside:  # as one that two units share does
            what = f"{outside[0]} is frozen and belongs to no unit"
            todo = "give units= that have it, or name it in FrozenFormat(only=[...])"
    raise UserError("frozen_format", what, todo)


def _embeddings_and_heads(model: nn.Module) -> Iterator[nn.Module]:
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) or name.rpartition(".")[2] == "lm_head":
            yield part
        head = getattr(part, "get_output_embeddings", None)  # of a model of transformers
        if head is not None and (found := head()) is not None:
            yield found
