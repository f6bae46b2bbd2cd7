"""`tiled`: what a block computes for each token alone runs on a few tokens at a time, so its middle never exists whole.

A feed-forward layer's middle [B, T, F] takes several times the block's input, and with long sequences most of what a
recomputed block needs. So forward runs tile by tile along T, without a graph, and keeps the inputs alone. Backward runs
forward and backward of one tile after another; the weights' gradients are added in the order of the tiles, in fp32, and
reach autograd once, as if there were no tiles. So an engine sees nothing of them, and ranks may have other numbers.

[Note: Where a recomputation ends]
    Checkpointing runs a block forward again until every tensor that backward needs is there. `_Kept` saves the inputs
    before any tile runs, so a recomputation ends there, and the tiles run forward twice in a step, not three times.

Bekman et al. 2025, "Arctic Long Sequence Training", https://arxiv.org/abs/2506.13996, section 3.1.

Shape legend: B batch, T sequence, C width, F width of a feed-forward layer's middle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zeroshard.host.errors import UserError

LEAST_TOKENS = 256  # of a tile that is chosen here: products of fewer rows waste a GPU
# Layers of `transformers` that compute for each token alone, by the names of their classes. Add your own.
MLP_CLASSES = {
    *("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP", "Phi3MLP", "PhiMLP"),
    *("GPT2MLP", "GPTNeoXMLP", "Olmo2MLP", "Olmo3MLP", "SmolLM3MLP", "Starcoder2MLP", "GraniteMLP", "CohereMLP"),
}


def num_tiles(how: str, num_tokens: int, width: int, middle: int) -> int:
    """Return into how many tiles ``num_tokens`` tokens of a sequence are cut.

    Args:
        how: auto: as many as make a tile's middle and its gradients as large as the layer's input, of at least
            `LEAST_TOKENS` tokens.
        width: numbers of a token that enter the layer.
        middle: numbers of a token that exist inside of it, at once.
    """
    wanted = min(-(-2 * middle // width), num_tokens // LEAST_TOKENS) if how == "auto" else int(how)
    return max(1, min(wanted, num_tokens))


def bounds(num_tokens: int, num: int) -> list[tuple[int, int]]:
    """Return where each of ``num`` tiles of a sequence begins and ends; the first may be longer by a token."""
    least, longer = divmod(num_tokens, num)
    ends = [tile * least + min(tile, longer) for tile in range(num + 1)]
    return list(pairwise(ends))


class Log(Protocol):
    """Writes down what operations do, and takes one tile for others that are alike; see `alike_tiles`."""

    def here(self) -> int:
        """Return how much is written so far."""

    def repeat(self, since: int, times: int) -> bool:
        """Write what was written from ``since`` on so many times more; return False if it does not repeat."""


_log: ContextVar[Log | None] = ContextVar("log", default=None)


@contextmanager
def alike_tiles(log: Log) -> Generator[None]:
    """In this block, on this thread, run one of many alike tiles and have ``log`` repeat it: tensors have no values.

    The first tile makes what later ones add to, and the second frees what the first one has left. So a tile is alike
    from the third on, if it and the two before it have one length.
    """
    token = _log.set(log)
    try:
        yield
    finally:
        _log.reset(token)


def _turns(num_tokens: int, num: int) -> Generator[tuple[int, int]]:
    """Yield `bounds`, in `alike_tiles` only those of tiles that no other one is taken for."""
    tiles, log, place = bounds(num_tokens, num), _log.get(), 0
    while place < len(tiles):
        since = 0 if log is None else log.here()
        yield tiles[place]
        place += 1
        if log is None or place < 3:
            continue
        length, again = _length(tiles[place - 1]), place
        if length == _length(tiles[place - 2]) == _length(tiles[place - 3]):
            while again < len(tiles) and _length(tiles[again]) == length:
                again += 1
        if again > place and log.repeat(since, again - place):
            place = again


def _length(tile: tuple[int, int]) -> int:
    return tile[1] - tile[0]


def tiled(
    function: Callable[..., Tensor],
    params: Iterable[nn.Parameter],
    num: int,
    *inputs: Tensor,
    random: bool = False,
) -> Tensor:
    """Return ``function(*inputs)``, computed for one tile of tokens after another.

    Args:
        function: from tensors [B, t, ...] to one [B, t, ...], each token by itself.
        num: tiles, at most T.
        inputs: tensors [B, T, ...].
        random: whether it draws random numbers, so that backward must draw the same.

    Raises:
        ValueError: there are no tiles, or an input has no dimensions for tokens and their numbers.
        RuntimeError: in backward, if ``function`` computes with a parameter that is not in ``params``.
    """
    if num < 1 or any(each.dim() < 3 for each in inputs):
        shapes = ", ".join(str(list(each.shape)) for each in inputs)
        raise ValueError(f"tiled: {num} tiles of {shapes}; give 1 tile or more, of tensors [B, T, ...]")
    trained = [param for param in params if param.requires_grad]
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in (*inputs, *trained)):
        return _by_tile(function, num, inputs)
    kept = _Kept.apply(torch.empty(0, requires_grad=True), *inputs)
    tiling = _Tiling(function, num, kept.grad_fn, random, inputs[0].device)
    return _Tiles.apply(tiling, len(inputs), kept, *inputs, *trained)


def _by_tile(function: Callable[..., Tensor], num: int, inputs: Sequence[Tensor]) -> Tensor:
    out: Tensor | None = None
    for start, end in _turns(inputs[0].shape[1], num):
        # without gaps: a whole input has none either, and Conv1D of GPT-2 in `transformers` takes a view of it
        part = function(*(each[:, start:end].detach().contiguous() for each in inputs))
        if out is None:
            out = part.new_empty(part.shape[0], inputs[0].shape[1], *part.shape[2:])
        out[:, start:end] = part
    assert out is not None
    return out


class _Tiling:
    """How a call is tiled, and what its backward must find as forward had it."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        num: int,
        kept: Any,
        random: bool,
        device: torch.device,
    ) -> None:
        self.function, self.num, self.kept, self.device = function, num, kept, device
        kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
        self._autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            # A copy of weights that was cast without a graph must not be found by what needs one.
            "cache_enabled": False,
        }
        self._random_states: list[Tensor] = []
        if random:
            self._random_states = [torch.get_rng_state()]
            if device.type == "cuda":
                self._random_states.append(torch.cuda.get_rng_state(device))

    def autocast(self) -> torch.autocast:
        """Cast as forward does."""
        return torch.autocast(**self._autocast)

    @contextmanager
    def same_random_numbers(self) -> Generator[None]:
        """Draw in this block what forward has drawn."""
        if not self._random_states:
            yield
            return
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):
            torch.set_rng_state(self._random_states[0])
            if gpus:
                torch.cuda.set_rng_state(self._random_states[1], self.device)
            yield


class _Kept(torch.autograd.Function):
    """Saves tensors; see [Note: Where a recomputation ends].

    It takes and returns an empty tensor: by this one's ``grad_fn`` the tiles find the inputs, and it leads backward
    here after the tiles, so that autograd frees what is saved.
    """

    @staticmethod
    def forward(ctx: Any, empty: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return empty.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiling: _Tiling, num_inputs: int, kept: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tiling, ctx.trained, ctx.device = tiling, tensors[num_inputs:], kept.device
        with tiling.autocast():
            return _by_tile(tiling.function, tiling.num, tensors[:num_inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Recompute each tile with a graph, and add its gradients to those of the tiles before it, in their order."""
        tiling, trained = ctx.tiling, ctx.trained
        inputs = tiling.kept.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        grads_of_inputs = [
            torch.empty_like(each) if needs else None for each, needs in zip(inputs, wanted, strict=False)
        ]
        sums: list[Tensor | None] = [None] * len(trained)
        with tiling.same_random_numbers():
            for start, end in _turns(inputs[0].shape[1], tiling.num):
                parts = [
                    each[:, start:end].detach().contiguous().requires_grad_(needs)
                    for each, needs in zip(inputs, wanted, strict=False)
                ]
                with torch.enable_grad(), tiling.autocast():
                    # views, since hooks on modules' inputs (of FlopCounterMode, for one) take no leaves here
                    out = tiling.function(*(part.view_as(part) for part in parts))
                leaves = [*(part for part in parts if part.requires_grad), *trained]
                if start == 0:
                    _require_given(out, leaves)
                found = iter(torch.autograd.grad(out, leaves, grads[0][:, start:end], allow_unused=True))
                del out
                for whole in grads_of_inputs:
                    if whole is not None:
                        grad = next(found)
                        whole[:, start:end] = 0.0 if grad is None else grad
                sums = [_added(total, grad) for total, grad in zip(sums, found, strict=True)]
        of_params = (
            None if total is None else total.to(param.dtype) for total, param in zip(sums, trained, strict=True)
        )
        return None, None, torch.empty(0, device=ctx.device), *grads_of_inputs, *of_params


def _require_given(out: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise RuntimeError if gradients would flow to a leaf that nobody named: it would get none, without a word."""
    known, seen, ahead = set(map(id, leaves)), set(), [out.grad_fn]
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            what = f"the function computes with a tensor {list(leaf.shape)} that takes a gradient and was not given"
            raise RuntimeError(f"tiled: {what}; name it among params")


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return the sum of a parameter's gradients by tiles so far and the next one: at least in fp32, in place."""
    if grad is None:
        return total
    if total is None:  # a copy: autograd may hand out one tensor as the gradient of two parameters
        return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    return total.add_(grad)


class Tiler:
    """Calls what a block computes for each token alone, by tiles if it is asked to.

    Args:
        how: none, auto, or a number of tiles.
        middle: numbers of a token that exist inside, as for `num_tiles`.
        random: whether it draws random numbers in training.
    """

    def __init__(self, how: str, *, middle: int, random: bool = False) -> None:
        self.how, self.middle, self.random = how, middle, random

    def __call__(self, modules: Sequence[nn.Module], function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return ``function(*inputs)``, of inputs [B, T, ...] and the parameters of these modules."""
        if self.how == "none":
            return function(*inputs)
        rows, num_tokens = inputs[0].shape[:2]
        num = num_tiles(self.how, num_tokens, inputs[0].numel() // (rows * num_tokens), self.middle)
        params = [param for module in modules for param in module.parameters()]
        return tiled(function, params, num, *inputs, random=self.random and modules[0].training)


def tile_mlps(module: nn.Module, how: str) -> list[str]:
    """Make the layers of ``module`` that compute for each token alone run by tiles, in place; return their names.

    Args:
        module: a model or a block of `transformers`; layers are found by their classes, `MLP_CLASSES`.
        how: ``"auto"``, or a number of tiles.

    Raises:
        UserError: it has no such layer.
    """
    found = [(name, each) for name, each in module.named_modules() if type(each).__name__ in MLP_CLASSES]
    for _, each in found:
        middle = sum(layer.out_features for layer in each.modules() if isinstance(layer, nn.Linear))
        each.forward = partial(Tiler(how, middle=middle, random=True), [each], each.forward)
    if not found:
        classes = sorted({type(each).__name__ for each in module.modules() if type(each).__name__.endswith("MLP")})
        what = f"no feed-forward layer is known to compute for each token alone (here: {', '.join(classes) or 'none'})"
        raise UserError("tiles", what, "add its class's name to zeroshard.models.tiles.MLP_CLASSES, or leave out")
    return [name for name, _ in found]
