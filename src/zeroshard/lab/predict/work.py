"""The cost of an operation: its FLOPs and the bytes that it reads and writes, computed from shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from zeroshard.kernels.linear_cross_entropy import VOCAB_MULTIPLE
from zeroshard.lab.predict.recorder import Alike
from zeroshard.train.profiling.devices import FP8, Layout


@dataclass(frozen=True)
class Work:
    """One operation: its FLOPs, the bytes that it reads and writes, and the dtype that it computes in."""

    flops: int
    num_bytes: int
    dtype: str
    attention: bool = False  # whether it is a fused attention kernel
    # ``(batch, m, n, k)`` of a matrix product that sums over k; ``(batch x heads, queries, keys, head width)`` of fused
    # attention; empty for all other operations
    shape: tuple[int, ...] = ()
    backward: bool = False  # whether it is the backward of a fused attention kernel
    # bytes that a GPU would move in the time by which the operation is slower than its ``num_bytes``: see `_lost_bytes`
    lost_bytes: int = 0
    layout: Layout | None = None  # of a matrix product's factors
    # elements of a tanh GELU or of its derivative, which on a CPU can take longer than its memory traffic
    num_gelus: int = 0
    # parameters whose gradients are handed to the engine in Python. Such a `Work` is not an operation; on a CPU it
    # takes `Device.hook_s` per parameter.
    num_hooks: int = 0
    # the conversion to or from a wire format, as ``int8 quantise``; empty for all other operations. See
    # `zeroshard.lab.predict.conversions`.
    conversion: str = ""
    # numel, num_calls: elements of a conversion, and the number of calls that convert them
    numel: int = 0
    num_calls: int = 1


_aten: Any = torch.ops.aten
_FREE = {_aten.detach.default, _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}
_COPIES = {_aten.clone, _aten.copy_, _aten._to_copy}
_SOFTMAXES = {_aten._log_softmax, _aten._log_softmax_backward_data, _aten._softmax, _aten._softmax_backward_data}
_GELUS = {_aten.gelu, _aten.gelu_backward}


def work_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, alike: Alike | None = None
) -> Work | None:
    """The cost of an operator call; None for one that only makes a view or allocates memory.

    ``alike``: the calls that cost the same, for which it is computed once.
    """
    if alike is None:
        return _work_of(func, args, kwargs, result)
    if alike.work is ...:
        alike.work = _work_of(func, args, kwargs, result)
    return alike.work


def _work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work | None:
    if func in _FREE or func.is_view:
        return None
    packet = func._overloadpacket
    outputs = list(tensors_of((result,)))
    inputs = list(tensors_of((*args, *kwargs.values())))
    mutable = func._schema.is_mutable
    if not outputs and mutable:  # an in-place operator over a list returns nothing
        outputs = list(tensors_of(args[:1]))
    if not outputs:
        return None
    given = {leaf.untyped_storage()._cdata for leaf in inputs}
    if not mutable and given and all(leaf.untyped_storage()._cdata in given for leaf in outputs):
        return None
    attention = "attention" in str(packet)
    flops, shape, layout, backward = 0, (), None, "backward" in str(packet)
    if attention:
        flops = _attention_flops(func, args, backward=backward)
        query, key = (args[1], args[2]) if backward else (args[0], args[1])
        shape = (query.shape[0] * query.shape[1], query.shape[-2], key.shape[-2], query.shape[-1])
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        shape, layout = _product_shape(func, args), _layout(func, args)
    num_bytes = sum(bytes_read(leaf) for leaf in (*inputs, *outputs))
    dtype = dtype_name(outputs[0].dtype)
    num_gelus = outputs[0].numel() if packet in _GELUS and kwargs.get("approximate") == "tanh" else 0
    lost_bytes = _lost_bytes(packet, inputs, outputs, num_bytes)
    return Work(flops, num_bytes, dtype, attention, shape, attention and backward, lost_bytes, layout, num_gelus)


# Of the rate of elementwise operations. In a traced step of GPT-2 124M on an H100, which wrote 2.88 TB/s: concatenation
# 1.03 TB/s, copies to another layout 1.38, sums over rows (biases' gradients) 1.40.
STRIDED_SHARE = 0.45
ROW_IN_REGISTERS = 1024  # elements of a softmax's row up to which torch's kernels read it once


def _lost_bytes(packet: Any, inputs: list[Tensor], outputs: list[Tensor], num_bytes: int) -> int:
    """Bytes moved in the time by which a GPU's kernel is slower than its bytes alone.

    An operation that does not move bytes in memory's order reaches `STRIDED_SHARE` of the rate. A softmax reads long
    rows twice, forward for their sum and then for its output, and backward likewise: a plain cross-entropy of 8192 x
    131,072 logits in 16 bits takes an H100 18.1 ms, and so planned 18.3.
    """
    if packet in _SOFTMAXES:
        return sum(map(bytes_read, inputs)) if outputs[0].shape[-1] > ROW_IN_REGISTERS else 0
    if not inputs:
        return 0
    source, result = inputs[-1] if packet is _aten.copy_ else inputs[0], outputs[0]
    if packet is _aten.sum:
        strided = source.dim() > 1 and result.numel() == source.shape[-1]
    else:
        copies = packet in _COPIES and bytes_read(source) == bytes_read(result)
        strided = packet is _aten.cat or (copies and source.stride() != result.stride())
    return round(num_bytes * (1 / STRIDED_SHARE - 1)) if strided else 0


_LAYOUTS: dict[str, Layout] = {layout: layout for layout in get_args(Layout)}
_FIRST_FACTOR = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}  # which argument is the first factor


def _product_shape(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """``(batch, m, n, k)`` of a matrix product; empty for another operation."""
    first = _FIRST_FACTOR.get(func._overloadpacket)
    if first is None:
        return ()
    left, right = args[first], args[first + 1]
    batch = left.shape[0] if left.dim() == 3 else 1
    return (batch, left.shape[-2], right.shape[-1], left.shape[-1])


def _layout(func: Any, args: tuple[Any, ...]) -> Layout | None:
    """The layout of a product's factors in memory; None for another operation."""
    first = _FIRST_FACTOR.get(func._overloadpacket)
    if first is None:
        return None
    left, right = ("t" if factor.stride(-2) == 1 < factor.stride(-1) else "n" for factor in args[first : first + 2])
    return _LAYOUTS[left + right]


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in ``values`` and in lists among them. Written out because torch's pytree is much slower."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def work_of_projected_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    *options: Any,
) -> list[Work]:
    """The cost of the kernel `zeroshard.kernels.linear_cross_entropy`, given its launcher's arguments.

    Allocates and frees the kernel's chunk of logits, so that a recorder of storages counts it.
    """
    (rows, width), vocab, at_once = hidden.shape, weight.shape[0], min(options[-1], hidden.shape[0])
    padded_vocab = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    chunk = hidden.new_empty(at_once, padded_vocab)
    wide = None if d_hidden is None else losses.new_empty(at_once, width)
    del chunk, wide
    num_products = 1 + (d_hidden is not None) + (d_weight is not None)
    num_chunks, logit_bytes = -(-rows // at_once), rows * vocab * hidden.element_size()
    product = Work(
        2 * rows * width * vocab,
        logit_bytes + num_chunks * bytes_read(weight) + bytes_read(hidden),
        dtype_name(hidden.dtype),
        shape=(1, at_once, vocab, width),
    )
    return [product] * num_products + [Work(0, 2 * logit_bytes, dtype_name(hidden.dtype))]


def work_of_plain_loss(num_logits: int, itemsize: int) -> Work:
    """What torch's operations on logits of ``itemsize`` bytes move, forward and backward, beyond the fused loss.

    They copy logits to fp32, take their log-softmax, and go back: zeros for its gradient, its derivative, and the copy
    to the logits' dtype. `_lost_bytes` has how often a softmax reads.
    """
    forward, backward = (itemsize + 4) + (2 * 4 + 4), 4 + (2 * 8 + 4) + (4 + itemsize)
    return Work(0, num_logits * (forward + backward - 2 * itemsize), "float32", num_calls=6)


def has_matrix(work: Work, sizes: set[tuple[int, ...]]) -> bool:
    """Whether a product has a matrix of one of these ``sizes``, turned or not, or its gradient."""
    if work.attention or len(work.shape) != 4 or work.shape[0] != 1:
        return False
    _, m, n, k = work.shape
    return any(each in sizes for each in ((n, k), (k, n), (m, n), (n, m)))


def with_factors_in_8_bits(work: Work) -> tuple[Work, Work, int]:
    """What a product costs in 8 bits: the rounding of its factors, itself, and the bytes of the rounded factors.

    A factor is read for its scales and once more to be rounded. It is saved for backward as it was.
    """
    _, m, n, k = work.shape
    numel = (m + n) * k
    rounding = Work(0, (2 * 2 + 1) * numel + 4 * (m + n), work.dtype, num_calls=2)
    return rounding, replace(work, dtype=FP8, num_bytes=work.num_bytes - numel), numel + 4 * (m + n)


def _attention_flops(func: Any, args: tuple[Any, ...], *, backward: bool) -> int:
    """FLOPs of a fused kernel: 4 B H T S D forward, and 2.5 times that backward, which recomputes attention weights.

    Half of it under a causal mask, whose blocks the kernel skips. Dao 2023, FlashAttention-2,
    https://arxiv.org/abs/2307.08691, section 4.1.
    """
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, num_queries, width = query.shape
    flops = 4 * batch * heads * num_queries * key.shape[-2] * width
    causal = any(arg is True for arg in args)
    return int(flops * (2.5 if backward else 1) * (0.5 if causal else 1))


def bytes_read(tensor: Tensor) -> int:
    """Bytes that reading or writing ``tensor`` moves; of an expanded tensor only those of its storage count."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
