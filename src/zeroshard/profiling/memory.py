"""Bytes of a rank by what they are for: exactly, from who holds them; at their peak, from every operation's tensors.

Three ways to look, from cheap to thorough:

* `held_bytes` adds up what an engine says that it holds (`zeroshard.zero.buffers.holdings`). Each storage counts once.
* `reconciled` lays that beside what CUDA's caching allocator says: what nobody claims is activations and temporaries
  inside a step, and workspaces (cuBLAS) between steps.
* `AllocationRecorder` sees every operation of a thread, follows each storage that one reads or writes until it is gone,
  and keeps the moment at which most bytes were alive. It makes Python visit every operation, so it is there for one
  step when somebody asks, on any device. What an operation takes and gives back inside one kernel, it cannot see.

[Note: Activations and temporaries]
    What nobody claims is an *activation* if a forward made it and it outlived that forward: autograd holds it for
    backward. All else is a *temporary*: an operation's output that is used at once, a gradient of an activation, what
    backward recomputes.

Bytes are those of storages as they were asked for; CUDA's allocator hands out multiples of 512.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STATE = ("params", "grads", "master", "optimizer", "ema")  # between steps
IN_A_STEP = ("unit_buffers", "prefetch", "activations", "temporaries")
COMM_BUFFERS = "comm_buffers"  # what communicators keep for themselves
OTHERS = "others"  # what was there before and belongs to nobody: a model's buffers, a batch
CATEGORIES = (*STATE, *IN_A_STEP, COMM_BUFFERS, OTHERS)

POINTS = ("initialised", "before_step", "after_step")

Holdings = Callable[[], Iterable[tuple[str, str, Tensor]]]  # category, unit, tensor; as `Zero.holdings`
Bytes = dict[str, int]  # by category


def held_bytes(holdings: Iterable[tuple[str, str, Tensor]]) -> Bytes:
    """Bytes by category; a storage that several tensors share counts once, as the first one's."""
    total: defaultdict[str, int] = defaultdict(int)
    for category, storage in _storages(holdings).values():
        total[category] += storage.nbytes()
    return {category: num_bytes for category, num_bytes in total.items() if num_bytes}


def in_order(num_bytes: Mapping[str, int]) -> Bytes:
    """The same in the order of `CATEGORIES`, without those that are empty; unknown ones come last."""
    known = [category for category in CATEGORIES if num_bytes.get(category)]
    return {category: num_bytes[category] for category in [*known, *(set(num_bytes) - set(CATEGORIES))]}


@dataclass(frozen=True)
class Reconciled:
    """What a rank's categories come to, beside what CUDA's allocator counts; in bytes.

    Attributes:
        held: by category.
        requested: what tensors asked for and still hold.
        allocated: the blocks that they were given.
        reserved: what the allocator has taken from the device.
    """

    held: Mapping[str, int]
    requested: int
    allocated: int
    reserved: int

    @property
    def unclaimed(self) -> int:
        """Requested, and in no category."""
        return self.requested - sum(self.held.values())

    @property
    def rounding(self) -> int:
        """Given beyond what was asked for."""
        return self.allocated - self.requested

    @property
    def cached(self) -> int:
        """Reserved, and in no tensor."""
        return self.reserved - self.allocated


def reconciled(held: Mapping[str, int], stats: Mapping[str, int] | None = None) -> Reconciled:
    """``held`` beside the allocator's numbers for the current device.

    Args:
        held: by category, on that device.
        stats: as `torch.cuda.memory_stats` gives them; None: now.
    """
    stats = torch.cuda.memory_stats() if stats is None else stats
    requested, allocated, reserved = (
        int(stats.get(f"{kind}_bytes.all.current", 0)) for kind in ("requested", "allocated", "reserved")
    )
    return Reconciled(dict(held), requested, allocated, reserved)


class ThreePoints:
    """Bytes at the three points that users compare: after initialisation, before the first update and after it.

    Before the first update gradients are there and, with most optimizers, no state; after it everything is.

    Args:
        optimizer: whose first update is meant.
        account: bytes by category, now.

    Attributes:
        bytes: by point and category.
    """

    def __init__(self, optimizer: Optimizer, account: Callable[[], Mapping[str, int]]) -> None:
        self.bytes: dict[str, Bytes] = {}
        self._account = account
        self._before = optimizer.register_step_pre_hook(lambda *_: self._see("before_step"))
        optimizer.register_step_post_hook(lambda *_: self._see("after_step"))
        self._see("initialised")

    def _see(self, point: str) -> None:
        if "after_step" in self.bytes:  # torch takes no hook that removes itself, unless it is the last one
            return
        self.bytes[point] = dict(self._account())
        if point == "after_step":
            self._before.remove()


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes were alive.

    Attributes:
        num_bytes: all together, without what communicators keep for themselves.
        by_category: the same, in the order of `CATEGORIES`.
        phase: ``"forward"``, ``"backward"`` or ``"update"``.
        operation: after which it was seen.
    """

    num_bytes: int
    by_category: Bytes
    phase: str
    operation: str


class _Seen:
    """A storage that an operation touched."""

    __slots__ = ("activation", "num_bytes", "phase", "ref")

    def __init__(self, ref: weakref.ref[UntypedStorage], num_bytes: int, phase: str) -> None:
        self.ref, self.num_bytes, self.phase = ref, num_bytes, phase
        self.activation = False


class AllocationRecorder(TorchDispatchMode):
    """Inside ``with recorder:`` every operation of this thread is seen; see the module's docstring.

    Args:
        holdings: who claims which storage, now. What it claims at the beginning counts from then on, and may change
            its size without an operation, as an engine's buffers do.
        without_values: whether tensors on the meta device count like others; else they are shapes, and no memory.

    Attributes:
        live_bytes: of all storages that were seen and are not gone.
    """

    def __init__(self, holdings: Holdings = tuple, *, without_values: bool = False) -> None:
        super().__init__()
        self._without_values = without_values
        self.live_bytes = self._highest = 0
        self._holdings = holdings
        self._seen: dict[int, _Seen] = {}
        self._ignored: dict[int, UntypedStorage] = {}
        self._phase = "forward"
        self._peak: tuple[int, Bytes, list[_Seen], str, str] = (0, {}, [], "", "")
        self._rising = ""  # the operation after which the most bytes so far were alive, until any of them go
        self._claimed: dict[int, str] = {}  # category by storage, when it was last asked for
        self._handles: list[Any] = []
        claimed = _storages(holdings())
        for _, storage in claimed.values():
            self._see(storage, OTHERS)
        # An engine frees and takes storages of these without an operation.
        self._resized = [storage for category, storage in claimed.values() if category != "optimizer"]

    def follow(self, model: nn.Module, optimizer: Optimizer) -> Self:
        """Know the phase by the events of these two; until `remove`."""
        self._handles += [
            model.register_forward_pre_hook(lambda *_: self._enter("forward"), prepend=True),
            model.register_forward_hook(lambda *_: self._enter("backward")),
            optimizer.register_step_pre_hook(lambda *_: self._enter("update")),
        ]
        return self

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Count none of these, which were there before and stay."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._ignored[storage._cdata] = storage

    def remove(self) -> None:
        """Let go of what `follow` was given."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def peak(self) -> Peak:
        """The largest moment so far."""
        self._remember()
        num_bytes, held, unclaimed, phase, operation = self._peak
        total: defaultdict[str, int] = defaultdict(int, held)
        for seen in unclaimed:
            kind = OTHERS if seen.phase == OTHERS else "activations" if seen.activation else "temporaries"
            total[kind] += seen.num_bytes
        return Peak(num_bytes, in_order(total), phase, operation)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and see its tensors."""
        kwargs = kwargs or {}
        for tensor in self._tensors((args, kwargs)):
            self._see(tensor.untyped_storage(), OTHERS)  # not made by an operation that was seen: there before
        result = func(*args, **kwargs)
        for tensor in self._tensors(result):
            self._see(tensor.untyped_storage(), self._phase)
        for storage in self._resized:
            self._resize(storage)
        if self.live_bytes > self._highest:
            self._highest, self._rising = self.live_bytes, str(func)
        return result

    def _tensors(self, value: Any) -> list[Tensor]:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return tensors if self._without_values else [tensor for tensor in tensors if not tensor.is_meta]

    def _see(self, storage: UntypedStorage, phase: str) -> None:
        key = storage._cdata
        if key in self._ignored:
            return
        if key in self._seen:
            self._resize(storage)
            return

        def gone(_: object, key: int = key) -> None:
            self._remember()
            self.live_bytes -= self._seen.pop(key).num_bytes
            self._claimed.pop(key, None)  # the next storage may have its place, and another holder

        seen = self._seen[key] = _Seen(weakref.ref(storage, gone), storage.nbytes(), phase)
        self.live_bytes += seen.num_bytes

    def _resize(self, storage: UntypedStorage) -> None:
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.num_bytes != (num_bytes := storage.nbytes()):
            if num_bytes < seen.num_bytes:
                self._remember()
            self.live_bytes += num_bytes - seen.num_bytes
            seen.num_bytes = num_bytes

    def _remember(self) -> None:
        """Who holds what, while the most bytes so far are still alive.

        Not at each operation that adds to them: an update that makes thousands of states would ask thousands of times
        about thousands of storages.
        """
        if not self._rising:
            return
        operation, self._rising = self._rising, ""
        # A storage that is just going has no holder any more: it counts as what it was.
        claimed = self._claimed | {key: category for key, (category, _) in _storages(self._holdings()).items()}
        self._claimed = {key: category for key, category in claimed.items() if key in self._seen}
        held: defaultdict[str, int] = defaultdict(int)
        unclaimed = []
        for key, seen in list(self._seen.items()):
            if key in self._claimed:
                held[self._claimed[key]] += seen.num_bytes
            else:
                unclaimed.append(seen)
        self._peak = (self._highest, dict(held), unclaimed, self._phase, operation)

    def _enter(self, phase: str) -> None:
        self._remember()
        if self._phase == "forward" and phase != "forward":  # [Note: Activations and temporaries]
            for seen in self._seen.values():
                seen.activation |= seen.phase == "forward"
        self._phase = phase


def _storages(holdings: Iterable[tuple[str, str, Tensor]]) -> dict[int, tuple[str, UntypedStorage]]:
    """Category and storage by the storage's identity."""
    found: dict[int, tuple[str, UntypedStorage]] = {}
    for category, _, tensor in holdings:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (category, storage))
    return found
