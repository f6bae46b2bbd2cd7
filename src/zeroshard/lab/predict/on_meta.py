"""Runs models on the meta device with the CPU's operations: as torch's fake tensors do, in half the time.

`FakeTensorMode` checks much that our models, and some of `transformers`, never do. Only two things in them depend on
the device: the attention kernel, and the dtype in which LayerNorm keeps its statistics. On the meta device torch
chooses an attention that keeps all attention weights, while a CPU and a GPU use fused kernels. So we call the CPU's
fused kernel explicitly, and everything else runs unchanged. `FakeTensorMode` stays the specification of a trace, and
tests compare the two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeroshard.models import LanguageModel
from zeroshard.zero import MixedPrecision
from zeroshard.zero.kept_modules import cast_around, kept_params
from zeroshard.zero.unit_choice import UnitChoice, choose_units, partition_of


class NotServedError(Exception):
    """A trace on the meta device would not be that of fake tensors."""


def serves(model: LanguageModel, precision: MixedPrecision, device_type: str) -> bool:
    """Whether tracing ``model`` on the meta device gives the same trace as with fake tensors.

    A model that says so (``traces_on_meta``) qualifies; others may depend on the device in more ways. It does unless it
    masks documents, uses dropout, keeps modules in fp32, or uses torch's own LayerNorm in a 16-bit dtype: the CPU's
    kernel keeps its statistics in that dtype, and the meta device's in fp32.
    """
    if not model.traces_on_meta:
        return False
    if model.eos_id is not None or precision.keep_in_fp32_modules or any(map(_drops, model.modules())):
        return False
    own_kernels = device_type == "cuda" and model.kernels != "reference"
    return own_kernels or precision.param_dtype is None or "layer_norm" not in model.operations


@contextmanager
def on_meta() -> Generator[None]:
    """Create tensors on the meta device in this block, and compute attention with the CPU's fused kernel."""
    with torch.device("meta"), _FusedAttention():
        yield


def without_values_of(
    model: nn.Module, units: UnitChoice | None, precision: MixedPrecision, *, copied: bool
) -> tuple[nn.Module, list[nn.Module] | None]:
    """A copy of ``model`` without values, in the compute dtypes, and its copies of ``units``.

    Unless it is ``copied``, a model without values is changed to these dtypes itself.
    """
    places = {module: name for name, module in model.named_modules()}
    chosen = None if units is None else choose_units(model, units)
    for module in chosen or []:
        if module not in places:
            partition_of(model, chosen)  # raises an error that says what is wrong with it
    memo: dict[int, Any] = {}
    kept = kept_params(model, precision)
    # fake tensors are of another kind, and buffers that have values are copied to what has none
    as_it_is = not copied and torch.empty(0).is_meta and all(buffer.is_meta for buffer in model.buffers())
    for param in model.parameters():
        dtype = param.dtype if param in kept else precision.compute_dtype(param.dtype)
        if as_it_is:
            param.data = param.data.to(dtype)
            continue
        memo[id(param)] = nn.Parameter(torch.empty(param.shape, dtype=dtype), requires_grad=param.requires_grad)
    if as_it_is:
        cast_around(model, precision)
        return model, chosen
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    fake = copy.deepcopy(model, memo)
    cast_around(fake, precision)
    modules = dict(fake.named_modules())
    return fake, None if chosen is None else [modules[places[module]] for module in chosen]


def in_recomputations(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Have blocks that run again in backward compute as in `on_meta`, in place: `Tensor.backward` leaves such modes."""
    for module in _outermost(model, set(blocks)):
        module.forward = partial(_on_meta, module.forward)


def _on_meta(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with on_meta():
        return forward(*args, **kwargs)


def _outermost(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost modules that neither are nor contain a block: inside of blocks and outside of them."""
    for child in module.children():
        if child in blocks or not blocks.isdisjoint(child.modules()):
            yield from _outermost(child, blocks)
        else:
            yield child


def fuse_dropout(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Make attention with dropout keep what a GPU's fused kernels keep, in place: no attention scores.

    ``blocks``: those that the model names itself; nothing is changed in a model that names none.

    The CPU has no fused kernel with dropout, and torch would compute all scores there. So attention runs without
    dropout, and the time that dropout adds to a GPU's kernel is not counted.
    """
    named = set(blocks)
    if named and any(_drops(module) for module in model.modules()):
        for module in _outermost(model, named):
            module.forward = partial(_fused, module.forward)


def _drops(module: nn.Module) -> bool:
    names = ("dropout", "attention_dropout", "attn_pdrop")
    rates = [module.p] if isinstance(module, nn.Dropout) else [getattr(module, name, 0.0) for name in names]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _fused(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _NoDropout():
        return forward(*args, **kwargs)


class _NoDropout(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


class _FusedAttention(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by the kernel that a CPU would choose.

    Raises:
        NotServedError: it depends on more than shapes.
    """
    alike = enable_gqa or query.shape[1] == key.shape[1]
    alike = alike and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if attn_mask is not None or dropout_p or not alike:
        raise NotServedError
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, scale=scale)[0]
