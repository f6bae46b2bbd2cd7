"""Activation checkpointing: which blocks drop their activations and run forward again in backward.

| `activation_checkpointing` | kept between forward and backward                                                 |
|----------------------------|-----------------------------------------------------------------------------------|
| `none`                     | every activation                                                                  |
| `full`                     | each block's inputs                                                               |
| `offload`                  | as `full`, on the host but for the last block's: `zeroshard.models.inputs_on_host` |
| `every:N`                  | inputs of one block in N, every activation of the other blocks                    |
| `selective`                | inputs, and outputs of matrix products and attention: only cheap work runs again  |
| `selective:2`              | as `selective`, but every second matrix product only: torchtitan's "selective"    |

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174; selective:
Korthikanti et al. 2022, "Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198.

Checkpointing wraps the block's ``forward``, not its ``__call__``. So hooks on the block (such as a sharding engine's)
run once and are not recomputed, and `torch.compile` may read it.

[Note: Attention that draws]
    A block's second run restores the random generator's state once, at its start. If the output of attention with
    dropout were kept, that run would skip the numbers which attention drew, and all later dropout of the block would
    get other masks than in forward: wrong gradients, without an error. So attention with dropout runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zeroshard.models.config import check_recomputation, inputs_wait_on_host
from zeroshard.models.inputs_on_host import OnHost

_aten: Any = torch.ops.aten
# Operations whose outputs cost more to recompute than to keep. Each kind of device has its own operator for attention.
PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,  # torchao's products in 8 bits, compiled
]
_ATTENTION = [
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
EXPENSIVE = [*PRODUCTS, *_ATTENTION]
_DROPOUT_AT = {op: [each.name for each in op._schema.arguments].index("dropout_p") for op in _ATTENTION}


def recomputed_blocks(how: str, num_blocks: int) -> list[int]:
    """Return the indices of the blocks that run forward again in backward.

    Raises:
        UserError: as `check_recomputation`.
    """
    check_recomputation(how)
    kind, _, number = how.partition(":")
    return [] if kind == "none" else list(range(0, num_blocks, int(number) if kind == "every" else 1))


def recompute_blocks(blocks: Iterable[nn.Module], how: str, *, random: bool) -> None:
    """Make ``blocks`` keep only the activations that ``how`` says, in place.

    Args:
        blocks: modules whose forward takes tensors by position, anything else by keyword, and returns a tensor.
        how: see the table above.
        random: whether a block draws random numbers, so that its second run must restore the generator's state.

    Raises:
        UserError: as `recomputed_blocks`.
    """
    blocks = list(blocks)
    for place in recomputed_blocks(how, len(blocks)):
        block = blocks[place]
        # A partial rather than a closure: deepcopy copies the block that it is bound to as well.
        kept = {"selective": _every_product, "selective:2": _every_second_product}.get(how)
        block.forward = partial(_run, block.forward, kept, random)
        if inputs_wait_on_host(how):
            block.forward = OnHost(block.forward)


def offload_inputs(*blocks: nn.Module) -> None:
    """Recompute these blocks in backward, and keep their inputs on the host until then, in place.

    A block that is recomputed already, by a setting of our models or as those of `transformers` recompute themselves
    after ``gradient_checkpointing_enable()``, runs as before. The input is the first argument of the block's forward, a
    tensor; the block must not write into it.

    Args:
        blocks: modules, in any order, in one call or several.

    Raises:
        TypeError: one of them is no module that is called, such as the list of all blocks.
    """
    for block in blocks:
        if not isinstance(block, nn.Module) or type(block).forward is nn.Module.forward:
            what = f"offload_inputs: a {type(block).__name__} is never called itself"
            raise TypeError(f"{what}; give the blocks, as in offload_inputs(*model.blocks)")
    for block in blocks:
        if not isinstance(block.forward, OnHost):
            run = block.forward if _is_recomputed(block.forward) else partial(_run, block.forward, None, True)
            block.forward = OnHost(run)


def change_forward(block: nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a block's forward by ``change(forward)``, inside of what takes its input to the host."""
    if isinstance(block.forward, OnHost):
        block.forward.run = change(block.forward.run)
    else:
        block.forward = change(block.forward)


def keep_random_state(blocks: Iterable[nn.Module]) -> None:
    """Make recomputed blocks draw the same random numbers in both runs, in place: for dropout that was added later."""
    for block in blocks:
        change_forward(block, _random)


def _random(forward: Callable[..., Any]) -> Callable[..., Any]:
    if _is_recomputed(forward):
        inner, kept, _ = forward.args
        return partial(_run, inner, kept, True)
    return forward


def _is_recomputed(forward: Callable[..., Any]) -> TypeGuard[partial[Any]]:
    """Whether it is a block's forward that `recompute_blocks` has changed."""
    return isinstance(forward, partial) and forward.func is _run


def _is_kept(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether to keep the output of an operation; see [Note: Attention that draws]."""
    if op not in _DROPOUT_AT:
        return op in EXPENSIVE or op.name() == "flex_attention"
    place = _DROPOUT_AT[op]
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


def _every_product() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if _is_kept(op, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _every_second_product() -> Any:
    """Return contexts that keep every second product; each run counts by itself, so that both keep the same ones."""
    counts = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = _is_kept(op, args, kwargs)
        if op in PRODUCTS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _run(
    forward: Callable[..., Tensor],
    kept: Callable[[], Any] | None,
    random: bool,
    *inputs: Tensor,
    **named: Any,
) -> Tensor:
    if not torch.is_grad_enabled() or _recomputes_itself(forward):
        return forward(*inputs, **named)
    if named:
        forward = partial(forward, **named)
    options: dict[str, Any] = {} if kept is None else {"context_fn": kept}
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=random, **options)


def _recomputes_itself(forward: Callable[..., Any]) -> bool:
    """Whether it is of a block of `transformers` after ``gradient_checkpointing_enable()``."""
    block: Any = getattr(forward, "__self__", None)
    return bool(getattr(block, "gradient_checkpointing", False) and block.training)
