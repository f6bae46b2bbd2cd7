"""`LanguageModel`, the interface through which the rest of the system uses a model, and parameter initialization.

A model is an ``nn.Module`` with repeated ``blocks``, a ``forward`` that returns the loss, and a rule that
gives each parameter its initial values from its *name* alone. Values depend on (seed, name, shape), never on
the world size, the device, or the order in which parameters are created. So a sharded run starts from exactly
the same weights as a single process. A model may be built on the meta device, where it takes no memory; an
engine then creates and shards one parameter at a time, and no rank ever needs the unsharded model in memory.

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

from zeroshard.host.errors import UserError
from zeroshard.kernels import Choice, cross_entropy, linear_cross_entropy
from zeroshard.models.adapters import Lora, base_name, is_adapter, starts_at_zero
from zeroshard.models.cache import KVCache
from zeroshard.models.compared_rows import ComparedRows
from zeroshard.models.config import ModelConfig, inputs_wait_on_host
from zeroshard.models.inputs_on_host import planned_slot_bytes
from zeroshard.models.recompute import recomputed_blocks
from zeroshard.models.ulysses import SequenceParallel, cannot_share

IGNORED_TARGET = -100  # a target that adds nothing to the loss, as in torch's cross_entropy


DRAWN_AT_ONCE = 1 << 16
"""Elements of a parameter that one random generator draws."""


Draw = Callable[[Tensor, torch.Generator], object]


class Part(NamedTuple):
    """A contiguous range of a flattened parameter; the tensor that is passed with it has the range's length.

    Attributes:
        start: index of the range's first element.
        numel: number of elements of the unsharded parameter.
    """

    start: int
    numel: int


class LanguageModel(nn.Module, ABC):
    """The interface of every model here, with the little that all models compute in the same way.

    It is an abstract class rather than a Protocol, because callers also need all of ``nn.Module``, and
    Python's types cannot express "this protocol and that class".

    Attributes:
        blocks: the repeated blocks, in order of execution; each block is recomputed separately.
        num_multiplied_params: N of :func:`flops_per_token`; counted when the model is built, so that it stays
            right after an engine has sharded the parameters.
        seed: seed of the initial values.
        kernels: backend of the ``operations``; see `zeroshard.kernels.dispatch`.
        operations: keys of `zeroshard.kernels.OPERATIONS`: the operations with kernels that the model uses.
        eos_id: token id that separates documents; attention does not cross it, see `zeroshard.models.document_masks`.
            None: a position attends to all earlier ones.
        takes_positions: whether ``forward`` also takes ``positions_BT`` [B, T], int64, which restart at 0 in each of
            several examples in a row, and keeps attention inside each (`zeroshard.models.document_masks.mask_of`).
        keeps_examples_apart: whether attention is known to stay inside the examples of a row; else a run checks it.
        shares_sequences: whether ranks that share a sequence are known to compute what one rank would; else they
            compare rows. It holds for the class that says so, and not for classes of yours that extend it.
        traces_on_meta: whether forward and backward depend on the device by their kernels alone, so that a trace on the
            meta device shows what they do elsewhere.
        takes_loss_options: whether the model's loss takes the `loss_options`.
        balances_experts: whether the loss has a load-balancing term of experts, which depends on all tokens of a batch.
        label_smoothing, z_loss: options of the loss in training mode, as in `zeroshard.kernels.cross_entropy`; in
            evaluation mode the loss has neither.
        lora: settings of the adapters, which alone are trained, see `zeroshard.models.lora`; None: no adapters.
        lora_config: `peft`'s configuration of the adapters.
        num_frozen_multiplied_params: number of the ``num_multiplied_params`` that are not trained.
        architecture: name of the model's architecture in `transformers`; empty: it has none there.
        matmul: in which numbers blocks are to multiply: ``dtype``, those of the weights, or ``fp8``.
        sequence: the ranks that share each sequence, see `share_sequences`; None: each rank has whole ones.
    """

    blocks: nn.ModuleList
    num_multiplied_params: int
    seed: int
    kernels: Choice
    operations: ClassVar[tuple[str, ...]]
    takes_positions: ClassVar[bool] = False
    keeps_examples_apart: ClassVar[bool] = False
    shares_sequences: ClassVar[bool] = False
    traces_on_meta: bool = False
    takes_loss_options: bool = False
    balances_experts: bool = False
    eos_id: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    lora: Lora | None = None
    lora_config: Any = None
    num_frozen_multiplied_params: int = 0
    architecture: str = ""
    matmul: str = "dtype"
    sequence: SequenceParallel | None = None

    @property
    def lora_root(self) -> nn.Module:
        """The module whose layers get the adapters; targets of adapters are names of layers inside it."""
        return self

    @property
    def units(self) -> list[nn.Module]:
        """Modules whose parameters an engine gathers, frees and reduces together, in order of execution: the blocks.

        A model whose forward *calls* its embedding and its head as modules adds these two, with
        `zeroshard.models.head.with_embedding_and_head`.
        """
        return list(self.blocks)

    @property
    def loss_options(self) -> dict[str, float]:
        """Keyword arguments of the loss: label smoothing and z-loss in training mode, none in evaluation mode."""
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss} if self.training else {}

    def take_loss_options(self, label_smoothing: float, z_loss: float) -> None:
        """Set the label smoothing and z-loss that the loss uses in training mode.

        Raises:
            UserError: the model computes a loss of its own, which takes neither.
        """
        for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
            if value and not self.takes_loss_options:
                what = f"a {type(self).__name__} computes a loss of its own"
                raise UserError(f"optim.{name}", what, "leave it out")
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    @property
    def has_fused_blocks(self) -> bool:
        """Whether blocks use operations with kernels: more than the losses."""
        return not set(self.operations) <= {"cross_entropy", "linear_cross_entropy"}

    @property
    def shared_sequence(self) -> SequenceParallel | None:
        """The ranks that share the sequences of a forward now; None: this rank has whole ones."""
        return None if self.sequence is None or self.sequence.is_paused else self.sequence

    def share_sequences(self, sequence: SequenceParallel) -> None:
        """Share each sequence among ranks: from now on ``forward`` takes this rank's part of each row.

        Tokens, targets and positions are cut alike, see `SequenceParallel.cut`. The loss is the mean over the part's
        own targets. With a cache every rank computes whole rows.

        Raises:
            UserError: the ranks do not divide the heads, or the model's attention cannot be divided.
        """
        if self.balances_experts:
            what = f"the loss of a {type(self).__name__} balances experts over all tokens of a batch"
            raise cannot_share(what, "set output_router_logits to false in its config.json")
        self.attach_sequence(sequence)
        self.sequence = sequence
        is_known = type(self).__module__.startswith("zeroshard.") or "shares_sequences" in vars(type(self))
        if not (self.shares_sequences and is_known):
            self.compare_rows(sequence)

    def attach_sequence(self, sequence: SequenceParallel) -> None:
        """Have attention look at whole sequences: by `SequenceParallel.around`. A model that does not is refused.

        Call it while the sequence is paused too: so ranks compare what attention is given with one rank.

        Raises:
            UserError: as `share_sequences`.
        """
        what = f"{type(self).__name__} does not say how its attention sees sequences that ranks share"
        raise cannot_share(what, "give it a method attach_sequence(sequence), or leave it out")

    def compare_rows(self, sequence: SequenceParallel) -> None:
        """Have ranks compare rows that are longer than before with one rank: `zeroshard.models.compared_rows`."""
        if not hasattr(self, "_compared_rows"):
            self.register_forward_pre_hook(_compare, with_kwargs=True)
            self.register_forward_hook(_compared)
        self._compared_rows = ComparedRows(self, sequence, self._row, self.config.vocab_size)

    def _row(self, tokens_BT: Tensor, positions_BT: Tensor | None, wants_output: bool) -> Tensor | None:
        named: dict[str, Any] = {}
        if positions_BT is not None and self.takes_positions:
            named["positions_BT"] = positions_BT
        output = self.forward(tokens_BT, None if wants_output else tokens_BT, **named)  # a loss needs no logits
        return output if wants_output else None

    def require_positions(self, setting: str) -> None:
        """Raise UserError, which names ``setting``, if the model cannot keep documents apart by their positions."""
        if setting == "data.packing" and not self.takes_positions:
            what = f"{type(self).__name__} does not say that it takes positions_BT"
            todo = "give its forward that argument and set takes_positions = True, or leave it out"
            raise UserError(setting, what, todo)

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """The configuration that the model was built from."""

    @abstractmethod
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Return the mean loss if targets are given, else the logits.

        Args:
            tokens_BT: token ids [B, T], int64.
            targets_BT: the token that follows each one [B, T], int64; -100 marks a position without a target.
            cache: keys and values of the tokens before ``tokens_BT``; forward appends those of ``tokens_BT``. Use it
                without gradients; ``eos_id`` has no effect with a cache.

        Returns:
            With targets: :func:`next_token_loss`, a scalar. Without: logits [B, T, V] in the model's dtype.
        """

    @abstractmethod
    def init_parameter(self, name: str, param: Tensor, seed: int | None = None, part: Part | None = None) -> None:
        """Write a parameter's initial values into ``param``, in place.

        Args:
            name: the parameter's name in ``named_parameters()`` of the unsharded model; all names of a tied parameter
                give the same values.
            param: a tensor of the parameter's unsharded shape, or one-dimensional if there is a ``part``; any device
                and floating dtype; may be a view.
            seed: seed of the values; None: the model's own ``seed``.
            part: range of the flattened parameter that ``param`` is; None: all of it.
        """

    def initial_value(self, name: str, param: Tensor, part: Part | None = None) -> None:
        """Write initial values with the model's own seed, as `init_parameter` does, but of adapters too."""
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
        """Raise UserError if `init_parameter` reads values from files, and these lack a weight."""

    def new_cache(self) -> KVCache:
        """Return an empty key-value cache for ``config.seq_len`` tokens, to be passed to ``forward``."""
        return KVCache(len(self.blocks), self.config.seq_len)

    def num_flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs per token, in sequences of ``seq_len`` tokens: :func:`flops_per_token`."""
        config = self.config
        saved = 2 * self.num_frozen_multiplied_params  # backward computes no gradients of frozen weights
        return flops_per_token(self.num_multiplied_params, config.n_layer, config.n_embd, seq_len) - saved

    def num_recomputed_flops_per_token(self, seq_len: int) -> int:
        """FLOPs per token that activation checkpointing adds: one more forward of each recomputed block.

        With ``full`` this is a third of :func:`flops_per_token`, without the output head's part (Korthikanti et al.
        2022, https://arxiv.org/abs/2205.05198, appendix A). With ``selective`` matrix products are kept, and nothing
        that counts here runs again. With ``selective:2`` every second matrix product of a block runs again, except the
        block's last operation: backward does not need its result.
        """
        config = self.config
        if self.recomputation == "selective":
            return 0
        if self.recomputation == "selective:2":
            products = [layer.weight.numel() for layer in self.products_of_a_block]
            return config.n_layer * 2 * sum(products[1:-1:2])
        num_again = len(recomputed_blocks(self.recomputation, config.n_layer))
        in_blocks = self.num_multiplied_params - config.vocab_size * config.n_embd
        return num_again * (2 * in_blocks // config.n_layer + 4 * config.n_embd * seq_len)

    @property
    def products_of_a_block(self) -> list[nn.Linear]:
        """The linear layers of the first block, in the order of their definition."""
        return [module for module in self.blocks[0].modules() if isinstance(module, nn.Linear)]

    @property
    def layers_in_8_bits(self) -> list[nn.Linear]:
        """The blocks' linear layers with two sizes that are multiples of 16, without routers: those of ``fp8``."""
        return [
            each
            for name, each in self.blocks.named_modules()
            if isinstance(each, nn.Linear)
            and not each.in_features % 16
            and not each.out_features % 16
            and name.rpartition(".")[2] not in ("gate", "router")
        ]

    @property
    def recomputation(self) -> str:
        """Which activations backward recomputes: ``activation_checkpointing`` of the configuration."""
        return self.config.activation_checkpointing

    @property
    def num_unread_per_token(self) -> int:
        """Elements of a token's activations that selective recomputation keeps although backward does not read them.

        They are the output of each block's last product. ``selective:2`` keeps it only if its number in the block is
        odd, as in LLaMA.
        """
        keeps_last = len(self.products_of_a_block) % 2 == 1
        keeps = self.recomputation == "selective" or (self.recomputation == "selective:2" and keeps_last)
        return self.config.n_embd * self.config.n_layer if keeps else 0

    def offloaded_input_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Bytes of the host in which inputs of blocks wait for backward; 0 unless the model offloads them.

        ``num_tokens``: of a rank's micro-batch; ``itemsize``: of an element as it is computed.
        """
        if not inputs_wait_on_host(self.recomputation):
            return 0
        return planned_slot_bytes(len(self.blocks), num_tokens * self.config.n_embd * itemsize)

    def check_seq_len(self, seq_len: int) -> None:
        """Raise UserError if ``seq_len`` is below 1 or above ``config.seq_len``."""
        if seq_len < 1:
            raise UserError("seq_len", f"{seq_len} is not a length", "give 1 or more tokens")
        if seq_len > self.config.seq_len:
            what = f"{seq_len} is above the model's {self.config.seq_len}"
            raise UserError("seq_len", what, "shorten the sequences or build the model with a larger seq_len")


def _compare(model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    model._compared_rows.before((*args, *named.values())[0])


def _compared(model: Any, args: Any, output: Any) -> None:
    model._compared_rows.after()


def flops_per_token(num_multiplied_params: int, n_layer: int, n_embd: int, seq_len: int) -> int:
    """Return 6 N + 12 L d T: model FLOPs per token, forward and backward (PaLM, appendix B, arXiv:2204.02311).

    Each parameter that multiplies costs a multiply and an add forward, and twice that backward: 6 N.
    Attention's two products, queries with keys and weights with values, cost 4 d T forward in each layer,
    12 d T with the backward pass. By convention a causal mask lowers nothing, and recomputation adds nothing.

    Args:
        num_multiplied_params: N, each parameter counted once and without the tables that are only looked up:
            GPT-2's positions, and the token embedding unless the output head shares it.
        n_layer: L, the number of blocks.
        n_embd: d, the width of all query heads together.
    """
    return 6 * num_multiplied_params + 12 * n_layer * n_embd * seq_len


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor, kernels: Choice | None = None, **options: Any) -> Tensor:
    """Return the mean cross-entropy in nats over the positions that have a target.

    Args:
        logits_BTV: [B, T, V], any floating dtype.
        targets_BT: [B, T], int64; -100 is left out of the mean.
        kernels: backend; see `zeroshard.kernels.use_kernels`.
        options: ``label_smoothing`` and ``z_loss``, see `zeroshard.kernels.cross_entropy`.

    Returns:
        A scalar in fp32, or in float64 if the logits are. NaN if no position has a target.
    """
    return cross_entropy(
        logits_BTV, targets_BT, ignore_index=IGNORED_TARGET, check_targets=False, kernels=kernels, **options
    )


def projected_loss(
    hidden_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor, kernels: Choice | None = None, **options: Any
) -> Tensor:
    """Return `next_token_loss` of the logits ``hidden @ weight.T``, which are not materialized all at once.

    Exceptions: `zeroshard.kernels.linear_cross_entropy`. ``options``: ``label_smoothing`` and ``z_loss``.
    """
    # Checking targets would wait for the device. Unchecked, one outside the vocabulary makes our kernels' loss NaN.
    return linear_cross_entropy(
        hidden_BTC, weight_VC, targets_BT, ignore_index=IGNORED_TARGET, check_targets=False, kernels=kernels, **options
    )


def fill_normal_(param: Tensor, std: float, seed: int, name: str, part: Part | None = None) -> None:
    """Fill ``param`` with draws from N(0, std^2); other arguments as in `fill_drawn_`."""
    fill_drawn_(param, lambda drawn, generator: drawn.normal_(0.0, std, generator=generator), seed, name, part)


@torch.no_grad()
def fill_drawn_(param: Tensor, draw: Draw, seed: int, name: str, part: Part | None = None) -> None:
    """Fill ``param`` with random numbers; each is a pure function of (seed, name, numel, index in the parameter).

    Numbers are drawn on the CPU in fp32 and then copied, so each device and dtype gets the same ones, rounded. Each
    `DRAWN_AT_ONCE` elements have a generator of their own, so a rank that needs its shard draws little more than that.

    Args:
        param: the unsharded parameter, or its ``part`` [n]; any device and floating dtype, written in place.
        draw: function that fills a tensor [n], in fp32 on the CPU, with draws of the given generator.
        name: the parameter's name in the unsharded model.
        part: range of the flattened parameter that ``param`` is; None: all of it.
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
    """The initial values of a model's parameters, for an engine in which each rank draws only its shard.

    Use it as ``Zero(model, init=InitialValues(model))``; see `zeroshard.zero.DrawsParts`.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def __call__(self, name: str, param: Tensor) -> None:
        """Write the initial values of an unsharded parameter; see `LanguageModel.init_parameter`."""
        self._model.initial_value(name, param)

    def part(self, name: str, values: Tensor, start: int, numel: int) -> None:
        """Write ``values [n]``: the elements from ``start`` of a flattened parameter of ``numel`` elements."""
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
    """In this block, modules are created on the meta device, and the functions of `torch.nn.init` do nothing."""
    with torch.device("meta"), _NothingDrawn():
        yield


def materialize(model: LanguageModel, device: torch.device | str, *, draw: bool = True) -> None:
    """Move a model from the meta device to ``device``: allocate and initialize one parameter at a time.

    Tied parameters stay tied. If ``device`` is ``"meta"``, nothing happens.

    ``draw``: False fills parameters with NaN, because the caller will overwrite them with loaded or received values.
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
