"""The GPT-2 model: embeddings, pre-norm blocks, tied head. What it shares with other models is in `decoder`.

    x = wte[tokens] + wpe[0..T-1]
    x = x + attn(ln_1(x));  x = x + mlp(ln_2(x))        n_layer times
    logits = ln_f(x) @ wte.T

"Language Models are Unsupervised Multitask Learners", Radford et al. 2019. Parameter names are GPT-2's own,
with ``blocks`` for ``h``. Matrices are ``nn.Linear``'s, so they are the transposes of the published ones.

Shape legend: B batch, T sequence, C width, H heads, D width of a head, V vocabulary; example sizes are those
of gpt2-124m with a batch of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.host.errors import UserError, shown
from zeroshard.kernels import Choice, LayerNorm
from zeroshard.models.attention import attend_in
from zeroshard.models.cache import LayerCache
from zeroshard.models.decoder import Decoder, check_sizes
from zeroshard.models.document_masks import Mask
from zeroshard.models.head import Head
from zeroshard.models.tiles import Tiler
from zeroshard.models.ulysses import SequenceParallel

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}  # with torch's name of the approximation
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2; the defaults are GPT-2's, except for dropout.

    Attributes:
        vocab_size: number of token ids.
        seq_len: number of rows of the position table, and so the longest sequence.
        n_layer: number of blocks.
        n_head: attention heads of a block; divides ``n_embd``.
        n_embd: width of the residual stream.
        bias: whether matrices and layer norms have biases.
        dropout: probability in [0, 1) on embeddings, attention weights and residual branches. GPT-2 used 0.1;
            use 0 for a model that sees each token about once.
        activation_checkpointing: which blocks recompute activations in backward instead of keeping them, by a word of
            the table in `zeroshard.models.recompute`.
        tiles: into how many tiles of tokens a recomputed block's feed-forward layer is cut: ``none``, ``auto`` or a
            number as text; see `zeroshard.models.tiles`.
        activation: between the two matrices of a feed-forward layer: ``gelu_tanh``, the approximation that GPT-2 has,
            or ``gelu``, the exact one, which nanoGPT has.

    Raises:
        UserError: for a value that cannot be used, with the field's name.
    """

    vocab_size: int
    seq_len: int
    n_layer: int
    n_head: int
    n_embd: int
    bias: bool = True
    dropout: float = 0.0
    activation_checkpointing: str = "none"
    tiles: str = "none"
    activation: str = "gelu_tanh"
    tie_embeddings: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.activation not in ACTIVATIONS:
            todo = f"choose one of {', '.join(ACTIVATIONS)}"
            raise UserError("model.activation", f"{shown(self.activation)} is not a choice", todo)
        if not 0.0 <= self.dropout < 1.0:
            raise UserError("model.dropout", f"{self.dropout} is outside [0, 1)", "give a probability below 1")

    def build(self, seed: int = 0, kernels: Choice = "auto") -> GPT2:
        """Build the model of this configuration."""
        return GPT2(self, seed, kernels)


class Attention(nn.Module):
    """Causal self-attention, all heads in one product: softmax(q k^T / sqrt(D)) v.

    Attributes:
        sequence: the ranks that share each sequence; None: this rank has whole ones.
    """

    sequence: SequenceParallel | None = None

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_head, self.head_dim, self.dropout = config.n_head, config.n_embd // config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: LayerCache | None = None) -> Tensor:
        """Attend from each position to itself and earlier ones, or as ``mask`` allows: [B, T, C] -> [B, T, H, D].

        What the heads found is projected back, by ``c_proj``, in the block's `Block.after_attention`.
        """
        B, T, _ = x.shape  # (8, 1024, 768)
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, self.head_dim)  # (8, 1024, 36, 64)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)  # each [B, H, T, D]: (8, 12, 1024, 64)
        sequence = self.sequence
        if cache is not None:
            sequence = None
            k, v, mask = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        return attend_in(sequence, q, k, v, mask, dropout=dropout)  # (8, 1024, 12, 64)


class MLP(nn.Module):
    """Two matrices with a GELU between them (arXiv:1606.08415)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.approximate = ACTIVATIONS[config.activation]
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position separately: [B, T, C] -> [B, T, 4 C] -> [B, T, C]."""
        return self.drop(self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate)))


class Block(nn.Module):
    """A pre-norm residual block: attention, then the feed-forward layer."""

    def __init__(self, config: GPT2Config, kernels: Choice) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, LAYER_NORM_EPS, bias=config.bias, kernels=kernels)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, LAYER_NORM_EPS, bias=config.bias, kernels=kernels)
        self.mlp = MLP(config)
        self.tile = Tiler(config.tiles, middle=8 * config.n_embd, random=config.dropout > 0)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: LayerCache | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]; ``mask`` from `zeroshard.models.document_masks.mask_of`."""
        y = self.attn(self.ln_1(x), mask, cache)
        return self.tile((self.attn.c_proj, self.ln_2, self.mlp), self.after_attention, y, x)

    def after_attention(self, y: Tensor, x: Tensor) -> Tensor:
        """[B, T, H, D], [B, T, C] -> [B, T, C]: what is computed by token of the heads' output and the input."""
        mixed = self.attn.drop(self.attn.c_proj(y.flatten(2)))  # (8, 1024, 768)
        # the norm also computes x + mixed and returns it; under autocast mixed is narrower than x
        normed, x = self.ln_2(mixed.to(x.dtype), x)
        return x + self.mlp(normed)


class GPT2(Decoder[GPT2Config]):
    """A GPT-2 language model; ``lm_head.weight`` *is* ``wte.weight``: one parameter under two names."""

    operations = ("layer_norm", "linear_cross_entropy")
    architecture = "gpt2"
    embedding = "wte"
    residual_projections = ("c_proj",)

    def add_modules(self, config: GPT2Config, kernels: Choice) -> None:
        """Make the two embeddings, the blocks, the final norm and the head."""
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.seq_len, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, kernels) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, LAYER_NORM_EPS, bias=config.bias, kernels=kernels)
        self.lm_head = Head(config.n_embd, config.vocab_size)
        self.lm_head.weight = self.wte.weight

    def with_positions(self, x: Tensor, num_seen: int, positions_BT: Tensor | None) -> tuple[Tensor, ...]:
        """Return the sum of the embeddings of tokens and positions, [B, T, C].

        Raises:
            UserError: for sequences longer than the position table.
        """
        num_tokens = num_seen + x.shape[1]
        self.check_seq_len(num_tokens)
        if positions_BT is None:
            positions_BT = torch.arange(num_seen, num_tokens, device=x.device)
        return (self.drop(x + self.wpe(positions_BT)),)  # (8, 1024, 768)

    @property
    def final_norm(self) -> nn.Module:
        """The norm of the last block's output."""
        return self.ln_f
