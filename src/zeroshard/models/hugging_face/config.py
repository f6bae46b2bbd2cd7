"""The configuration of a Hugging Face model, from its ``config.json`` alone.

A run stores that file's text, so that opening the run later needs neither the folder nor the hub.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zeroshard.host.errors import UserError, shown
from zeroshard.host.lazily import loaded
from zeroshard.models.config import check_tiles
from zeroshard.models.hugging_face.folder import PREFIX, config_text, missing_transformers, source_of
from zeroshard.models.quiet_import import quiet_import
from zeroshard.models.recompute import recomputed_blocks

if TYPE_CHECKING:
    from zeroshard.kernels import Choice
    from zeroshard.models.base import LanguageModel

ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flex_attention")
# Fields that may be changed, with their names in `transformers`.
_CHANGED = {"vocab_size": "vocab_size", "seq_len": "max_position_embeddings", "n_layer": "num_hidden_layers"}
# Keys that do not affect what a model computes.
_ABOUT = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"})
_NO_LIMIT = 2**20  # tokens: sequence length of models whose configuration states no limit
_WHOLE_MODEL = "give the folder of a causal language model"


@dataclass(frozen=True)
class HuggingFaceConfig:
    """Configuration of a model that `transformers` builds."""

    source: str  # local folder, or name on the hub, from which weights and tokenizer are read
    config_json: str  # text of ``config.json``
    # vocab_size, seq_len, n_layer, n_head, n_embd: sizes that ``config_json`` states
    vocab_size: int
    seq_len: int
    n_layer: int
    n_head: int
    n_embd: int
    # one of `ATTENTION`; ``auto``: PyTorch's own (SDPA) if the model supports it, else ``eager``
    attention: str = "auto"
    activation_checkpointing: str = "none"  # blocks that are recomputed, see `zeroshard.models.recompute`
    tiles: str = "none"  # how feed-forward layers are cut along the sequence, see `zeroshard.models.tiles`
    from_config: bool = False  # whether initial values are drawn instead of read from weights
    trust_remote_code: bool = False  # whether the model's own Python files may be executed

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION:
            what = f"{shown(self.attention)} is not a choice"
            raise UserError("model.attention", what, f"choose one of {', '.join(ATTENTION)}")
        recomputed_blocks(self.activation_checkpointing, self.n_layer)
        check_tiles(self.tiles, self.activation_checkpointing)

    @property
    def theirs(self) -> Any:
        """A new copy of `transformers`' own configuration, because building a model modifies it."""
        return copy.deepcopy(_theirs(self.source, self.config_json, self.trust_remote_code))

    @property
    def architecture(self) -> dict[str, object]:
        """The keys of ``config.json`` that affect what the model computes, with their values."""
        return {key: value for key, value in json.loads(self.config_json).items() if key not in _ABOUT}

    @property
    def changes(self) -> dict[str, object]:
        """The overrides of this configuration: ``config_of(f"hf:{source}", changes)`` equals it."""
        names = ("config_json", "attention", "activation_checkpointing", "tiles", "from_config", "trust_remote_code")
        return {name: getattr(self, name) for name in names}

    def build(self, seed: int = 0, kernels: Choice = "auto") -> LanguageModel:
        """Build the model of this configuration."""
        return loaded("zeroshard.models.hugging_face.model", "HuggingFaceModel")(self, seed, kernels)


def config_of(name: str, overrides: Mapping[str, object], num_tokens: int | None = None) -> HuggingFaceConfig:
    """Return the configuration of ``hf:FOLDER_OR_NAME``.

    Args:
        name: the model's name, with ``hf:``.
        overrides: fields of `HuggingFaceConfig` that replace what ``config.json`` says.
        num_tokens: number of ids of the data's tokenizer; the model must have at least as many.

    Raises:
        UserError: there is no such model, `transformers` has no causal language model for it, or it has no such field.
    """
    source, given = source_of(name), dict(overrides)
    sizes = {key: given.pop(key) for key in _CHANGED if key in given}
    known = HuggingFaceConfig.__dataclass_fields__.keys() - {"source", "n_head", "n_embd"}
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        todo = f"change its {_CONFIG_FILE}, or leave it out; known: {', '.join(sorted(known))}"
        raise UserError(f"model.{unknown}", f"{name} takes its own from {_CONFIG_FILE}", todo)
    kept = str(given.pop("config_json", ""))
    text = kept or config_text(source)
    trusted = bool(given.get("trust_remote_code"))
    theirs = _theirs(source, text, trusted)
    changed = {key: value for key, value in sizes.items() if value != _size(theirs, key)}
    if set(changed) - {"seq_len"} and not (given.get("from_config") or kept):
        key = next(key for key in changed if key != "seq_len")
        what = f"{changed[key]} is not the {_size(theirs, key)} of {source}'s weights"
        raise UserError(f"model.{key}", what, "leave it out, or add --model.from-config to train from scratch")
    if changed:
        text = _with_sizes(text, theirs, changed)
        theirs = _theirs(source, text, trusted)
    facts = {key: _size(theirs, key) for key in ("vocab_size", "seq_len", "n_layer")}
    if num_tokens is not None and num_tokens > facts["vocab_size"]:
        what = f"{source} has {facts['vocab_size']:,} ids, and the data's tokenizer {num_tokens:,}"
        raise UserError("data.tokenizer", what, "take the model's own tokenizer, or data made with it")
    heads, width = (_number(theirs, key) for key in ("num_attention_heads", "hidden_size"))
    return HuggingFaceConfig(source, text, **facts, n_head=heads, n_embd=width, **given)  # ty: ignore[invalid-argument-type]


_CONFIG_FILE = "config.json"


def name_and_changes(config: HuggingFaceConfig) -> tuple[str, dict[str, object]]:
    """Return the model's name with ``hf:``, and its overrides, as settings state them."""
    return PREFIX + config.source, config.changes


@lru_cache(maxsize=32)
def _theirs(source: str, text: str, trust_remote_code: bool) -> Any:
    raw = json.loads(text)
    try:
        auto = quiet_import("transformers.models.auto.configuration_auto")
        causal = quiet_import("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        raise missing_transformers() from None
    kind = raw.get("model_type")
    remote = isinstance(raw.get("auto_map"), Mapping) and "AutoModelForCausalLM" in raw["auto_map"]
    if remote and (trust_remote_code or kind not in auto.CONFIG_MAPPING):
        return _of_remote_code(auto, source, trust_remote_code)
    if kind not in auto.CONFIG_MAPPING:
        what = f"{_CONFIG_FILE} of {source} has model_type {shown(kind)}, which this transformers does not know"
        raise UserError("model", what, "install a newer transformers, or take another model")
    _require_causal(source, raw, causal)
    _require_no_kernels(source, raw, trust_remote_code)
    try:
        config = auto.CONFIG_MAPPING[kind].from_dict(raw)
    except Exception as error:  # noqa: BLE001 -- each configuration checks itself in its own way
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError("model", f"{_CONFIG_FILE} of {source} cannot be used ({first})", "fetch it again") from None
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        what = f"{source} ({kind}) is more than a causal language model of text"
        raise UserError("model", what, "take a text model of its family")
    return config


def _of_remote_code(auto: Any, source: str, trusted: bool) -> Any:
    if not trusted:
        what = f"{source} needs Python code of its own, which would be executed"
        raise UserError("model", what, "add --model.trust-remote-code where you trust it")
    try:
        return auto.AutoConfig.from_pretrained(source, trust_remote_code=True)
    except Exception as error:  # noqa: BLE001 -- somebody's code may raise anything
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError("model", f"the code of {source} cannot be used ({first})", "see its page") from None


def _require_causal(source: str, raw: Mapping[str, Any], causal: Mapping[str, Any]) -> None:
    """Raise UserError if `transformers` has no causal language model of this kind, or the weights are not of one."""
    kind = raw["model_type"]
    if kind not in causal:
        raise UserError("model", f"{source} ({kind}) has no causal language model head", _WHOLE_MODEL)
    classes = {name for value in causal.values() for name in ([value] if isinstance(value, str) else value)}
    said = raw.get("architectures")
    if isinstance(said, list) and said and not classes.intersection(map(str, said)):
        raise UserError("model", f"{source} is a {said[0]}, without a causal language model head", _WHOLE_MODEL)


def _require_no_kernels(source: str, raw: Mapping[str, Any], trusted: bool) -> None:
    """Raise UserError if ``config.json`` names kernels of the hub, which `transformers` would fetch and import."""
    for key, value in raw.items():
        if key.strip("_").endswith("_implementation") and "/" in str(value) and not trusted:
            what = f"{_CONFIG_FILE} of {source} names the code {shown(value)} as its {key}"
            raise UserError("model", what, "remove that key, or add --model.trust-remote-code where you trust it")


def _number(config: Any, key: str) -> int:
    found = getattr(config, key, None)
    if isinstance(found, list | tuple):  # one number for each block
        found = max(found, default=None)
    if not isinstance(found, int) or found < 1:
        raise UserError("model", f"{_CONFIG_FILE} has {key} {shown(found)}", _WHOLE_MODEL)
    return found


def _size(config: Any, key: str) -> int:
    if key == "seq_len" and not isinstance(getattr(config, _CHANGED[key], None), int):
        return _NO_LIMIT
    return _number(config, _CHANGED[key])


def _with_sizes(text: str, theirs: Any, changed: Mapping[str, object]) -> str:
    raw = json.loads(text)
    for key, value in changed.items():
        theirs_key = getattr(theirs, "attribute_map", {}).get(_CHANGED[key], _CHANGED[key])
        raw[theirs_key] = value
    kinds = raw.get("layer_types")
    if "n_layer" in changed and isinstance(kinds, list) and kinds:  # one for each block: repeat the pattern
        raw["layer_types"] = [kinds[place % len(kinds)] for place in range(int(str(changed["n_layer"])))]
    return json.dumps(raw, separators=(",", ":"))
