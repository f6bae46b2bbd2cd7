"""Every causal language model of `transformers` over ranks that share sequences: logits and gradients of one process.

    python benchmarks/claims/shared_causal_models.py                      # all types of models, some minutes
    python benchmarks/claims/shared_causal_models.py phi3 doge            # these

Each is built with small sizes, and with thresholds (windows, chunks, lengths of rotary embeddings) inside of a row of
`TOKENS`, once as its configuration has it and, where that is equal, with layers of two kinds and with each kind of
rotary embedding that it takes. Two ranks share two rows. Prints what came of it: equal; refused, with the reason; or
wrong: exit status 1. A type that is not built here, or not computed on one rank, is listed with its reason.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator, NullCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.models import SequenceParallel, share_sequences
from zeroshard.models.quiet_import import quiet_import

RANKS, TOKENS, THRESHOLD, WINDOW = 2, 32, 20, 5
ROUNDING = 1e-4  # of the largest number

_BY_SIZE: dict[Any, str] = {
    4: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_attention_heads n_head n_heads "
    "encoder_attention_heads decoder_attention_heads num_experts num_local_experts n_routed_experts rotary_dim "
    "index_topk linear_num_key_heads linear_num_value_heads",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim global_head_dim linear_key_head_dim "
    "linear_value_head_dim hidden_size_per_layer_input",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank expert_ffn_hidden_size",
    32: "hidden_size d_model n_embd dim emb_dim embedding_size",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner",
    64: "vocab_size vocab_size_per_layer_input",
    2: "num_key_value_heads num_experts_per_tok eos_token_id",
    1: "n_group topk_group bos_token_id decoder_start_token_id",
    0: "pad_token_id",
    0.3: "initializer_range init_std",  # large, so that each part counts
    2 * TOKENS: "max_position_embeddings n_positions n_ctx max_seq_len",
    WINDOW: "sliding_window attention_chunk_size window_size attention_window_size floor_scale",
}
SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()} | {
    "attention_dropout": 0.0,
    "is_decoder": True,
    "vocab_size": 64,  # as 2 * TOKENS is
}
_EACH_HEAD = {"num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_n_groups": 1}
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_SHARED = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {  # what these need beside, or instead
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text"), _EACH_HEAD),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), _EACH_HEAD),
    **dict.fromkeys(("bamba", "granitemoehybrid"), _MAMBA),
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {"text_config": _EACH_HEAD},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"text_config": _ASSISTANT},
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), _SHARED),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, "num_dense_layers": 1},
    "mamba2": {"expand": 2, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * 4},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 8), "attn_layers": ["local"] * 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layer_types": ["mamba", "mamba", "hybrid"] * 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "use_sliding_window": True}
ROTARY: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": THRESHOLD, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": THRESHOLD},
}


@dataclass(frozen=True)
class Row:
    """What came of a type of models; ``variant``: as `built` takes it."""

    model_type: str
    variant: str
    found: str
    why: str


def types_of_models() -> list[str]:
    """All of `AutoModelForCausalLM`."""
    names: Any = quiet_import("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(names)


def configuration(model_type: str, **changes: Any) -> Any:
    """Its configuration with small sizes."""
    kind: Any = quiet_import("transformers.models.auto.configuration_auto").CONFIG_MAPPING[model_type]
    default = kind()
    special = SPECIAL.get(model_type, {})
    given = _sizes_of(default) | special
    for name in getattr(kind, "sub_configs", {}):
        if getattr(default, name, None) is not None:
            given[name] = _sizes_of(getattr(default, name)) | special.get(name, {})
    known = default.to_dict()
    return kind(**{**given, **{name: each for name, each in changes.items() if name in known}})


def _sizes_of(config: Any) -> dict[str, Any]:
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    return {name: size for name, size in SIZES.items() if name in known}


def built(model_type: str, variant: str) -> Any:
    """A model of this type in evaluation mode: "", "windows", or with the rotary embedding of that name."""
    auto: Any = quiet_import("transformers.models.auto.modeling_auto").AutoModelForCausalLM
    config = configuration(model_type, **(WINDOWS if variant == "windows" else {}))
    if variant in ROTARY:
        text = config.get_text_config()
        buffers = auto.from_config(config).named_buffers()
        frequencies = {name: each.numel() for name, each in buffers if name.endswith("inv_freq")}
        text.max_position_embeddings = THRESHOLD if variant == "dynamic" else 2 * TOKENS
        text.original_max_position_embeddings = THRESHOLD
        old = text.rope_parameters
        if all(isinstance(each, dict) for each in old.values()):  # of each kind of layer
            half = next(iter(frequencies.values()))  # of kinds that no layer is of
            sizes = {key: next((n for name, n in frequencies.items() if f"{key}_inv" in name), half) for key in old}
            text.rope_parameters = {key: each | _rotary(variant, sizes[key]) for key, each in old.items()}
        else:
            text.rope_parameters = old | _rotary(variant, next(iter(frequencies.values())))
    torch.manual_seed(0)
    return auto.from_config(config).eval()


def _rotary(variant: str, num_frequencies: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * num_frequencies, "long_factor": [4.0] * num_frequencies}
    return {**ROTARY[variant], **(factors if variant == "longrope" else {}), "rope_theta": 10_000.0}


def logits_and_grads(model: Any, tokens: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [B, T, V] of ``tokens``, and gradients of their sum weighted by ``weights``."""
    output = model(input_ids=tokens, use_cache=False)
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    (logits.float() * weights[..., : logits.shape[-1]]).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compared(whole: nn.Module) -> tuple[str, str]:
    """What two ranks that share rows make of ``whole``: "equal", "refused" or "WRONG", and why."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (2, TOKENS), generator=generator)
    weights = torch.randn(2, TOKENS, 64, generator=generator)
    try:
        share_sequences(copy.deepcopy(whole), SequenceParallel(NullCommunicator(RANKS)))
    except UserError as error:
        return "refused", f"{error.field}: {error.what}"
    try:
        logits, grads = logits_and_grads(copy.deepcopy(whole), tokens, weights)
    except Exception as error:  # noqa: BLE001 -- what one rank does not compute, ranks need not
        return "not computed", _first_line(error)

    def rank(comm: Communicator) -> tuple[Tensor, dict[str, Tensor]]:
        model, sequence = copy.deepcopy(whole), SequenceParallel.of(comm, RANKS)
        share_sequences(model, sequence)
        return logits_and_grads(model, *sequence.cut(tokens, weights))

    try:
        parts = run_threads(rank, RANKS)
    except UserError as error:
        return "refused", f"{error.field}: {error.what}"
    except Exception as error:  # noqa: BLE001 -- an error that is not ours is a finding
        return "WRONG", f"{type(error).__name__}: {_first_line(error)}"
    # a bias of keys has no gradient but rounding, so no gradient is taken for less than a thousandth of the largest
    largest = max((float(each.abs().max()) for each in grads.values()), default=0.0)
    off = {"logits": _difference(torch.cat([each for each, _ in parts], dim=1), logits, 0.0)}
    for name, grad in grads.items():
        found = [each[name] for _, each in parts if name in each]
        off[name] = _difference(sum(found), grad, largest / 1000) if found else 1.0
    name = max(off, key=off.__getitem__)
    return ("equal" if off[name] <= ROUNDING else "WRONG"), f"{name} by {off[name]:.1g}"


def _difference(found: Any, wanted: Tensor, least: float) -> float:
    """The largest difference, as a share of the largest number, which is taken for ``least`` or more."""
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), least, 1e-30)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def rows(types: list[str]) -> Iterator[Row]:
    """What came of each type; where that is "equal", also of its variants."""
    for model_type in types:
        variants = [""]
        for variant in variants:
            try:
                model = built(model_type, variant)
            except Exception as error:  # noqa: BLE001 -- each configuration is checked in its own way
                yield Row(model_type, variant, "not built", _first_line(error))
                continue
            found = Row(model_type, variant, *compared(model))
            yield found
            if not variant and found.found == "equal":
                text = model.config.get_text_config()
                variants += ["windows"] if getattr(text, "layer_types", None) else []
                variants += ROTARY if getattr(text, "rope_parameters", None) else []


def main() -> int:
    """Print the table; 1 if a row of it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="types of models; all by default")
    args = parser.parse_args()
    quiet_import("transformers").logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for row in rows(args.types or types_of_models()):
        counts[row.found] = counts.get(row.found, 0) + 1
        print(f"{row.model_type:24} {row.variant:9} {row.found:12} {row.why}", flush=True)
    print(", ".join(f"{found}: {count}" for found, count in sorted(counts.items())))
    return int("WRONG" in counts)


if __name__ == "__main__":
    sys.exit(main())
