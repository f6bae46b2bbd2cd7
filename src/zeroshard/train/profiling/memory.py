"""The peak of a step's memory by category: training state, activations and temporaries.

`AllocationRecorder` sees every operation of a thread, tracks each storage that one reads or writes until it is freed,
and records the peak. It runs Python code for every operation, so it is meant for a single step, on request; it works on
any device. It cannot see memory that an operation allocates and frees inside one kernel.

[Note: Activations and temporaries]
    Bytes that the engine does not claim are an *activation* if a forward made them and they outlived that forward:
    autograd keeps them for backward. All others are *temporaries*: an operation's output that is used at once, a
    gradient of an activation, an activation that backward recomputes.

Bytes are those that were requested for each storage; CUDA's allocator rounds them up to multiples of 512.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

STATE = ("params", "grads", "master", "optimizer", "ema")  # also resident between steps
IN_A_STEP = ("unit_buffers", "prefetch", "activations", "temporaries")
COMM_BUFFERS = "comm_buffers"  # the communicators' own buffers
OTHERS = "others"  # tensors that existed before and that nobody claims: a model's buffers, a batch
CATEGORIES = (*STATE, *IN_A_STEP, COMM_BUFFERS, OTHERS)

Holdings = Callable[[], Iterable[tuple[str, str, Tensor]]]  # yields category, unit, tensor; as `Zero.holdings`
Bytes = dict[str, int]  # by category
_CONTAINERS = (list, tuple, dict)


def in_order(num_bytes: Mapping[str, int]) -> Bytes:
    """Sort bytes by category into the order of `CATEGORIES`, without empty known ones; unknown ones come last."""
    known = [category for category in CATEGORIES if num_bytes.get(category)]
    return {category: num_bytes[category] for category in [*known, *(set(num_bytes) - set(CATEGORIES))]}


@dataclass(frozen=True)
class Peak:
    """The peak: the moment at which most bytes were alive."""

    num_bytes: int  # bytes of all categories, without the communicators' own buffers
    by_category: Bytes  # the same bytes by category, in the order of `CATEGORIES`
    phase: str  # ``"forward"``, ``"backward"`` or ``"update"``
    operation: str  # the operation after which the peak was seen


class _Seen:
    """A storage that an operation touched."""

    __slots__ = ("activation", "num_bytes", "phase", "ref")

    def __init__(self, ref: weakref.ref[UntypedStorage], num_bytes: int, phase: str) -> None:
        self.ref, self.num_bytes, self.phase = ref, num_bytes, phase
        self.activation = False


class AllocationRecorder(TorchDispatchMode):
    """Tracks memory through every operation of this thread, inside ``with recorder:``; see the module's docstring.

    Args:
        holdings: returns the engine's current tensors with their categories. Those that it returns at construction
            count from the beginning, and may be resized outside of any operation, as an engine's buffers are.
        mapped: whether tensors count that show other memory than torch's: with states in a file, theirs show the file.

    Attributes:
        live_bytes: bytes of all storages that were seen and are not freed.
    """

    def __init__(self, holdings: Holdings = tuple, *, mapped: bool = True) -> None:
        super().__init__()
        self._mapped = mapped
        self.live_bytes = self._highest = 0
        self._holdings = holdings
        self._seen: dict[int, _Seen] = {}
        self._ignored: dict[int, UntypedStorage] = {}
        self._phase = "forward"
        self._peak: tuple[int, Bytes, list[_Seen], str, str] = (0, {}, [], "", "")
        self._rising = ""  # operation that reached a new peak, until `_remember` has recorded it; else empty
        self._claimed: dict[int, str] = {}  # category by storage, as of the last `_remember`
        self._handles: list[Any] = []
        claimed = _storages(holdings())
        for _, storage in claimed.values():
            self._see(storage, OTHERS)
        # An engine resizes these storages (to 0 and back) outside of any operation.
        self._resized = [storage for category, storage in claimed.values() if category != "optimizer"]
        self._sizes = list(map(UntypedStorage.nbytes, self._resized))

    def follow(self, model: nn.Module, optimizer: Optimizer) -> Self:
        """Track the current phase by hooks on ``model`` and ``optimizer``, until `remove`."""
        self._handles += [
            model.register_forward_pre_hook(lambda *_: self._enter("forward"), prepend=True),
            model.register_forward_hook(lambda *_: self._enter("backward")),
            optimizer.register_step_pre_hook(lambda *_: self._enter("update")),
        ]
        return self

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors, which existed before and stay alive."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._ignored[storage._cdata] = storage

    def remove(self) -> None:
        """Remove the hooks that `follow` has registered."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def peak(self) -> Peak:
        """The peak so far."""
        self._remember()
        num_bytes, held, unclaimed, phase, operation = self._peak
        total: defaultdict[str, int] = defaultdict(int, held)
        for seen in unclaimed:
            kind = OTHERS if seen.phase == OTHERS else "activations" if seen.activation else "temporaries"
            total[kind] += seen.num_bytes
        return Peak(num_bytes, in_order(total), phase, operation)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler (1 s) only to disable it in `__torch_dispatch__`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and track its tensors."""
        kwargs = kwargs or {}
        self._track(args, OTHERS)  # what is new to us existed before we began to record
        self._track(kwargs, OTHERS)
        result = func(*args, **kwargs)
        self._track(result, self._phase)
        sizes = list(map(UntypedStorage.nbytes, self._resized))
        if sizes != self._sizes:
            self._sizes = sizes
            for storage in self._resized:
                self._resize(storage)
        if self.live_bytes > self._highest:
            self._highest, self._rising = self.live_bytes, str(func)
        return result

    def _track(self, value: Any, phase: str) -> None:
        """Track the storages in what an operation takes or returns: tensors, and containers of them."""
        if isinstance(value, Tensor):
            if not value.is_meta:
                storage = value.untyped_storage()
                seen = self._seen.get(storage._cdata)
                if seen is None or seen.num_bytes != storage.nbytes():  # of ten tensors nine are known
                    self._see(storage, phase)
        elif isinstance(value, _CONTAINERS):
            for each in value.values() if isinstance(value, dict) else value:
                self._track(each, phase)

    def _see(self, storage: UntypedStorage, phase: str) -> None:
        key = storage._cdata
        if key in self._ignored or not (self._mapped or storage.resizable()):
            return
        if key in self._seen:
            self._resize(storage)
            return

        def gone(_: object, key: int = key) -> None:
            self._remember()
            self.live_bytes -= self._seen.pop(key).num_bytes
            self._claimed.pop(key, None)  # a later storage may get the same key, and another category

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
        """Record the categories at the peak so far, while its storages are still alive: just before any is freed.

        It is not done after each operation that raises the peak, because an optimizer step that makes thousands of
        states would then look up the categories of thousands of storages thousands of times.
        """
        if not self._rising:
            return
        operation, self._rising = self._rising, ""
        # Nobody claims a storage any more that is being freed: it keeps its last category.
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
    """Return category and storage of each holding, by the storage's identity."""
    found: dict[int, tuple[str, UntypedStorage]] = {}
    for category, _, tensor in holdings:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (category, storage))
    return found
