"""`Decoder`, the parts that GPT-2 and LLaMA share: how blocks are called, the loss, and the initial values.

    x = embedding of the tokens
    x = block(x)                        n_layer times, each pre-norm: x + attention(norm(x)), then x + mlp(norm(x))
    logits = lm_head(final_norm(x))

[Note: Loops]
    `torch.compile` gives up a function in which a graph ends inside a loop. So the loop over the blocks has a function
    of its own: where an engine's hooks end the graph at each block, what comes before the loop and what comes after it
    are one graph each. The embedding may be a unit too, so it is called before anything else is computed.

A model's own file says of which modules it consists, what its embedding is, and what happens inside a block.

Shape legend: B batch, T sequence, C width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zeroshard.host.errors import UserError
from zeroshard.kernels import Choice
from zeroshard.models.attention import takes_blocks
from zeroshard.models.base import LanguageModel, Part, fill_constant_, fill_normal_, materialize, shapes_only
from zeroshard.models.cache import KVCache
from zeroshard.models.config import ModelConfig, check_divides, check_most, check_tiles, check_types
from zeroshard.models.document_masks import Mask, mask_of, positions
from zeroshard.models.head import Head, head_loss, with_embedding_and_head
from zeroshard.models.recompute import recompute_blocks, recomputed_blocks
from zeroshard.models.ulysses import SequenceParallel

INIT_STD = 0.02


class DecoderConfig(ModelConfig, Protocol):
    """Interface of the configurations of GPT-2 and LLaMA; a field that one of them lacks has a fixed value there."""

    @property
    def tie_embeddings(self) -> bool:
        """Whether token embedding and output head share one matrix."""

    @property
    def dropout(self) -> float:
        """Probability with which activations are zeroed in training."""


def check_sizes(config: DecoderConfig, *more: str) -> None:
    """Raise UserError for a field of the wrong type, a size outside its limits, or an unknown kind of recomputation.

    ``more``: names of sizes that only this configuration has.
    """
    check_types(config)
    for name in ("vocab_size", "seq_len", "n_layer", "n_head", *more, "n_embd"):
        value = getattr(config, name)
        if value < 1:
            raise UserError(f"model.{name}", f"{value} is below 1", "give a positive integer")
        check_most(config, name)
    check_divides(config, "n_head", "n_embd")
    recomputed_blocks(config.activation_checkpointing, config.n_layer)
    check_tiles(config.tiles, config.activation_checkpointing)


C = TypeVar("C", bound=DecoderConfig)


class Decoder(LanguageModel, Generic[C]):
    """A decoder of pre-norm blocks.

    It is built on the default device. Under ``torch.device("meta")`` parameters have shapes but no values;
    :meth:`init_parameter` writes the values that a parameter would have had.

    Attributes:
        embedding: name of the token embedding, whose matrix ``lm_head`` shares if ``config.tie_embeddings``
            (arXiv:1608.05859).
        residual_projections: names of the layers that project back into the residual stream.
        lm_head: the output head.
    """

    embedding: ClassVar[str]
    residual_projections: ClassVar[tuple[str, ...]]
    lm_head: Head
    takes_positions = True
    takes_loss_options = True
    keeps_examples_apart = True
    shares_sequences = True
    traces_on_meta = True

    def __init__(self, config: C, seed: int = 0, kernels: Choice = "auto") -> None:
        super().__init__()
        self._config, self.seed, self.kernels = config, seed, kernels
        device = torch.get_default_device()
        with shapes_only():
            self.add_modules(config, kernels)
        tables = {each.weight for each in self.modules() if isinstance(each, nn.Embedding)} - {self.lm_head.weight}
        self.num_multiplied_params = sum(param.numel() for param in self.parameters() if param not in tables)
        materialize(self, device)
        recompute_blocks(self.blocks, config.activation_checkpointing, random=config.dropout > 0)

    @abstractmethod
    def add_modules(self, config: C, kernels: Choice) -> None:
        """Make the embedding, ``blocks``, the final norm and ``lm_head``, in the order of the parameters."""

    @abstractmethod
    def with_positions(self, x: Tensor, num_seen: int, positions_BT: Tensor | None) -> tuple[Tensor, ...]:
        """Return the first block's input [B, T, C], and what each block takes beside it.

        Args:
            x: embeddings of the tokens [B, T, C].
            num_seen: number of tokens before them, in a cache or on ranks that share the sequence.
            positions_BT: position of each token in its document; None: counted from ``num_seen``.
        """

    @property
    @abstractmethod
    def final_norm(self) -> nn.Module:
        """The norm of the last block's output: [B, T, C] -> [B, T, C]."""

    @property
    def config(self) -> C:
        """The configuration that the model was built from."""
        return self._config

    @property
    def units(self) -> list[nn.Module]:
        """Embedding, blocks and head; only the blocks if embedding and head share one matrix."""
        return with_embedding_and_head(self, self.get_submodule(self.embedding), list(self.blocks), self.lm_head)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        cache: KVCache | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the loss if targets are given, else logits; see :meth:`LanguageModel.forward`."""
        sequence = self.shared_sequence if cache is None else None
        num_seen = 0 if cache is None else cache.num_tokens
        if sequence is not None:
            num_seen = sequence.first(tokens_BT.shape[1])
        x = self.get_submodule(self.embedding)(tokens_BT)  # first, as a graph may end here: [Note: Loops]
        begins_BT: Tensor | None = None  # documents of whole sequences
        if positions_BT is not None:
            begins_BT = (positions_BT if sequence is None else sequence.gather(positions_BT)) == 0
        elif self.eos_id is not None and cache is None:
            whole_BT = tokens_BT if sequence is None else sequence.gather(tokens_BT)
            begins_BT, positions_BT = whole_BT == self.eos_id, positions(whole_BT, self.eos_id)
            if sequence is not None:
                (positions_BT,) = sequence.cut(positions_BT)
        x, *beside = self.with_positions(x, num_seen, positions_BT)
        masks = () if begins_BT is None else (self._mask(begins_BT, x),)
        x = self.through_blocks(x, beside, masks, cache)
        if targets_BT is None:
            return self.lm_head(self.final_norm(x))  # [B, T, V]
        return head_loss(self.lm_head, x, targets_BT, self.kernels, self.final_norm, **self.loss_options)

    def through_blocks(
        self, x: Tensor, beside: Sequence[Tensor], masks: Sequence[Mask], cache: KVCache | None
    ) -> Tensor:
        """Return the output of the last block [B, T, C]; a loop in which a graph may end: [Note: Loops]."""
        for layer, block in enumerate(self.blocks):
            x = block(x, *beside, *masks) if cache is None else block(x, *beside, None, cache.layers[layer])
        return x

    def _mask(self, begins_BT: Tensor, x: Tensor) -> Mask:
        config = self._config
        dropout = config.dropout if self.training else 0.0
        by_blocks = takes_blocks(x, begins_BT.shape[1], config.n_embd // config.n_head, dropout)
        return mask_of(begins_BT, by_blocks=by_blocks)

    def attach_sequence(self, sequence: SequenceParallel) -> None:
        """Give each block's attention the ranks."""
        sequence.require_heads(self._config.n_head)
        for module in self.blocks.modules():
            if hasattr(type(module), "sequence"):
                module.sequence = sequence  # ty: ignore[invalid-assignment]

    def init_parameter(self, name: str, param: Tensor, seed: int | None = None, part: Part | None = None) -> None:
        """Write GPT-2's initial values, by name; see :meth:`LanguageModel.init_parameter`.

        Biases 0, norm weights 1, matrices and embeddings N(0, 0.02^2), and the projections back into the residual
        stream smaller by 1 / sqrt(2 n_layer), because so many of them add up there.
        """
        seed = self.seed if seed is None else seed
        module_name, _, kind = name.rpartition(".")
        layer = module_name.rpartition(".")[2]
        if self._config.tie_embeddings and name == "lm_head.weight":
            name = f"{self.embedding}.weight"
        if kind == "bias":
            fill_constant_(param, 0.0)
        elif layer.startswith("ln_") or layer.endswith("norm"):
            fill_constant_(param, 1.0)
        elif layer in self.residual_projections:
            fill_normal_(param, INIT_STD / (2 * self._config.n_layer) ** 0.5, seed, name, part)
        else:
            fill_normal_(param, INIT_STD, seed, name, part)
