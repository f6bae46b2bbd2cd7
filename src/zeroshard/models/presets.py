"""Models by name: `PRESETS`, a table of sizes, and functions that turn a name and a few changes into a model.

A new model is one file in this folder, with a configuration class and a `LanguageModel`, and one row of `PRESETS`.
Error messages, ``--help`` and the checks of settings read the rows, without importing torch.
``--model module:Class`` is a user's own configuration class, created with its defaults. ``hf:FOLDER_OR_NAME`` is a
model that `transformers` builds, see `zeroshard.models.hugging_face`.

Sizes of GPT-2: Radford et al. 2019, as released (350m: "medium"); 7b: LLaMA, arXiv:2302.13971, table 2;
8b: Llama 3, arXiv:2407.21783, table 3; 1b: Llama 3.2's published configuration, without its RoPE scaling
beyond 8,192 tokens. The demo and the smaller LLaMAs are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zeroshard.host.errors import UserError, nearest_name
from zeroshard.host.lazily import is_address, loaded, made_at
from zeroshard.models.config import ModelConfig
from zeroshard.models.hugging_face.folder import is_hugging_face

if TYPE_CHECKING:
    from zeroshard.kernels import Choice
    from zeroshard.models.adapters import Lora
    from zeroshard.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Preset:
    """A row of `PRESETS`: a configuration class, and the arguments that it is created with."""

    # ``module:Class`` of the configuration, or the class itself; see `zeroshard.models.config.ModelConfig`
    factory: str | Callable[..., ModelConfig]
    sizes: Mapping[str, object] = field(default_factory=dict)  # keyword arguments of the factory

    @property
    def config(self) -> ModelConfig:
        """A new configuration, which checks itself."""
        return made_at(self.factory, "model", ("build", "vocab_size", "n_layer", "__dataclass_fields__"), **self.sizes)


def _gpt2(**sizes: object) -> Preset:
    return Preset("zeroshard.models.gpt2:GPT2Config", sizes)


def _llama(**sizes: object) -> Preset:
    return Preset("zeroshard.models.llama:LlamaConfig", sizes)


# fmt: off
PRESETS: dict[str, Preset] = {
    # for bytes as tokens: learns on two CPU cores in minutes
    "gpt2-demo": _gpt2(vocab_size=256, seq_len=128, n_layer=4, n_head=4, n_embd=128),
    "gpt2-124m": _gpt2(vocab_size=50257, seq_len=1024, n_layer=12, n_head=12, n_embd=768),
    "gpt2-350m": _gpt2(vocab_size=50257, seq_len=1024, n_layer=24, n_head=16, n_embd=1024),
    "gpt2-774m": _gpt2(vocab_size=50257, seq_len=1024, n_layer=36, n_head=20, n_embd=1280),
    "gpt2-1.5b": _gpt2(vocab_size=50257, seq_len=1024, n_layer=48, n_head=25, n_embd=1600),
    "llama-tiny": _llama(vocab_size=32000, seq_len=2048, n_layer=4, n_head=10, n_kv_head=2, n_embd=320),
    "llama-small": _llama(vocab_size=32000, seq_len=2048, n_layer=12, n_head=18, n_kv_head=6,
                          n_embd=1152),
    "llama-medium": _llama(vocab_size=32000, seq_len=2048, n_layer=24, n_head=32, n_kv_head=8,
                           n_embd=2048),
    "llama-1b": _llama(vocab_size=128256, seq_len=8192, n_layer=16, n_head=32, n_kv_head=8, n_embd=2048,
                       ffn_hidden=8192, rope_theta=500_000.0, tie_embeddings=True),
    "llama-7b": _llama(vocab_size=32000, seq_len=2048, n_layer=32, n_head=32, n_kv_head=32, n_embd=4096,
                       ffn_hidden=11008, norm_eps=1e-6),
    "llama-8b": _llama(vocab_size=128256, seq_len=8192, n_layer=32, n_head=32, n_kv_head=8, n_embd=4096,
                       ffn_hidden=14336, rope_theta=500_000.0),
}
# fmt: on


def model_config(
    name: str,
    *,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    overrides: Mapping[str, object] = MappingProxyType({}),
) -> ModelConfig:
    """Return a preset's configuration with a few fields changed. It is checked, and no model is built.

    Args:
        name: a key of ``PRESETS``, ``hf:FOLDER_OR_NAME`` or ``module:Class``.
        vocab_size: number of token ids, from the tokenizer; None: the preset's. A Hugging Face model keeps its own
            number, which must be at least this one.
        seq_len: the longest sequence; None: the preset's.
        overrides: other fields of the preset's configuration, by name; they win over the two above.

    Raises:
        UserError: there is no such preset or field (the message names the nearest), or values contradict each other.
    """
    if is_hugging_face(name):
        return _hugging_face().config_of(name, _given(None, seq_len, overrides), vocab_size)
    if name not in PRESETS and not is_address(name):
        raise UserError("model", f"there is no preset {name!r}", f"{_nearest(name, PRESETS)}; or {_of_the_hub(name)}")
    preset: Any = (PRESETS.get(name) or Preset(name)).config
    changes = _given(vocab_size, seq_len, overrides)
    known = [field.name for field in fields(preset)]
    for key in changes:
        if key not in known:
            raise UserError(f"model.{key}", f"{name} has no such field", _nearest(key, known))
    return replace(preset, **changes)  # the configuration checks its types


def nearest_preset(config: ModelConfig) -> tuple[str, dict[str, object]]:
    """Find the preset that needs the fewest changes to become ``config``; return its name and the changes.

    ``model_config(name, overrides=changes)`` equals ``config``.
    """
    if type(config).__name__ == "HuggingFaceConfig":
        return _hugging_face().name_and_changes(config)
    best: tuple[str, dict[str, object]] | None = None
    for name, row in PRESETS.items():
        preset: Any = row.config
        if type(preset) is not type(config):
            continue
        wanted = {field.name: getattr(config, field.name) for field in fields(preset)}
        changes = {key: value for key, value in wanted.items() if value != getattr(preset, key)}
        if best is None or len(changes) < len(best[1]):
            best = name, changes
    assert best is not None, f"no preset is a {type(config).__name__}"
    return best


def build_model(
    name: str,
    *,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    overrides: Mapping[str, object] = MappingProxyType({}),
    seed: int = 0,
    kernels: Choice = "auto",
    lora: Lora | None = None,
    for_plan: bool = False,
) -> LanguageModel:
    """Build a preset's model on the default device, or without values under ``torch.device("meta")``.

    Arguments and errors are :func:`model_config`'s. ``seed`` is the seed of the initial values. ``kernels`` is the
    backend of operations that have kernels. ``lora`` adds adapters, which are trained instead of the model's weights;
    ``for_plan``: the model is only to be traced, so that adapters need not be `peft`'s.
    """
    config = model_config(name, vocab_size=vocab_size, seq_len=seq_len, overrides=overrides)
    if lora is None:
        return config.build(seed, kernels)
    built = loaded("zeroshard.models.lora", "built_with_lora")
    return built(lambda: config.build(seed, kernels), lora, for_plan=for_plan)


def _given(vocab_size: int | None, seq_len: int | None, overrides: Mapping[str, object]) -> dict[str, object]:
    given = {"vocab_size": vocab_size, "seq_len": seq_len}
    return {key: value for key, value in given.items() if value is not None} | dict(overrides)


def _hugging_face() -> Any:
    return import_module("zeroshard.models.hugging_face.config")


def _of_the_hub(name: str) -> str:
    named = name if name.count("/") == 1 else "OWNER/NAME"
    return f"hf:{named}, a model of Hugging Face by its name or folder"


def _nearest(word: str, known: Mapping[str, object] | list[str]) -> str:
    close = nearest_name(word, known)
    hint = "" if close is None else f"did you mean {close}? "
    return f"{hint}known: {', '.join(known)}"
