"""What a language model is to the rest of the system, and how its parameters get their first values.

A model is an ``nn.Module`` with repeated ``blocks``, a ``forward`` that returns the loss, and a rule that
gives each parameter its initial values from its *name* alone. That rule is why a sharded run starts exactly
where one process would: values depend on (seed, name, shape), never on the world size, the device, or the
order in which parameters are made. So a model may be built on the meta device, where it costs no memory, and
its parameters made one at a time by whoever shards them; no rank ever has to hold the whole of it.

Shape legend: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroshard.errors import UserError
from zeroshard.kernels import Choice, cross_entropy, linear_cross_entropy
from zeroshard.models.adapters import Lora, base_name, is_adapter, starts_at_zero
from zeroshard.models.cache import KVCache
from zeroshard.models.config import ModelConfig
from zeroshard.models.recompute import recomputed_blocks

IGNORED_TARGET = -100  # a target that adds nothing to the loss, as in torch's cross_entropy


DRAWN_AT_ONCE = 1 << 16
"""Elements of a parameter that one generator draws."""


Draw = Callable[[Tensor, torch.Generator], object]


class Part(NamedTuple):
    """Some of a flattened parameter's elements.

    Attributes:
        start: the first of them.
        numel: of the whole parameter.
    """

    start: int
    numel: int


class LanguageModel(nn.Module, ABC):
    """The interface of every model here; it holds no implementation beyond the length check.

    It is an abstract class and no Protocol, because callers also need all of ``nn.Module``, and Python's
    types have no word for "this protocol and that class".

    Attributes:
        blocks: the repeated part, in order; each block is compiled and recomputed by itself.
        num_multiplied_params: N of :func:`flops_per_token`; counted when the model is built, so that it stays
            right after an engine has taken the parameters apart.
        seed: of the initial values.
        kernels: who computes the ``operations``; see `zeroshard.kernels.dispatch`.
        operations: what it has kernels for, as in `zeroshard.kernels.OPERATIONS`.
        eos_id: the id between documents that attention does not cross, see `zeroshard.models.documents`; None: it
            sees all that came before.
        packs: whether ``forward`` also takes ``positions_BT`` [B, T], int64, from 0 in each of several examples in a
            row, and keeps attention inside each: see `zeroshard.models.documents.mask_of`.
        smooths: whether it gives its loss the `loss_options`.
        label_smoothing, z_loss: of the loss in training mode, as `zeroshard.kernels.cross_entropy` takes them; in
            evaluation mode it is without.
        lora: the adapters that alone are trained, see `zeroshard.models.lora`; None: there are none.
        lora_config: `peft`'s configuration of these.
        num_frozen_multiplied_params: of ``num_multiplied_params``, those that are not trained.
        architecture: as `transformers` calls the model; empty: it knows none.
    """

    blocks: nn.ModuleList
    num_multiplied_params: int
    seed: int
    kernels: Choice
    operations: ClassVar[tuple[str, ...]]
    packs: ClassVar[bool] = False
    smooths: bool = False
    eos_id: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    lora: Lora | None = None
    lora_config: Any = None
    num_frozen_multiplied_params: int = 0
    architecture: str = ""

    @property
    def adapted(self) -> nn.Module:
        """The module whose layers adapters are added to; it has them by their published names."""
        return self

    @property
    def units(self) -> list[nn.Module]:
        """What is gathered, freed and reduced together, in the order in which it runs: the blocks.

        A model whose embedding and head are modules that forward *calls* adds them, with
        `zeroshard.models.head.with_embedding_and_head`.
        """
        return list(self.blocks)

    @property
    def loss_options(self) -> dict[str, float]:
        """What the loss is told now."""
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss} if self.training else {}

    def take_loss_options(self, label_smoothing: float, z_loss: float) -> None:
        """Have the loss in training mode be with these.

        Raises:
            UserError: the model computes a loss that takes none.
        """
        for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
            if value and not self.smooths:
                what = f"a {type(self).__name__} computes a loss of its own"
                raise UserError(f"optim.{name}", what, "leave it out")
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """The configuration that the model was built from."""

    @abstractmethod
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """The mean loss where targets are given, else the logits.

        Args:
            tokens_BT: token ids [B, T], int64.
            targets_BT: the token that follows each one [B, T], int64; -100 marks a position without a target.
            cache: has seen what came before ``tokens_BT``, and sees them too; without gradients and ``eos_id``.

        Returns:
            With targets: :func:`next_token_loss`, a scalar. Without: logits [B, T, V] in the model's dtype.
        """

    @abstractmethod
    def init_parameter(self, name: str, param: Tensor, seed: int | None = None, part: Part | None = None) -> None:
        """Write a parameter's initial values into ``param``, in place.

        Args:
            name: as in ``named_parameters()`` of the whole model; all names of a tied one give the same.
            param: a tensor of the parameter's whole shape, or by ``part`` one-dimensional; any device and floating
                dtype; may be a view.
            seed: the model's own ``seed`` where None.
            part: which elements of the parameter ``param`` is; None: all of them.
        """

    def initial_value(self, name: str, param: Tensor, part: Part | None = None) -> None:
        """`init_parameter` with the model's own seed, of adapters too."""
        if self.lora is None:
            self.init_parameter(name, param, part=part)
        elif not is_adapter(name):
            self.init_parameter(base_name(name), param, part=part)
        elif starts_at_zero(name):
            fill_constant_(param, 0.0)
        else:
            bound = self.get_parameter(name).shape[1] ** -0.5  # peft's, which is that of torch's `nn.Linear`

            def draw(drawn: Tensor, generator: torch.Generator) -> Tensor:
                return drawn.uniform_(-bound, bound, generator=generator)

            fill_drawn_(param, draw, self.seed, name, part)

    def check_initial_values(self) -> None:
        """Raise UserError where `init_parameter` could not be answered: weights that lie in files may be missing."""

    def new_cache(self) -> KVCache:
        """Keys and values of no token as yet, for as many as the model takes; ``forward`` is given it."""
        return KVCache(len(self.blocks), self.config.seq_len)

    def num_flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs a token, in sequences of ``seq_len`` tokens: :func:`flops_per_token`."""
        config = self.config
        saved = 2 * self.num_frozen_multiplied_params  # whose own gradients nobody computes
        return flops_per_token(self.num_multiplied_params, config.n_layer, config.n_embd, seq_len) - saved

    def num_recomputed_flops_per_token(self, seq_len: int) -> int:
        """FLOPs a token that activation checkpointing adds: one more forward of each block that runs again.

        With ``selective`` products of matrices are kept, and nothing that counts here runs again. Korthikanti et al.
        2022, https://arxiv.org/abs/2205.05198, appendix A: with all blocks it is a third of :func:`flops_per_token`,
        less the output head's part. With ``selective:2`` every second product of a block runs again, but for its last
        operation, whose result nobody needs.
        """
        config = self.config
        if config.activation_checkpointing == "selective":
            return 0
        if config.activation_checkpointing == "selective:2":
            block: nn.Module = next(iter(self.blocks))
            products = [module.weight.numel() for module in block.modules() if isinstance(module, nn.Linear)]
            return config.n_layer * 2 * sum(products[1:-1:2])
        num_again = len(recomputed_blocks(config.activation_checkpointing, config.n_layer))
        in_blocks = self.num_multiplied_params - config.vocab_size * config.n_embd
        return num_again * (2 * in_blocks // config.n_layer + 4 * config.n_embd * seq_len)

    def check_seq_len(self, seq_len: int) -> None:
        """Raise UserError where ``seq_len`` tokens are none, or more than ``config.seq_len``."""
        if seq_len < 1:
            raise UserError("seq_len", f"{seq_len} is not a length", "give 1 or more tokens")
        if seq_len > self.config.seq_len:
            what = f"{seq_len} is above the model's {self.config.seq_len}"
            raise UserError("seq_len", what, "shorten the sequences or build the model with a larger seq_len")


def flops_per_token(num_multiplied_params: int, n_layer: int, n_embd: int, seq_len: int) -> int:
    """6 N + 12 L d T: model FLOPs for each token, forward and backward (PaLM, appendix B, arXiv:2204.02311).

    Each parameter that multiplies costs a multiply and an add forward, and twice that backward: 6 N.
    Attention's two products, queries with keys and weights with values, cost 4 d T forward in each layer,
    12 d T with the backward pass; a causal mask is not credited, by convention, nor is recomputation.

    Args:
        num_multiplied_params: N, each parameter counted once and without the tables that are only looked up:
            GPT-2's positions, and the token embedding unless the output head shares it.
        n_layer: L, the number of blocks.
        n_embd: d, the width of all query heads together.
        seq_len: T, tokens of a sequence.
    """
    return 6 * num_multiplied_params + 12 * n_layer * n_embd * seq_len


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor, kernels: Choice | None = None, **options: Any) -> Tensor:
    """Mean cross-entropy in nats over the positions that have a target.

    Args:
        logits_BTV: [B, T, V], any floating dtype.
        targets_BT: [B, T], int64; -100 is left out of the mean.
        kernels: who computes it.
        options: ``label_smoothing`` and ``z_loss``, see `zeroshard.kernels.cross_entropy`.

    Returns:
        A scalar in fp32, in float64 where the logits are. NaN where no position has a target.
    """
    return cross_entropy(
        logits_BTV, targets_BT, ignore_index=IGNORED_TARGET, check_targets=False, kernels=kernels, **options
    )


def projected_loss(
    hidden_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor, kernels: Choice | None = None, **options: Any
) -> Tensor:
    """`next_token_loss` of the logits ``hidden @ weight.T``, which need not exist all at once.

    ``options``: ``label_smoothing`` and ``z_loss``, see `zeroshard.kernels.cross_entropy`.
    """
    # Looking for targets outside the vocabulary would wait for the device: there they make the loss NaN instead.
    return linear_cross_entropy(
        hidden_BTC, weight_VC, targets_BT, ignore_index=IGNORED_TARGET, check_targets=False, kernels=kernels, **options
    )


def fill_normal_(param: Tensor, std: float, seed: int, name: str, part: Part | None = None) -> None:
    """Draw ``param`` from N(0, std^2); arguments as of `fill_drawn_`."""
    fill_drawn_(param, lambda drawn, generator: drawn.normal_(0.0, std, generator=generator), seed, name, part)


@torch.no_grad()
def fill_drawn_(param: Tensor, draw: Draw, seed: int, name: str, part: Part | None = None) -> None:
    """Draw ``param``: each element a pure function of (seed, name, numel, place).

    Drawn on the CPU in fp32 and then copied, so each device and dtype gets the same numbers, rounded. Each
    `DRAWN_AT_ONCE` elements have a generator of their own, so that who keeps a part draws little more than that part.

    Args:
        param: any device and floating dtype, written in place: the whole parameter, or [n] by ``part``.
        draw: fills a tensor [n], in fp32 on the CPU, by a generator.
        seed: of the whole model.
        name: the parameter's name in the whole model.
        part: which elements of the flattened parameter ``param`` is; None: all of them.
    """
    start, numel = part or Part(0, param.numel())
    stop = start + param.numel()
    flat = param.view(-1) if param.is_contiguous() else param.new_empty(param.numel())
    for first in range(start - start % DRAWN_AT_ONCE, stop, DRAWN_AT_ONCE):
        block = f"/{first // DRAWN_AT_ONCE}" if first else ""
        digest = hashlib.blake2b(f"{seed}/{name}{block}".encode(), digest_size=8).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little"))
        drawn = torch.empty(min(DRAWN_AT_ONCE, numel - first), dtype=torch.float32, device="cpu")
        draw(drawn, generator)
        low, high = max(first, start), min(first + DRAWN_AT_ONCE, stop)
        flat[low - start : high - start].copy_(drawn[low - first : high - first])
    if not param.is_contiguous():
        param.copy_(flat.view(param.shape))


@torch.no_grad()
def fill_constant_(param: Tensor, value: float) -> None:
    """Set each element of ``param`` to ``value``, in place."""
    param.fill_(value)


class InitialValues:
    """The initial values of a model's parameters, for an engine that asks each rank for what it keeps.

    ``Zero(model, init=InitialValues(model))``; see `zeroshard.zero.DrawsParts`.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def __call__(self, name: str, param: Tensor) -> None:
        """Write the whole of a parameter; see `LanguageModel.init_parameter`."""
        self._model.initial_value(name, param)

    def part(self, name: str, values: Tensor, start: int, numel: int) -> None:
        """Write ``values [n]``, the elements from ``start`` of a flattened parameter of ``numel``."""
        self._model.initial_value(name, values, Part(start, numel))


class _NothingDrawn(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def shapes_only() -> Generator[None]:
    """Modules made inside lie on the meta device, and torch's own initial values are not even asked for."""
    with torch.device("meta"), _NothingDrawn():
        yield


def materialize(model: LanguageModel, device: torch.device | str, *, draw: bool = True) -> None:
    """Move a model from the meta device to ``device``, made and initialised one parameter at a time.

    Tied parameters stay tied. On ``"meta"`` nothing happens: there is nowhere to put values yet.

    ``draw``: False leaves NaN where initial values would be, for what is loaded or received over them.
    """
    if torch.device(device).type == "meta":
        return
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for key, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param not in made:
                made[param] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                name = f"{module_name}.{key}" if module_name else key
                if draw:
                    model.initial_value(name, made[param])
                else:
                    fill_constant_(made[param], float("nan"))
            setattr(module, key, made[param])
    place_buffers(model, device)


def place_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Move buffers that have values to ``device``; those on the meta device stay there."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
