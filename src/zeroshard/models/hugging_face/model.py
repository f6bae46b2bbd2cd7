"""A causal language model of `transformers` behind our `LanguageModel` interface.

    loss = cross_entropy(head(base(tokens)), targets)

The modules are `transformers`' own, with parameters on the meta device until they are materialized. Names in
checkpoints are theirs with the prefix ``hf.``. If the logits are the product with the head's matrix and nothing else,
the head computes the loss too, so that the logits need not exist all at once. Otherwise `transformers` computes them.

Shape legend: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import cache as cached
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.host.errors import UserError
from zeroshard.kernels import Choice
from zeroshard.models.base import LanguageModel, Part, flops_per_token, materialize, next_token_loss
from zeroshard.models.cache import KVCache
from zeroshard.models.document_masks import positions
from zeroshard.models.head import Head, head_loss, with_embedding_and_head
from zeroshard.models.hugging_face.config import HuggingFaceConfig
from zeroshard.models.hugging_face.folder import missing_transformers, weight_folder
from zeroshard.models.hugging_face.recorded_init import built_without_values
from zeroshard.models.hugging_face.shared_sequences import share
from zeroshard.models.hugging_face.weights import FileWeights
from zeroshard.models.quiet_import import quiet_import
from zeroshard.models.recompute import recompute_blocks
from zeroshard.models.tiles import tile_mlps
from zeroshard.models.ulysses import SequenceParallel

INNER = "hf."  # prefix of `transformers`' parameter names
# Model types whose logits are the head's product and nothing else, which `tests/train/test_hugging_face.py` checks.
_PLAIN_HEADS = frozenset(
    {
        *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "olmoe"),
        *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
    }
)
# Model types whose traces on the meta device are those of fake tensors, which `tests/lab/test_model_trace.py` checks.
TRACE_ON_META = frozenset(
    {
        *("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2"),
        *("qwen3", "smollm3"),
    }
)


class HuggingFaceCache(KVCache):
    """A key-value cache that wraps the cache which `transformers` uses for the model."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(0, max_tokens)
        self.inner: Any = None  # created by the model's first forward
        self.num_seen = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache."""
        return self.num_seen


class HuggingFaceModel(LanguageModel):
    """A model of `transformers`; on the default device, or without values under ``torch.device("meta")``.

    Attributes:
        hf: the model of `transformers`.

    Raises:
        UserError: `transformers` is not installed, or cannot build the model as configured, for example because it
            lacks the attention implementation.
    """

    takes_positions = True

    def __init__(self, config: HuggingFaceConfig, seed: int = 0, kernels: Choice = "auto") -> None:
        super().__init__()
        self._config, self.seed, self.kernels = config, seed, kernels
        device = torch.get_default_device()
        self.hf, self._rules = _built(config)
        _obey()
        self._blocks_at = _find_blocks(self.hf, config.n_layer)
        theirs: Any = self.hf.config
        self.architecture = theirs.model_type
        self.balances_experts = bool(getattr(theirs, "output_router_logits", False))
        self.takes_loss_options = not self.balances_experts
        own_code = type(self.hf).__module__.startswith("transformers.")
        self.traces_on_meta = own_code and self.architecture in TRACE_ON_META
        self._head = _plain_head(self.hf)
        if self._head is not None:
            _put_head(self.hf, self._head)
        self.operations = ("cross_entropy",) if self._head is None else ("linear_cross_entropy",)  # ty: ignore[invalid-attribute-access]
        self.num_multiplied_params = _num_multiplied(self.hf)
        materialize(self, device)
        if config.tiles != "none":
            tile_mlps(self.blocks, config.tiles)
        # Blocks may draw random numbers without a module for it: OPT's dropout, the noise of Mixtral's and PhiMoE's
        # routers. Neither modules nor the configuration say so for all of them.
        recompute_blocks(self.blocks, config.activation_checkpointing, random=True)

    @property
    def config(self) -> HuggingFaceConfig:
        """The configuration that the model was built from."""
        return self._config

    @property
    def lora_root(self) -> nn.Module:
        """The model of `transformers`: its layers get the adapters."""
        return self.hf

    @property
    def blocks(self) -> nn.ModuleList:  # ty: ignore[incompatible-property-override]
        """The repeated blocks; a property rather than a submodule, so that each parameter has only one name."""
        found = self.hf.get_submodule(self._blocks_at)
        assert isinstance(found, nn.ModuleList)
        return found

    @property
    def units(self) -> list[nn.Module]:
        """Embedding, blocks and head; embedding and head only if they are plain modules that share no parameter.

        In a model whose code is not `transformers`' own they stay in the root unit, because that code may read their
        weights without calling them.
        """
        ends = (None, None)
        if type(self.hf).__module__.startswith("transformers."):
            found: Any = self.hf
            ends = (found.get_input_embeddings(), found.get_output_embeddings())
        embedding, head = ends
        return with_embedding_and_head(
            self.hf,
            embedding if isinstance(embedding, nn.Embedding) else None,
            list(self.blocks),
            head if isinstance(head, nn.Linear) else None,
        )

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        cache: KVCache | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the loss if targets are given, else logits; see :meth:`LanguageModel.forward`."""
        hf: Any = self.hf
        given: dict[str, Any] = {"input_ids": tokens_BT, "use_cache": cache is not None}
        if isinstance(cache, HuggingFaceCache):
            given[_name_of_cache(type(hf))] = cache.inner
        sequence = self.shared_sequence
        if positions_BT is None and self.eos_id is not None and cache is None:
            positions_BT = positions(tokens_BT if sequence is None else sequence.gather(tokens_BT), self.eos_id)
            if sequence is not None:
                (positions_BT,) = sequence.cut(positions_BT)
        rows = tokens_BT.shape
        apart = positions_BT is not None
        if apart and "flash" in hf.config._attn_implementation:  # it finds documents in one row alone
            given["input_ids"], positions_BT = tokens_BT.view(1, -1), positions_BT.view(1, -1)
            targets_BT = None if targets_BT is None else targets_BT.view(1, -1)
        if apart:
            given["position_ids"] = positions_BT
        with _one_document(not apart), nullcontext() if sequence is None or cache is None else sequence.paused():
            if targets_BT is None:
                output = hf(**given)
            elif self.balances_experts:  # `transformers` adds the load-balancing term to the loss
                return hf(**given, labels=targets_BT, shift_labels=targets_BT).loss
            elif self._head is None:
                logits_BTV = hf(**given).logits
                return next_token_loss(logits_BTV, targets_BT, self.kernels, **self.loss_options)
            else:
                hidden_BTC = hf.base_model(**given)[0]
                head = self.hf.get_submodule(self._head)
                return head_loss(head, hidden_BTC, targets_BT, self.kernels, None, **self.loss_options)
        if isinstance(cache, HuggingFaceCache):
            cache.inner = output[_name_of_cache(type(hf))]
            cache.num_seen += tokens_BT.shape[1]
        return output.logits.view(*rows, -1)

    def attach_sequence(self, sequence: SequenceParallel) -> None:
        """Share sequences through the attention interface of `transformers`."""
        share(self.hf, sequence)

    def compare_rows(self, sequence: SequenceParallel) -> None:
        """The model of `transformers` does, in `share`."""

    def new_cache(self) -> KVCache:
        """Return an empty key-value cache."""
        return HuggingFaceCache(self._config.seq_len)

    def init_parameter(self, name: str, param: Tensor, seed: int | None = None, part: Part | None = None) -> None:
        """Write initial values by name; see :meth:`LanguageModel.init_parameter`.

        They are read from the files, or with ``from_config`` drawn from the distributions that `transformers` uses.
        """
        name = name.removeprefix(INNER)
        if self._config.from_config:
            self._rules[name].fill(param, self.seed if seed is None else seed, name, part)
        else:
            self._weights.fill(name, param.detach().view(-1), part.start if part else 0)

    def check_initial_values(self) -> None:
        """Raise UserError if the files lack a weight; also fill persistent buffers, which are small, from the files."""
        if self._config.from_config:
            return
        for name, buffer in self.hf.named_buffers():
            if name in self._weights:
                values = torch.empty(buffer.numel(), dtype=buffer.dtype)
                self._weights.fill(name, values)
                buffer.copy_(values.view(buffer.shape))

    def require_positions(self, setting: str) -> None:
        """Raise UserError if this release of `transformers` does not find the model's documents by their positions."""
        modelling = sys.modules[type(self.hf).__module__]
        base: Any = self.hf.base_model
        asked = inspect.signature(base.forward).parameters
        if "position_ids" not in asked or not hasattr(modelling, "create_causal_mask"):
            what = f"{self._config.source} does not take positions for documents in this transformers"
            raise UserError(setting, what, "leave it out")

    def num_flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs per token, counted as if each layer's attention saw all earlier tokens."""
        theirs: Any = self.hf.config
        head_dim = getattr(theirs, "head_dim", None) or self._config.n_embd // self._config.n_head
        saved = 2 * self.num_frozen_multiplied_params  # backward computes no gradients of frozen weights
        width = self._config.n_head * head_dim
        return flops_per_token(self.num_multiplied_params, self._config.n_layer, width, seq_len) - saved

    @cached_property
    def _weights(self) -> FileWeights:
        return FileWeights(self.hf, weight_folder(self._config.source))


def _built(config: HuggingFaceConfig) -> tuple[nn.Module, Any]:
    try:
        quiet_import("transformers.modeling_utils")  # what each model imports, quantisation packages among it
        quiet_import("transformers.core_model_loading")  # which releases before 5 do not have
        auto: Any = quiet_import("transformers.models.auto.modeling_auto").AutoModelForCausalLM
    except ImportError:
        raise missing_transformers() from None
    theirs = config.theirs
    theirs.use_cache = False
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": config.trust_remote_code}
    if config.attention != "auto":
        options["attn_implementation"] = config.attention
    try:
        return built_without_values(lambda: auto.from_config(theirs, **options))
    except UserError:
        raise
    except ImportError as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise UserError("model.attention", f"{config.attention} cannot be had here ({first})", "use sdpa") from None
    except Exception as error:  # noqa: BLE001 -- each model checks its configuration in its own way
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        field, todo = ("model.attention", "use eager") if "attention" in first else ("model", "check its config.json")
        raise UserError(field, f"transformers cannot build {config.source} ({first})", todo) from None


def _find_blocks(hf: nn.Module, num_blocks: int) -> str:
    """Return the name of the list of blocks: the list of ``num_blocks`` modules with the most parameters."""
    lists = {
        name: sum(param.numel() for param in module.parameters())
        for name, module in hf.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks
    }
    if not lists:
        what = f"no list of {num_blocks} blocks was found in a {type(hf).__name__}"
        raise UserError("model", what, "use zeroshard.Zero with the module itself")
    return max(lists, key=lists.__getitem__)


def _plain_head(hf: Any) -> str | None:
    """Return the head's name if the logits are the product with its matrix and nothing else; otherwise None."""
    head, config = hf.get_output_embeddings(), hf.config
    capped = getattr(config, "final_logit_softcapping", None)
    if config.model_type not in _PLAIN_HEADS or capped or type(head) is not nn.Linear or head.bias is not None:
        return None
    if hf.base_model is hf or not type(hf).__module__.startswith("transformers."):
        return None
    return next(name for name, module in hf.named_modules() if module is head)


def _put_head(hf: nn.Module, name: str) -> None:
    """Replace the head by a `Head`, which also computes the loss; it keeps the parameter and its name."""
    old: Any = hf.get_submodule(name)
    head = Head(old.in_features, old.out_features, device="meta")
    head.weight = old.weight
    hf.set_submodule(name, head)


def _num_multiplied(hf: Any) -> int:
    """Return N of `flops_per_token`: without lookup tables, and with the share of expert weights that a token uses."""
    head = hf.get_output_embeddings()
    kept = None if head is None else head.weight
    looked_up = {m.weight for m in hf.modules() if isinstance(m, nn.Embedding) and m.weight is not kept}
    config = hf.config
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or num_experts
    total = 0
    for name, param in hf.named_parameters():
        if param in looked_up:
            continue
        of_experts = ".experts." in name and num_experts
        total += param.numel() * chosen // num_experts if of_experts else param.numel()
    return total


@cached
def _name_of_cache(kind: type[nn.Module]) -> str:
    """The name under which models of this class take and return their key-value cache; 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


class _Documents(threading.local):  # the compiler cannot read a ContextVar
    def __init__(self) -> None:
        self.is_one = False  # of the instance: a graph of the first call would be guarded by its absence there


_documents = _Documents()


@contextmanager
def _one_document(is_one: bool) -> Generator[None]:
    """In this block, if ``is_one``, `transformers` does not search positions for documents: that would synchronize."""
    before, _documents.is_one = _documents.is_one, is_one
    try:
        yield
    finally:
        _documents.is_one = before


@cached
def _obey() -> None:
    """Make the function by which `transformers` finds documents in positions obey `_one_document`."""
    masking: Any = quiet_import("transformers.masking_utils")
    finds = masking.find_packed_sequence_indices

    def asked(position_ids: Tensor) -> Tensor | None:
        return None if _documents.is_one else finds(position_ids)

    masking.find_packed_sequence_indices = asked
