"""Models of `transformers` over ranks that share sequences: through its attention interface, without other changes.

Its models call the attention function that their configuration names, and make their masks by the mask function of that
name. Ours are registered as ``zeroshard_sdpa`` and ``zeroshard_eager``: the mask is one of whole sequences, and the
function exchanges tokens for heads around the one that it is named after (`SequenceParallel.around`). Positions are
those that tokens have in their sequence. A model that mixes tokens elsewhere than in attention is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache as cached
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.host.errors import UserError, shown
from zeroshard.host.torch_internals import storage_id
from zeroshard.models.compared_rows import ComparedRows
from zeroshard.models.hugging_face.row_positions import (
    by_name,
    count_earlier_tokens,
    frequencies_kept,
    give_largest_position,
    positions_in_rows,
    rotary_embeddings,
    takes,
)
from zeroshard.models.quiet_import import quiet_import
from zeroshard.models.ulysses import SequenceParallel, cannot_share

KERNELS = ("sdpa", "eager")  # of `transformers`, which see no ranks
PREFIX = "zeroshard_"
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})  # kinds of layers
_SAFE = frozenset({"position_ids", "cache_position"})  # tensors that attention is given and does not compute with


class _Forward:
    """A forward in progress: its ranks, and whole rows of the positions that it has asked for.

    Attributes:
        module: the module that was called first, a model or its base model.
        sequence: the ranks.
        is_one_document: whether no positions were given, so that rows are not searched for documents.
        outer: the forward inside of which this one runs.
    """

    def __init__(self, module: nn.Module, sequence: SequenceParallel, *, is_one_document: bool) -> None:
        self.module, self.sequence, self.is_one_document = module, sequence, is_one_document
        self.outer = _forward.get()
        self._whole: list[tuple[Tensor, Tensor]] = []

    def whole(self, part_Bt: Tensor) -> Tensor:
        """Whole rows [B, T]; the ranks are asked once for each tensor."""
        for known, found in self._whole:
            # views of one tensor, since `transformers` expands positions anew for each mask
            if _place(known) == _place(part_Bt):
                return found
        found = self.sequence.gather(part_Bt)
        self._whole.append((part_Bt, found))
        return found


def _place(tensor: Tensor) -> tuple[object, ...]:
    return storage_id(tensor), tensor.storage_offset(), tensor.shape


_forward: ContextVar[_Forward | None] = ContextVar("zeroshard_forward", default=None)


def share_sequences(model: nn.Module, sequence: SequenceParallel) -> None:
    """Share each sequence of ``model`` among ranks: from now on its forward takes this rank's part of each row.

    Cut tokens, targets and positions alike, by `SequenceParallel.cut`. Positions that are not given are those in the
    whole sequence. The logits are those of the part.

    Args:
        model: one of ours, or a causal language model of `transformers`, with adapters of `peft` or without.

    Raises:
        UserError: the ranks do not divide its heads, or it mixes tokens elsewhere than in its attention.
        TypeError: it is a model of another kind; call `SequenceParallel.around` in its attention.
    """
    own: Callable[[SequenceParallel], None] | None = getattr(model, "share_sequences", None)
    if own is not None:
        own(sequence)
        return
    of_adapters: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    inner = model if of_adapters is None else of_adapters()
    if not hasattr(getattr(inner, "config", None), "_attn_implementation"):
        what = f"sequences of a {type(model).__name__} cannot be shared here"
        raise TypeError(f"{what}: it is no model of transformers; call sequence.around in its attention")
    share(inner, sequence)


def share(hf: nn.Module, sequence: SequenceParallel) -> None:
    """Have the attention of ``hf``, a model of `transformers`, see the sequences that ``sequence``'s ranks share.

    Raises:
        UserError: its attention cannot be divided among ranks, or is not all that mixes tokens.
    """
    model: Any = hf
    how = model.config._attn_implementation
    _require_attention(model, how.removeprefix(PREFIX))
    sequence.require_heads(model.config.get_text_config().num_attention_heads)
    _register()
    if not how.startswith(PREFIX):
        for module in hf.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
                module.config._attn_implementation_internal = PREFIX + how  # ty: ignore[invalid-assignment]
        hf.register_forward_pre_hook(_require_shifted, with_kwargs=True)
        # OPT and others call a module inside of their base model, and a loss of ours calls the base model alone
        for module in (hf, model.base_model) if takes(hf, "position_ids") else (model.base_model,):
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)
        for rotary in rotary_embeddings(hf):
            give_largest_position(rotary)
        count_earlier_tokens(hf)
    for module in hf.modules():
        vars(module)["_shared_sequence"] = sequence
    base = model.base_model
    rows = ComparedRows(hf, sequence, partial(_row, base), model.config.get_text_config().vocab_size)
    vars(hf)["_compared_rows"] = vars(base)["_compared_rows"] = rows


def _require_attention(model: Any, how: str) -> None:
    kind = type(model).__name__
    if how not in KERNELS:
        what = f"{how} is not divided among ranks that share sequences (sequence_parallel)"
        raise UserError("model.attention", what, f"choose {' or '.join(KERNELS)}")
    others = sorted(set(getattr(model.config, "layer_types", None) or ()) - _ATTENTION)
    modelling = sys.modules[type(model).__module__]
    why = ""
    if getattr(model.config, "output_router_logits", False):
        what = f"the loss of a {kind} balances experts over all tokens of a batch"
        raise cannot_share(what, "set output_router_logits to false in its config.json")
    if others:
        why = f"a {kind} has layers of {', '.join(map(shown, others))}, which see other tokens too"
    elif not type(model)._supports_attention_backend or not hasattr(modelling, "create_causal_mask"):
        why = f"a {kind} has an attention of its own"
    elif "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        why = f"a {kind} takes no positions"
    if why:
        raise cannot_share(why)


def _require_shifted(hf: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse labels that `transformers` would shift inside of a part: its last token's is in the next part."""
    if named.get("labels") is not None and named.get("shift_labels") is None:
        sequence: SequenceParallel = hf._shared_sequence  # ty: ignore[invalid-assignment]
        if not sequence.is_paused:
            what = "labels would be shifted inside of a rank's part of the sequence"
            raise UserError("labels", what, "shift them before you cut, and compute the loss of the logits yourself")


def _enter(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a forward of the model, or of its base model."""
    running = _forward.get()
    if running is not None and module is getattr(running.module, "base_model", None) is not running.module:
        return args, named
    return (), _begun(module, by_name(module, args, named))


def _begun(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Tell masks of the ranks, and give tokens the positions that they have in whole sequences."""
    sequence: SequenceParallel = module._shared_sequence
    has_positions = given.get("position_ids") is not None
    if not sequence.is_paused:
        if any(given.get(each) is not None for each in ("past_key_values", "cache")) or given.get("use_cache"):
            what = "a rank's part of a sequence has no cache"
            raise cannot_share(what, "generate inside of `with sequence.paused()`")
        ids = given.get("input_ids")
        module._compared_rows.before(given["inputs_embeds"] if ids is None else ids)
        if not has_positions:
            given["position_ids"] = positions_in_rows(module, given, sequence)
    _forward.set(_Forward(module, sequence, is_one_document=not has_positions))
    return given


def _leave(module: Any, args: Any, output: Any) -> None:
    running = _forward.get()
    if running is not None and running.module is module:
        _forward.set(running.outer)
        module._compared_rows.after()


def _row(base: Any, tokens: Tensor, positions: Tensor | None, wants_output: bool) -> Tensor | None:
    """Compute a row for a comparison: [Note: Inside of a forward] in `zeroshard.models.compared_rows`."""
    given = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    given = _begun(base, {name: each for name, each in given.items() if takes(base, name)})
    running = _forward.get()
    assert running is not None
    try:
        with frequencies_kept(base):
            output = base.forward(**given)
    finally:
        _forward.set(running.outer)
    return output[0] if wants_output else None


def _running() -> _Forward | None:
    """The forward that runs, if it is one of parts of rows."""
    forward = _forward.get()
    return None if forward is None or forward.sequence.is_paused else forward


@cached
def _register() -> None:
    """Register attention and mask functions, and have the mask's own functions see positions of whole rows."""
    masking: Any = quiet_import("transformers.masking_utils")
    modelling: Any = quiet_import("transformers.modeling_utils")
    for how in KERNELS:
        modelling.AttentionInterface.register(PREFIX + how, partial(_attention, how))
        masking.AttentionMaskInterface.register(PREFIX + how, partial(_mask, masking.AttentionMaskInterface()[how]))
    mixin: Any = quiet_import("transformers.generation.utils").GenerationMixin
    mixin.generate = _paused_alone(mixin.generate)
    finds = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = partial(_searched, finds)
    if hasattr(masking, "packed_sequence_compatibility_function"):  # of later releases
        fits = masking.packed_sequence_compatibility_function
        masking.packed_sequence_compatibility_function = lambda function, position_ids, packed: fits(
            function, position_ids if (forward := _running()) is None else forward.whole(position_ids), packed
        )


def _paused_alone(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``generate``, refused for models whose forward takes a rank's part: a prompt is a whole sequence."""

    @wraps(generate)
    def refusing(model: Any, *args: Any, **named: Any) -> Any:
        sequence: SequenceParallel | None = getattr(model, "_shared_sequence", None)
        if sequence is not None and not sequence.is_paused:
            what = "generate() takes a prompt, and forward a rank's part of a sequence"
            raise cannot_share(what, "generate inside of `with sequence.paused()`")
        return generate(model, *args, **named)

    return refusing


def _searched(finds: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> Tensor | None:
    """The documents that ``finds`` sees in whole rows of positions; None: rows are one document each."""
    forward = _forward.get()
    if forward is not None and forward.sequence.is_comparing:
        return None
    if forward is None or forward.sequence.is_paused:
        return finds(position_ids)
    return None if forward.is_one_document else finds(forward.whole(position_ids))


def _mask(function: Callable[..., Any], *, q_length: int, kv_length: int, **named: Any) -> Any:
    """The mask of whole sequences."""
    forward = _running()
    if forward is not None:
        q_length, kv_length = q_length * forward.sequence.size, kv_length * forward.sequence.size
        if named.get("attention_mask") is not None:
            named["attention_mask"] = forward.whole(named["attention_mask"].to(torch.uint8)).bool()
    return function(q_length=q_length, kv_length=kv_length, **named)


class _Grouped:
    """An attention module as its function sees it, with other groups of queries."""

    def __init__(self, module: nn.Module, num_key_value_groups: int) -> None:
        self._module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attention(
    how: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """The function ``how`` of `transformers` around the exchange; [B, t, H, D], and no weights."""
    modelling: Any = sys.modules["transformers.modeling_utils"]
    own = sys.modules[type(module).__module__]
    function: Any = modelling.ALL_ATTENTION_FUNCTIONS[how] if how != "eager" else own.eager_attention_forward
    sequence: SequenceParallel = module._shared_sequence
    if sequence.is_paused:
        found = function(module, query, key, value, attention_mask, **named)
        sequence.record(query, key, value, found[0])
        return found
    others = [name for name, each in named.items() if isinstance(each, Tensor) and name not in _SAFE]
    if others:
        what = f"the attention of a {type(module).__name__} computes with {', '.join(others)} of all heads"
        raise cannot_share(what)
    copies = sequence.copies(key.shape[1])
    grouped = module if copies == 1 else _Grouped(module, module.num_key_value_groups // copies)

    def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(grouped, query, key, value, attention_mask, **named)[0]

    return sequence.around(whole, query, key, value), None
