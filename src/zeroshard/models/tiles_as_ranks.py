"""`TilesAsRanks`: one process computes N tiles of each sequence as N ranks compute their parts of it, to the bit.

A rank of `SequenceParallel` has T / N tokens of each row, and in attention H / N heads of all tokens. One process has
all of them. It computes every product on the same shapes as a rank does, one tile after another:

    a module with parameters      tokens [B, T, ...] in N tiles [B, T/N, ...]; its outputs are joined along the tokens
    attention                     heads in N groups, each over whole sequences: `SequenceParallel.around`
    the loss                      the mean over each tile's own targets: [N] losses, one for each tile
    all else                      element by element, so at any shape

Only gradients of parameters mix tokens. A rank has one gradient for its part, in the model's dtype; an engine with
``reproducible`` adds up those of all ranks and rounds once. So here the tiles' gradients stay apart (`_Apart`), and
reach the engine one after another, as those of so many micro-batches: `TilesAsRanks.backward`. An engine notices
nothing; its ``reproducible`` counts tiles as it would count ranks. Until backward is over, they take N - 1 times the
memory of the parameters' gradients.

[Note: Sums over the uses of a tensor]
    A norm computes with its input several times, and so do others that use the same tensor. Autograd adds up their
    gradients in the order in which they come, and two sums of three terms may differ. With tiles a module's own uses
    are added up first, tile by tile. So ranks add them up first too: one tile is a view of all tokens.

[Note: Random numbers of tiles]
    Each rank seeds its own, so each tile has states of torch's generators of its own (`TilesAsRanks.seed`). They take
    the place of the process's while what may draw is computed: modules with parameters, `nn.Dropout`, and attention of
    a group of heads. What draws elsewhere leaves a trace in the process's generator, and is refused. Backward runs a
    recomputed block, or a layer by tiles, from the states that its forward began with (`Replay`). Threads share
    one generator: what each draws is not known if they are ranks, and nothing is refused where others have set it.

Shape legend: B batch, T sequence, H heads, N tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from zeroshard.errors import UserError
from zeroshard.models.cache import KVCache
from zeroshard.models.recompute import replay_second_runs
from zeroshard.models.tiles import MLP_CLASSES, Tiler, added
from zeroshard.torch_internals import in_backward, own_parameters

States = list[Tensor]  # of the generators of the CPU and of a GPU
_in_forward: dict[int, TilesAsRanks] = {}  # by thread


class TilesAsRanks:
    """The tiles of one process. Attached to a model, they compute the part of each module that has parameters.

    Args:
        num: tiles of this process's part of a sequence; 1 on ranks whose bits those of tiles are compared with.

    Attributes:
        is_paused: whether modules compute all tokens at once.
        num_tokens: tokens of a row in the forward that is running, or was last.
    """

    def __init__(self, num: int) -> None:
        self.num, self.num_tokens, self.is_paused = num, 0, False
        self._is_inside = False  # whether a tile is being computed
        self._has_cache = False
        self._apart: list[dict[nn.Parameter, Tensor]] | None = None  # gradients of all tiles but the first
        self._device = torch.device("cpu")
        self._random: list[States] | None = None  # of each tile: [Note: Random numbers of tiles]; None: not seeded
        self._replays = False  # whether these are those of a forward whose backward runs
        self._before: States | None = None  # of the process, when the forward began that is running
        self._is_disturbed = False  # whether another thread has set them since

    def __deepcopy__(self, memo: dict[int, Any]) -> TilesAsRanks:
        """A copy of a model has the same tiles."""
        return self

    @property
    def is_off(self) -> bool:
        """Whether a module that is called now computes all that it is given at once."""
        return self.num == 1 or self.is_paused or self._is_inside or self._has_cache

    def attach(self, model: nn.Module) -> None:
        """Compute ``model`` by tiles, in place.

        Raises:
            UserError: a module has parameters of its own and calls others that have some too, so that nobody knows
                whether it looks at each token alone.
        """
        for name, module in model.named_modules():
            for tiler in (getattr(module, "tile", None), getattr(module.forward, "func", None)):
                if isinstance(tiler, Tiler):
                    tiler.as_ranks = self
            if type(module).__name__ in MLP_CLASSES:  # whether it runs by tiles or not
                module.forward = partial(_with_inputs_of_its_own, module.forward)
            if self.num > 1:
                replay_second_runs(module, self.replay)
            drops = isinstance(module, nn.Dropout) and module.p > 0 and self.num > 1
            if not drops and not any(param is not None for param in own_parameters(module).values()):
                continue
            if self.num == 1:
                module.forward = partial(_with_inputs_of_its_own, module.forward)
                continue
            if any(next(each.parameters(), None) is not None for each in module.children()):
                what = f"{name}, a {type(module).__name__}, has parameters and calls other modules that have some"
                raise UserError("tiles", f"{what}: it cannot be computed tile by tile", "leave tiles out")
            module.forward = partial(self._by_tile, name, module, module.forward)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = (*args, *named.values())
        self._has_cache = any(isinstance(each, KVCache) for each in given)
        tokens = next((each for each in given if isinstance(each, Tensor)), None)
        self._before = None
        if tokens is None or self.is_paused or self._has_cache:
            return
        self.num_tokens = tokens.shape[1]
        if self.num_tokens % self.num:
            what = f"{self.num_tokens} tokens cannot be cut into {self.num} equal tiles (tiles, reproducible)"
            raise UserError("seq_len", what, f"give a multiple of {self.num}")
        if model.training and self.num > 1 and not isinstance(tokens, FakeTensor) and not tokens.is_meta:
            if self._random is not None and tokens.device.type != self._device.type:
                what = f"random numbers are seeded on {self._device.type}, and tokens are on {tokens.device.type}"
                raise UserError("tiles", what, "give TilesAsRanks.seed the model's device")
            self._device = tokens.device
            self._before, self._is_disturbed = self._states(), False
            _in_forward[threading.get_ident()] = self

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        before, self._before, self._has_cache = self._before, None, False
        _in_forward.pop(threading.get_ident(), None)
        if before is None or output is None or self._is_disturbed or _are_equal(before, self._states()):
            return
        if self._random is None:
            what = "the model draws random numbers, and each rank of a sequence would draw its own (reproducible)"
            raise UserError("tiles", what, "seed those of each tile by TilesAsRanks.seed, or set dropout to 0")
        what = f"a {type(model).__name__} draws random numbers outside of modules that are computed tile by tile"
        raise UserError("tiles", f"{what} (reproducible)", "set dropout to 0, or leave tiles out")

    # -- tiles --------------------------------------------------------------------------------------------------

    @contextmanager
    def inside(self, tile: int) -> Generator[None]:
        """In this block modules are given one tile already, and draw its random numbers.

        Raises:
            UserError: they draw in a backward that does not know what forward has drawn.
        """
        before, self._is_inside = self._is_inside, True
        try:
            with nullcontext() if self._random is None else self._drawing(self._random, tile):
                yield
        finally:
            self._is_inside = before

    def _by_tile(self, name: str, module: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Return ``forward(*inputs)``, computed for one tile after another with the gradients of parameters apart."""
        if self.is_off or (isinstance(module, nn.Dropout) and not module.training):
            return forward(*inputs, **named)
        along = self._tokens_along(name, module, inputs[0])
        tiles = [self._cut(name, module, each) for each in inputs]
        options = {key: self._cut(name, module, each) for key, each in named.items()}
        params = {key: each for key, each in own_parameters(module).items() if each is not None and each.requires_grad}
        apart = {key: _Apart.apply(self, each) for key, each in params.items()} if torch.is_grad_enabled() else {}
        found = []
        for tile in range(self.num):
            with self.inside(tile), _in_place_of(module, {key: each[tile] for key, each in apart.items()}):
                given = {key: each[tile] for key, each in options.items()}
                found.append(forward(*(each[tile] for each in tiles), **given))
        if isinstance(found[0], Tensor):
            return _joined(found, along)
        return tuple(_joined(each, along) for each in zip(*found, strict=True))

    def _cut(self, name: str, module: nn.Module, given: Any) -> Sequence[Any]:
        """Return a tile of ``given`` for each tile, in memory of its own as a rank has it; what is no tensor as is."""
        if not isinstance(given, Tensor):
            return [given] * self.num
        along = self._tokens_along(name, module, given)
        return [each.contiguous() for each in given.chunk(self.num, along)]

    def _tokens_along(self, name: str, module: nn.Module, given: Any) -> int:
        """Return the dimension of tokens: of [B, T, ...] and of [B, H, T, D]; of numbers such as ids the last one."""
        if isinstance(given, Tensor):
            where = range(1, given.dim() - 1) if given.is_floating_point() else [given.dim() - 1]
            found = [dim for dim in where if given.shape[dim] == self.num_tokens]
            if len(found) == 1:
                return found[0]
        shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        what = f"{name}, a {type(module).__name__}, is given {shape}, and not [B, T, ...] of {self.num_tokens} tokens"
        raise UserError("tiles", f"{what}, so it cannot be computed tile by tile (reproducible)", "leave it out")

    # -- random numbers -----------------------------------------------------------------------------------------

    def seed(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Seed the random numbers of each tile, as each rank seeds its own by `torch.manual_seed`.

        Args:
            seeds: of the ranks whose parts the tiles are, one for each tile.
            device: the device that computes.

        Raises:
            ValueError: there are more seeds than tiles, or fewer.
        """
        if len(seeds) != self.num:
            raise ValueError(f"seed: {len(seeds)} seeds for {self.num} tiles; give one for each tile")
        self._device, found = torch.device(device), []
        for each in reversed(seeds):  # the first one is then the process's too
            self._disturb_others()
            torch.manual_seed(each)
            found.append(self._states())
        self._random = found[::-1] if self.num > 1 else None

    def replay(self) -> Replay:
        """Return where the tiles' random numbers stand now, for a backward that draws them again."""
        return Replay(self)

    @contextmanager
    def _drawing(self, random: list[States], tile: int) -> Generator[None]:
        """Draw in this block the random numbers of one tile."""
        began = random[tile]
        outside = self._states(began)
        try:
            yield
        finally:
            random[tile] = self._states(outside)
        if in_backward() and not self._replays and not _are_equal(began, random[tile]):
            what = "blocks that recompute themselves do not draw again what each tile has drawn (reproducible)"
            raise UserError("tiles", what, "recompute them by zeroshard.models.offload_inputs, or set dropout to 0")

    def _states(self, following: States | None = None) -> States:
        """Return the states of the process's generators; then give them those of ``following``."""
        found = [torch.get_rng_state()]
        if following is not None:
            self._disturb_others()
            torch.set_rng_state(following[0])
        if self._device.type == "cuda":
            found.append(torch.cuda.get_rng_state(self._device))
            if following is not None:
                torch.cuda.set_rng_state(following[1], self._device)
        return found

    def _disturb_others(self) -> None:
        for other in list(_in_forward.values()):
            other._is_disturbed |= other is not self

    # -- gradients ----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Run the backward of ``loss``, then a backward for the gradients that each further tile has. Collective.

        Without it, in a plain ``loss.backward()``, parameters get the sum of the tiles' gradients.
        """
        self._apart = [{} for _ in range(self.num - 1)]
        try:
            loss.backward()
            apart = self._apart
        finally:
            self._apart = None
        trained = list(dict.fromkeys(param for grads in apart for param in grads))
        while trained and apart:
            grads = apart.pop(0)
            link = torch.empty(0, device=trained[0].device)
            for param in reversed(trained):  # so that they come in the order in which the first tile's came
                link = _Given.apply(grads.pop(param, None), param, link)
            torch.autograd.backward(link, torch.empty_like(link))

    def grad_of(self, param: nn.Parameter, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Take ``param``'s gradient of each tile; return what its own backward adds to ``param.grad``."""
        if self._apart is None:
            total: Tensor | None = None
            for grad in grads:
                total = added(total, grad)
            return None if total is None else total.to(param.dtype)
        for kept, grad in zip(self._apart, grads[1:], strict=True):
            if grad is not None:  # a parameter that is used twice has the sum, as on a rank
                kept[param] = kept[param] + grad if param in kept else grad
        return grads[0]


class Replay:
    """Where the random numbers of tiles stood when it was made, so that backward draws what forward has drawn."""

    def __init__(self, tiles: TilesAsRanks) -> None:
        self._tiles, self._random = tiles, None if tiles._random is None else list(tiles._random)

    @contextmanager
    def again(self) -> Generator[None]:
        """Draw in this block from there."""
        tiles = self._tiles
        before = tiles._random, tiles._replays
        tiles._random, tiles._replays = None if self._random is None else list(self._random), True
        try:
            yield
        finally:
            tiles._random, tiles._replays = before

    def run(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Return ``forward(*inputs)``; in backward with the random numbers of the first call."""
        with self.again() if in_backward() else nullcontext():
            return forward(*inputs)


def _with_inputs_of_its_own(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Return ``forward(*inputs)``; see [Note: Sums over the uses of a tensor]."""
    own = [each.view_as(each) if isinstance(each, Tensor) and each.requires_grad else each for each in inputs]
    return forward(*own, **named)


class _Apart(torch.autograd.Function):
    """A parameter as each tile sees it; backward gets the tiles' gradients one by one."""

    @staticmethod
    def forward(ctx: Any, tiles: TilesAsRanks, param: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.tiles, ctx.param = tiles, param
        ctx.set_materialize_grads(False)
        return tuple(param.view_as(param) for _ in range(tiles.num))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, ctx.tiles.grad_of(ctx.param, grads)


class _Given(torch.autograd.Function):
    """A link whose backward gives a parameter a gradient that is known already (None: zeros), then runs the next one's.

    Autograd takes the gradient over, and frees it when the engine has it.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor | None, param: nn.Parameter, following: Tensor) -> Tensor:
        ctx.grad, ctx.param = grad, param
        return following.view_as(following)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given, ctx.grad = ctx.grad, None
        return None, torch.zeros_like(ctx.param) if given is None else given, grads[0]


@contextmanager
def _in_place_of(module: nn.Module, params: dict[str, Tensor]) -> Generator[None]:
    """In this block ``module`` computes with ``params``: an attribute of its own hides the parameter of that name."""
    vars(module).update(params)
    try:
        yield
    finally:
        for name in params:
            del vars(module)[name]


def _joined(tiles: Sequence[Tensor], along: int) -> Tensor:
    """The tiles' outputs as one tensor; losses [N] if they are scalars."""
    return torch.stack(list(tiles)) if tiles[0].dim() == 0 else torch.cat(list(tiles), along)


def _are_equal(some: States, others: States) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def in_groups(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], tiles: TilesAsRanks, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return ``attention`` [B, T, H, D] of [B, H, T, D], a tile's group of heads after another."""
    groups: Iterator[Any] = zip(*(each.chunk(tiles.num, dim=1) for each in (q, k, v)), strict=True)
    found = []
    for tile, group in enumerate(groups):
        with tiles.inside(tile):
            found.append(attention(*_as_received(group)))
    return torch.cat(found, dim=2)


def _as_received(group: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors [B, h, T, D] laid out as `SequenceParallel.to_heads` lays out what a rank has received."""
    message = torch.cat([each.transpose(1, 2).flatten(2) for each in group], dim=2)
    parts = message.split([each.shape[1] * each.shape[3] for each in group], dim=2)
    return [part.unflatten(2, (-1, each.shape[3])).transpose(1, 2) for part, each in zip(parts, group, strict=True)]
