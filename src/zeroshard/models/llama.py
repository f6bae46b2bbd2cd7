"""The LLaMA model: RMSNorm, rotary positions, grouped-query attention, SwiGLU. `decoder` has what is not its own.

    x = embed_tokens[tokens]
    x = x + self_attn(input_layernorm(x));  x = x + mlp(post_attention_layernorm(x))        n_layer times
    logits = lm_head(norm(x))

LLaMA: arXiv:2302.13971; Llama 3: arXiv:2407.21783. Parameter names are Hugging Face's, without the leading
``model.`` and with ``blocks`` for ``layers``. Shapes and the order of rotary pairs are Hugging Face's too, so
its weights load without conversion. No layer has a bias. The papers do not publish initial values: they are GPT-2's.

Shape legend: B batch, T sequence, C width, H query heads, K key and value heads, D width of a head, F width
of the feed-forward layer, V vocabulary; example sizes are those of llama-small with a batch of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from zeroshard.host.errors import UserError
from zeroshard.kernels import Choice, RMSNorm, rope, swiglu
from zeroshard.models.attention import attend_in
from zeroshard.models.cache import LayerCache
from zeroshard.models.config import check_divides, check_most
from zeroshard.models.decoder import Decoder, check_sizes
from zeroshard.models.document_masks import Mask
from zeroshard.models.head import Head
from zeroshard.models.tiles import Tiler
from zeroshard.models.ulysses import SequenceParallel

FFN_MULTIPLE = 256


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a LLaMA.

    Attributes:
        vocab_size: number of token ids.
        seq_len: the longest sequence that the model is meant for. Rotary positions need no parameters, so
            ``forward`` takes longer sequences; ``check_seq_len`` does not.
        n_layer: number of blocks.
        n_head: query heads of a block; divides ``n_embd`` into heads of even width.
        n_kv_head: key and value heads, each shared by ``n_head / n_kv_head`` query heads.
        n_embd: width of the residual stream.
        ffn_hidden: width of the feed-forward layer; 0: the width is computed, see :attr:`ffn_width`.
        rope_theta: base of the rotary wavelengths: 10,000 in LLaMA 1 and 2, 500,000 in Llama 3.
        norm_eps: added to the mean square inside RMSNorm.
        activation_checkpointing: which blocks recompute activations in backward instead of keeping them, by a word of
            the table in `zeroshard.models.recompute`.
        tiles: into how many tiles of tokens a recomputed block's feed-forward layer is cut: ``none``, ``auto`` or a
            number as text; see `zeroshard.models.tiles`.
        tie_embeddings: whether token embedding and output head share one matrix.

    Raises:
        UserError: for a value that cannot be used, with the field's name.
    """

    vocab_size: int
    seq_len: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    ffn_hidden: int = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    activation_checkpointing: str = "none"
    tiles: str = "none"
    tie_embeddings: bool = False
    dropout: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "n_kv_head")
        check_divides(self, "n_kv_head", "n_head")
        if self.head_dim % 2:
            what = f"{self.n_head} leaves heads of odd width {self.head_dim}, and rotary positions turn pairs"
            raise UserError("model.n_head", what, "choose n_head and n_embd so that n_embd / n_head is even")
        if self.ffn_hidden < 0:
            raise UserError("model.ffn_hidden", f"{self.ffn_hidden} is below 0", "give a width, or 0 for 8/3 n_embd")
        check_most(self, "ffn_hidden")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise UserError(f"model.{name}", f"{value} is not positive and finite", "give a positive number")

    @property
    def head_dim(self) -> int:
        """Width of one head, D."""
        return self.n_embd // self.n_head

    @property
    def ffn_width(self) -> int:
        """F: ``ffn_hidden``, or if that is 0 two thirds of 4 ``n_embd``, rounded up to a multiple of 256.

        Two thirds, because SwiGLU has three matrices where a plain feed-forward layer has two.
        """
        if self.ffn_hidden:
            return self.ffn_hidden
        return -(-(8 * self.n_embd // 3) // FFN_MULTIPLE) * FFN_MULTIPLE

    def build(self, seed: int = 0, kernels: Choice = "auto") -> Llama:
        """Build the model of this configuration."""
        return Llama(self, seed, kernels)


def rope_tables(
    num_tokens: int, head_dim: int, theta: float, device: torch.device, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles position * theta^(-2 i / D), i < D / 2 (RoFormer, arXiv:2104.09864).

    Positions begin at ``first``. Each forward pass computes the tables again: they cost next to nothing, and a buffer
    would stay on the meta device, without values, when the model is built there.

    Returns:
        Two fp32 tensors [T, D / 2].
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(first, first + num_tokens, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Causal self-attention; groups of query heads share a key and value head (GQA, arXiv:2305.13245).

    Attributes:
        sequence: the ranks that share each sequence; None: this rank has whole ones.
    """

    sequence: SequenceParallel | None = None

    def __init__(self, config: LlamaConfig, kernels: Choice) -> None:
        super().__init__()
        self.head_dim, self.kernels = config.head_dim, kernels
        kv_width = config.n_kv_head * config.head_dim
        self.q_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k_proj = nn.Linear(config.n_embd, kv_width, bias=False)
        self.v_proj = nn.Linear(config.n_embd, kv_width, bias=False)
        self.o_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Attend from each position to itself and earlier ones, or as ``mask`` allows: [B, T, C] -> [B, T, H, D].

        What the heads found is projected back, by ``o_proj``, in the block's `Block.after_attention`.
        """
        B, T, _ = x.shape  # (8, 2048, 1152)
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, H, T, D]: (8, 18, 2048, 64)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, K, T, D]: (8, 6, 2048, 64)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, K, T, D]: (8, 6, 2048, 64)
        q, k = rope(q, k, cos, sin, kernels=self.kernels)
        sequence = self.sequence
        if cache is not None:
            sequence = None
            k, v, mask = cache.extend(k, v)
        return attend_in(sequence, q, k, v, mask)  # (8, 2048, 18, 64)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig, kernels: Choice) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_proj = nn.Linear(config.n_embd, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position separately: [B, T, C] -> [B, T, F] -> [B, T, C]."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), kernels=self.kernels))


class Block(nn.Module):
    """A pre-norm residual block: attention, then the feed-forward layer (RMSNorm: arXiv:1910.07467)."""

    def __init__(self, config: LlamaConfig, kernels: Choice) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps, kernels=kernels)
        self.self_attn = Attention(config, kernels)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps, kernels=kernels)
        self.mlp = MLP(config, kernels)
        self.tile = Tiler(config.tiles, middle=3 * config.ffn_width)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """[B, T, C] -> [B, T, C].

        ``cos`` and ``sin`` [T, D / 2] are from :func:`rope_tables`, ``mask`` from
        `zeroshard.models.document_masks.mask_of`.
        """
        y = self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return self.tile((self.self_attn.o_proj, self.post_attention_layernorm, self.mlp), self.after_attention, y, x)

    def after_attention(self, y: Tensor, x: Tensor) -> Tensor:
        """[B, T, H, D], [B, T, C] -> [B, T, C]: what is computed by token of the heads' output and the input."""
        mixed = self.self_attn.o_proj(y.flatten(2))  # (8, 2048, 1152)
        # the norm also computes x + mixed and returns it; under autocast mixed is narrower than x
        normed, x = self.post_attention_layernorm(mixed.to(x.dtype), x)
        return x + self.mlp(normed)


class Llama(Decoder[LlamaConfig]):
    """A LLaMA language model."""

    operations = ("rms_norm", "rope", "swiglu", "linear_cross_entropy")
    architecture = "llama"
    embedding = "embed_tokens"
    residual_projections = ("o_proj", "down_proj")

    def add_modules(self, config: LlamaConfig, kernels: Choice) -> None:
        """Make the embedding, the blocks, the final norm and the head."""
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, kernels) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps, kernels=kernels)
        self.lm_head = Head(config.n_embd, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def with_positions(self, x: Tensor, num_seen: int, positions_BT: Tensor | None) -> tuple[Tensor, ...]:
        """Return the embeddings of the tokens [B, T, C], and `rope_tables`.

        Scores depend on differences of rotary positions alone, so a document's positions need not begin at 0.
        """
        config = self.config
        cos, sin = rope_tables(x.shape[1], config.head_dim, config.rope_theta, x.device, num_seen)
        return x, cos, sin  # (8, 2048, 1152)

    @property
    def final_norm(self) -> nn.Module:
        """The norm of the last block's output."""
        return self.norm
