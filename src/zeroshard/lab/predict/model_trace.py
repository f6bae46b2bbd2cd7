"""Traces one micro-batch's forward and backward on tensors without values: allocations and operations, in order.

The model runs on tensors that have shapes, dtypes and lifetimes but no memory, so a model of any size takes
milliseconds per layer. They are torch's fake tensors, or meta tensors if these give the same trace
(`zeroshard.lab.predict.on_meta`). The engine's own hooks (`zeroshard.zero.core.hooks`) report the events that
they will report to the engine in a run. What happens between two events is a `Span`; memory and time are computed from
the list of spans alone.

[Note: Fake devices]
    Torch without CUDA has no fake CUDA tensors, so the trace runs on the CPU's attention kernel. That one saves for
    backward what flash attention saves on a GPU: queries, keys, values, output and one number per row. Our own kernels,
    which a GPU would run, only allocate and launch nothing (`zeroshard.kernels.launch.traced`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.comm import NullCommunicator
from zeroshard.comm.base import DONE
from zeroshard.comm.base import Work as Handle
from zeroshard.host.errors import UserError
from zeroshard.host.torch_internals import in_backward
from zeroshard.kernels import Choice
from zeroshard.kernels.launch import traced
from zeroshard.kernels.linear_cross_entropy import all_logits
from zeroshard.lab.predict.fusion import Operation, Region, fused, opaque, operation
from zeroshard.lab.predict.model_spans import ROOT, Event, EventName, Span, Trace, repeat_blocks
from zeroshard.lab.predict.on_meta import (
    NotServedError,
    fuse_dropout,
    in_recomputations,
    on_meta,
    serves,
    without_values_of,
)
from zeroshard.lab.predict.recorder import Alike, StorageEvents
from zeroshard.lab.predict.scratch import scratch_bytes
from zeroshard.lab.predict.work import (
    Work,
    bytes_read,
    dtype_name,
    has_matrix,
    with_factors_in_8_bits,
    work_of,
    work_of_projected_loss,
)
from zeroshard.models import LanguageModel, SequenceParallel, build_model
from zeroshard.models.adapters import Lora, is_adapter
from zeroshard.models.attention import as_on_gpu
from zeroshard.models.plain_module import described
from zeroshard.models.presets import nearest_preset
from zeroshard.models.tiles import alike_tiles
from zeroshard.zero import MixedPrecision
from zeroshard.zero.core.forward import Forward
from zeroshard.zero.core.hooks import UnitHooks
from zeroshard.zero.core.units import UnitSpec
from zeroshard.zero.unit_choice import UnitChoice, partition_of

COMPILED = "compiled", "in pieces"  # kinds of ``device_type``
SCRATCH = -1  # stands for a storage that an operation allocates and frees

Inputs = Callable[[int], tuple[Any, ...]]  # from a number of rows to the model's arguments for them, on any device


@dataclass(frozen=True)
class Computing:
    """How a micro-batch is computed, beside its dtype policy.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"`` for the kernels that a GPU would run, ``"eager"`` for PyTorch's own
            operations there, which keep all logits in memory; ``"compiled"`` for the model compiled in one graph, ``"in
            pieces"`` with a graph for each block and those around them.
        autocast: the dtype that `torch.autocast` casts to in forward; None: it is not used.
        sequence_parallel: ranks that share each row of a `LanguageModel`; a rank has a part of its tokens.
        deterministic: whether algorithms are, as those of reproducible steps.
    """

    device_type: str = "cpu"
    autocast: torch.dtype | None = None
    sequence_parallel: int = 1
    deterministic: bool = False


def trace_language_model(
    model: LanguageModel,
    micro_batch: int,
    seq_len: int,
    precision: MixedPrecision,
    *,
    blocks_alone: bool = False,
    **how: Any,
) -> Trace:
    """Trace one of our models, of any depth; see [Note: Alike blocks] in `zeroshard.lab.predict.model_spans`.

    Args:
        model: the model, on any device; it is not changed.
        micro_batch: rows of the micro-batch.
        seq_len: tokens in a row.
        precision: the dtype policy.
        blocks_alone: whether embedding and head stay in the root unit; False: the model's own ``units``.
        how: fields of `Computing`.
    """
    computing = Computing(**how)
    units = list(model.blocks) if blocks_alone else model.units
    if not is_as_built(model):
        inputs = tokens_and_targets(seq_len // computing.sequence_parallel)
        return trace_model(model, micro_batch, units, inputs, precision, **how)
    dtype = next(param.dtype for param in model.parameters())
    if precision.param_dtype is None and dtype != torch.float32:  # 16-bit weights without fp32 master weights
        precision = replace(precision, param_dtype=dtype)
    # Plans of other wire formats and other sums of gradients compute the same micro-batch.
    computed = "param_dtype", "cast_forward_inputs", "keep_in_fp32_modules"
    precision = MixedPrecision(**{name: getattr(precision, name) for name in computed})
    name, changes = nearest_preset(cast("Any", model.config))
    built = (name, tuple(sorted(changes.items())), model.kernels, model.lora, model.eos_id, model.matmul)
    of_depth = partial(_traced, *built, micro_batch, seq_len, precision, computing, blocks_alone)
    num_blocks, recomputed = len(model.blocks), model.recomputation
    period, edge = _period(recomputed), 1
    if recomputed == "offload":  # an input leaves while the next block runs, on a GPU while the one after it does
        edge = 2 if computing.device_type == "cpu" else 3
    few = 2 * (period + edge)
    few += (num_blocks - few) % period
    deeper = None
    if num_blocks > few and have_the_same(model.blocks):
        before = units.index(model.blocks[0])
        after = len(units) - num_blocks - before
        deeper = repeat_blocks(of_depth(few), num_blocks, period, before=before, after=after, edge=edge)
    return of_depth(num_blocks) if deeper is None else deeper


def have_the_same(blocks: Iterable[nn.Module]) -> bool:
    """Whether all ``blocks`` have parameters of the same names: adapters may be in only some of them."""
    return len({tuple(name for name, _ in block.named_parameters()) for block in blocks}) == 1


def is_as_built(model: LanguageModel) -> bool:
    """Whether all parameters have one dtype and those train that a newly built model trains: only adapters, or all."""
    dtype = next(param.dtype for param in model.parameters())
    return all(
        param.requires_grad == (model.lora is None or is_adapter(name)) and param.dtype == dtype
        for name, param in model.named_parameters()
    )


@lru_cache(maxsize=256)  # the rows of a plan, and several plans, ask for the same micro-batch
def _traced(
    name: str,
    changes: tuple[tuple[str, Any], ...],
    kernels: Any,
    lora: Lora | None,
    eos_id: int | None,
    matmul: str,
    micro_batch: int,
    seq_len: int,
    precision: MixedPrecision,
    computing: Computing,
    blocks_alone: bool,
    depth: int,
) -> Trace:
    def traced_on(without_values: AbstractContextManager[object], model: LanguageModel) -> Trace:
        units = list(model.blocks) if blocks_alone else model.units
        inputs = tokens_and_targets(seq_len // computing.sequence_parallel)
        return _trace(without_values, model, micro_batch, units, inputs, precision, computing, copied=False)

    def built() -> LanguageModel:
        with torch.device("meta"):
            overrides = {**dict(changes), "n_layer": depth}
            model = build_model(name, overrides=overrides, kernels=kernels, lora=lora, for_plan=True)
        model.matmul = matmul
        model.eos_id = eos_id  # the document mask, and the tensors that each block's attention makes of it
        return model

    model = built()
    if computing.autocast is None and serves(model, precision, computing.device_type):
        with suppress(NotServedError):
            return traced_on(on_meta(), model)
        model = built()  # the trace has changed the other one
    return traced_on(_fakes(), model)


def tokens_and_targets(seq_len: int) -> Inputs:
    """A function that makes a language model's arguments, tokens and targets, for a number of rows."""

    def make(micro_batch: int) -> tuple[Tensor, Tensor]:
        tokens, targets = (torch.zeros(micro_batch, seq_len, dtype=torch.int64) for _ in range(2))
        return tokens, targets

    return make


def trace_model(
    model: nn.Module,
    micro_batch: int,
    units: UnitChoice | None,
    inputs: Inputs,
    precision: MixedPrecision,
    **how: Any,
) -> Trace:
    """Trace any module; its outputs that take gradients are summed to a loss.

    Args:
        model: the module, on any device; it is not changed.
        micro_batch: the number of rows that is given to ``inputs``.
        units: as `zeroshard.Zero` takes them.
        inputs: makes a rank's part of the model's arguments.
        precision: the dtype policy.
        how: fields of `Computing`.

    Raises:
        UserError: no output takes gradients, or forward depends on values or has an operation without shape inference.
    """
    return _trace(_fakes(), model, micro_batch, units, inputs, precision, Computing(**how))


@contextmanager
def _fakes() -> Generator[None]:
    """Use fake tensors in this block: [Note: Fake devices].

    Torch's log of untraceable operations is off, because the caller reports them.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logger.disabled = before


def _trace(
    without_values: AbstractContextManager[object],
    model: nn.Module,
    micro_batch: int,
    units: UnitChoice | None,
    inputs: Inputs,
    precision: MixedPrecision,
    computing: Computing,
    *,
    copied: bool = True,
) -> Trace:
    """The trace; unless the model is ``copied``, it is changed."""
    device_type, autocast, num_sharing = computing.device_type, computing.autocast, computing.sequence_parallel
    with without_values:
        fake, chosen = without_values_of(model, units, precision, copied=copied)
        known = described(fake)
        if device_type != "cpu":
            fuse_dropout(fake, known.blocks)
        if known.recomputation != "none" and next(fake.parameters()).is_meta:
            in_recomputations(fake, known.blocks)
        root, specs = partition_of(fake, chosen)
        log = _Log([root, *specs], device_type)
        if known.matmul == "fp8":
            log.in_8_bits = {tuple(layer.weight.shape) for layer in known.layers_in_8_bits}
        if num_sharing > 1:
            cast("LanguageModel", fake).share_sequences(SequenceParallel(_Sharing(num_sharing, log)))
        given = inputs(micro_batch)
        if precision.param_dtype is not None and precision.cast_forward_inputs:
            given = tree_map(lambda x: _cast(x, precision.param_dtype), given)
        recorder = StorageEvents(log.storage_changed, log.ran)
        log.number_of = recorder.number_of
        arguments = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        recorder.ignore([*fake.parameters(), *fake.buffers(), *arguments])
        kernels = _kernels_of(device_type, log, known.kernels, deterministic=computing.deterministic)
        with kernels, alike_tiles(log), recorder:
            try:
                with torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
                    output = fake(*given)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                what = f"its forward reads values of tensors ({error.func}), which a trace has not"
                raise UserError("model", what, "plan the model without that branch") from None
            except RuntimeError as error:  # an operation without shape inference for these dtypes
                if "overflow" in str(error):
                    raise
                what = f"its forward cannot be traced without values ({next(iter(str(error).splitlines()), '')})"
                raise UserError("model", what, "plan it in another dtype") from None
            loss = sum(leaf.sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
            del output
            if not isinstance(loss, Tensor):
                raise UserError("model", "no output of it takes gradients", "give a model that returns its loss")
            loss.backward()
            del loss
        log.close()
    tokens = arguments[0].shape[0] if arguments[0].is_floating_point() else arguments[0].numel()
    num_bytes = sum(leaf.untyped_storage().nbytes() for leaf in (*arguments, *model.buffers()))
    return Trace(log.order(), tuple(log.spans()), num_bytes, tokens)


def _period(recomputed: str) -> int:
    return int(recomputed.partition(":")[2]) if recomputed.startswith("every:") else 1


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def _kernels_of(device_type: str, log: _Log, kernels: Choice, *, deterministic: bool) -> Generator[None]:
    if device_type == "cpu":
        yield
        return
    compiled = device_type in COMPILED
    plain = device_type == "eager" or (compiled and kernels == "reference")
    with all_logits() if plain else traced(log.launched, compiled=compiled), as_on_gpu(deterministic=deterministic):
        yield


class _Sharing(NullCommunicator):
    """Ranks that share sequences, without peers; it records their all-to-alls and moves nothing."""

    def __init__(self, world_size: int, log: _Log) -> None:
        super().__init__(world_size)
        self._log = log

    def all_to_all(self, output: Tensor, input: Tensor) -> Handle:
        """Record it."""
        return self._log.exchange(input.nbytes, self.world_size)

    def all_gather(self, output: Tensor, input: Tensor) -> Handle:
        """Return at once: it is a control message."""
        return DONE


class _Unit:
    """A stand-in for the engine's `Unit`, with what `zeroshard.zero.core.hooks.UnitHooks` needs of it."""

    def __init__(self, spec: UnitSpec, index: int) -> None:
        self.name, self.module, self.index = spec.name, spec.module, index
        self.params = spec.params

    def trained_groups(self) -> list[Any]:
        """As `Unit.trained_groups`: here each trained parameter stands for a group."""
        return [param for _, param in self.params if param.requires_grad]


class _Log:
    """The hooks' listener in the engine's place: records events, allocations and operations in order."""

    def __init__(self, specs: Sequence[UnitSpec], device_type: str = "cpu") -> None:
        self._entries: list[Event | Work | Operation | tuple[int, int]] = [Event("start")]
        self._on_gpu, self._compiled = device_type != "cpu", device_type in COMPILED
        self._whole = device_type == "compiled"
        self.in_8_bits: set[tuple[int, ...]] = set()  # sizes of the matrices that multiply in 8 bits
        self._regions: list[Region] = []
        self._region: list[Operation] | None = None
        self.number_of: Callable[[Tensor], int] = lambda tensor: 0
        self._places: dict[int, int] = {}  # each unit's place in the order of first calls
        self._units = [_Unit(spec, index) for index, spec in enumerate(specs)]
        self._pass: object | None = None
        self._grads: list[Tensor] = []  # of one graph, which hands them over at its end
        self.forward = Forward()
        self._takers: list[Any] = []
        for unit in self._units:
            UnitHooks(cast("Any", unit), cast("Any", self)).attach()
            for name, param in unit.params:
                if param.requires_grad:
                    take = self._taker(unit, name.removeprefix(f"{unit.name}."))
                    self._takers.append(param.register_post_accumulate_grad_hook(take))

    def close(self) -> None:
        """Remove hooks of gradients: Python's collector does not find cycles through them, and the model would stay."""
        for taker in self._takers:
            taker.remove()

    def order(self) -> tuple[str, ...]:
        """Names of units in order of execution; units that did not run come last."""
        ran = sorted(self._places, key=lambda index: self._places[index])
        rest = [index for index in range(1, len(self._units)) if index not in self._places]
        return tuple(self._units[index].name for index in (*ran, *rest))

    # -- what happens -----------------------------------------------------------------------------------------

    def storage_changed(self, storage: int, change: int) -> None:
        """Record that a storage was allocated (``change`` bytes) or freed (negative)."""
        self._entries.append((storage, change))

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, alike: Alike | None) -> None:
        """Record what an operation that has run costs, if it costs anything."""
        work = work_of(func, args, kwargs, result, alike)
        if work is None:
            return
        if self._on_gpu and (self._region is None or work.attention):  # compiled sums keep none
            num_bytes = scratch_bytes(work, func, args)
            self._entries += [(SCRATCH, num_bytes), (SCRATCH, -num_bytes)] if num_bytes else []
        if self.in_8_bits and has_matrix(work, self.in_8_bits):
            conversion, work, num_bytes = with_factors_in_8_bits(work)
            self._entries += [conversion, (SCRATCH, num_bytes), (SCRATCH, -num_bytes)]
        if not self._compiled:
            self._entries.append(work)
            return
        found = operation(work, func, args, kwargs, result, self.number_of)
        self._entries.append(found)
        if self._region is not None:
            self._region.append(found)

    def exchange(self, num_bytes: int, num_ranks: int) -> Handle:
        """Record an all-to-all, for which the model waits."""
        self._entries.append(Event("exchange", num_bytes=num_bytes, num_ranks=num_ranks))
        return DONE

    def here(self) -> int:
        """The number of entries so far."""
        return len(self._entries)

    def repeat(self, since: int, times: int) -> bool:
        """Repeat the entries from ``since`` on; whether that is what ``times`` more tiles would do.

        A tile frees what the one before it has left, and leaves as much for the next one: in a repetition the same
        storage is freed and allocated again.
        """
        entries = self._entries[since:]
        left: dict[int, int] = {}  # bytes of storages that these entries allocate and do not free
        old: dict[int, int] = {}  # and of those that they free and have not allocated
        for entry in entries:
            if isinstance(entry, Event | Operation):
                return False
            if isinstance(entry, tuple):
                storage, change = entry
                if change > 0:
                    left[storage] = change
                elif left.pop(storage, 0) == 0:
                    old[storage] = -change
        if sorted(left.values()) != sorted(old.values()):
            return False
        by_size = [sorted(each, key=lambda storage, each=each: each[storage]) for each in (old, left)]
        now = dict(zip(*by_size, strict=True))
        repeated = [(now.get(each[0], each[0]), each[1]) if isinstance(each, tuple) else each for each in entries]
        self._entries += repeated * times
        return True

    def launched(self, name: str, args: tuple[Any, ...]) -> None:
        """Record one of our kernels: it reads and writes each of its tensors once, except for the projected loss."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name == "linear_cross_entropy":
            works = list(work_of_projected_loss(*args))
        else:
            works = [Work(0, sum(map(bytes_read, tensors)), dtype_name(tensors[0].dtype))]
        if self._region is None:
            self._entries += works
            return
        found = opaque(works, tensors, self.number_of)
        self._entries += found
        self._region += found

    @property
    def backward(self) -> object:
        return self._pass

    def pre_forward(self, unit: Any) -> None:
        if in_backward():
            self._event("recompute", unit)
        else:
            self._event("pre_forward", unit)

    def post_forward(self, unit: Any, *, grads_flow: bool, keep_unsharded: bool) -> None:
        self._event("post_forward", unit, grads_flow=grads_flow, keep_unsharded=keep_unsharded)

    def views(self, unit: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
        return []

    def pre_backward(self, unit: Any, forward: object) -> None:
        self._backward()
        self._event("pre_backward", unit)

    def post_backward(self, unit: Any, forward: object) -> None:
        self._backward()
        self._event("post_backward", unit)

    def _backward(self) -> None:
        if self._pass is None:
            self._pass = object()
            torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def _over(self) -> None:
        self._pass = None
        self._entries.append(Event("backward_over"))
        self._grads.clear()

    def _taker(self, unit: _Unit, name: str) -> Callable[[Tensor], None]:
        def take(param: Tensor) -> None:
            self._backward()
            self._event("grad", unit, param=name)
            if self._whole and param.grad is not None:
                self._grads.append(param.grad)
            param.grad = None

        return take

    def _event(self, name: EventName, unit: _Unit, **details: Any) -> None:
        self._enter_or_leave_region(name, unit)
        place = ROOT
        if unit.index:
            place = self._places.setdefault(unit.index, len(self._places))
        self._entries.append(Event(name, place, **details))

    def _enter_or_leave_region(self, name: EventName, unit: _Unit) -> None:
        """Begin a region of `zeroshard.lab.predict.fusion`: forward or backward, or what of these is between events."""
        if not self._compiled or name == "grad":
            return
        backward = name in ("pre_backward", "post_backward")
        if not self._whole or not self._regions or (backward and not self._regions[-1].backward):
            self._region = []
            self._regions.append(Region(self._region, backward))

    # -- the result -------------------------------------------------------------------------------------------

    def spans(self) -> Generator[Span]:
        """The entries as spans."""
        entries = self._as_compiled()
        begins = next(
            (i for i, e in enumerate(entries) if isinstance(e, Event) and e.name == "pre_backward"), len(entries)
        )
        kept: set[int] = set()
        for entry in entries[:begins]:
            if isinstance(entry, tuple) and entry[1] > 0:
                kept.add(entry[0])
            elif isinstance(entry, tuple):
                kept.discard(entry[0])
        current: list[Work | tuple[int, int]] = []
        event: Event | None = None
        for entry in entries:
            if isinstance(entry, Event):
                if event is not None:
                    yield _span(event, current, kept)
                event, current = entry, []
            else:
                current.append(entry)
        assert event is not None
        yield _span(event, current, kept)

    def _as_compiled(self) -> list[Event | Work | tuple[int, int]]:
        """The entries, with the kernels of compiled regions in the place of their operations, and what these write.

        What is not written is computed again from what stays in memory for as long.
        """
        kernels, sources = fused([entry for entry in self._entries if isinstance(entry, Operation)], self._regions)
        until: dict[int, int] = {}
        for place, entry in enumerate(self._entries):
            if isinstance(entry, tuple) and entry[1] < 0:
                until |= dict.fromkeys(sources.get(entry[0], ()), place)
        found: list[Event | Work | tuple[int, int]] = []
        later: dict[int, list[tuple[int, int]]] = {}
        for place, entry in enumerate(self._entries):
            recorded = kernels.get(entry, entry.work) if isinstance(entry, Operation) else entry
            if isinstance(recorded, tuple) and recorded[1] < 0 and until.get(recorded[0], 0) > place:
                later.setdefault(until[recorded[0]], []).append(recorded)
            elif recorded is not None and not (isinstance(recorded, tuple) and recorded[0] in sources):
                found.append(recorded)
            found += later.get(place, ())
        return found


def _span(event: Event, entries: Sequence[Work | tuple[int, int]], kept: set[int]) -> Span:
    now, peak = [0, 0], (0, 0)
    work: list[Work] = []
    for entry in entries:
        if isinstance(entry, Work):
            work.append(entry)
            continue
        storage, change = entry
        now[storage not in kept] += change
        if sum(now) > sum(peak):
            peak = (now[0], now[1])
    return Span(event, now[0], now[1], *peak, tuple(work))
