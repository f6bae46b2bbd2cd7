"""Import nanoGPT's ``ckpt.pt`` as a run at step 0: ``zeroshard import out/ckpt.pt runs/NAME``.

The file is a pickle. Only tensors and plain values are read from it (``weights_only``): nothing in it is executed, and
a file with other objects is refused. Its matrices are ``nn.Linear``'s, as ours are; only names differ. Optimizer states
are not imported.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard import checkpoint
from zeroshard.checkpoint.api import Saveable
from zeroshard.checkpoint.streamed_safetensors import drafted
from zeroshard.comm import Communicator, LocalCommunicator
from zeroshard.data.meta import SPLITS, DataMeta, SourceMeta, SplitMeta, dtype_for, write_meta
from zeroshard.data.tokenizer import TIKTOKEN
from zeroshard.host.errors import UserError, is_out_of_memory
from zeroshard.host.regular_files import require_regular
from zeroshard.models import GPT2, GPT2Config
from zeroshard.optim.named_shards import NamedShard
from zeroshard.train.config.config import FINE_TUNING, TrainConfig
from zeroshard.train.config.data_section import UNNAMED, DataConfig
from zeroshard.train.config.toml import dump_toml
from zeroshard.train.setup.assemble import model_table
from zeroshard.train.setup.run_folder import tokenizer_folder
from zeroshard.train.state.folders import checkpoint_folder

GPT2_IDS, PADDED_IDS = 50_257, 50_304  # ids of GPT-2's tokenizer, and nanoGPT's padded vocabulary for them
_SIZES = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")


def write_run(draft: Path, settings: Mapping[str, Any], weights: Saveable, source: Path) -> None:
    """Write the configuration and the checkpoint of step 0 of a run that is imported from ``source``."""
    run = TrainConfig.model_validate({**settings, **FINE_TUNING})
    (draft / "config.toml").write_text(dump_toml(run), encoding="utf-8")
    extra = {"config": run.model_dump(mode="json"), "torch": torch.__version__, "imported_from": source.name}
    checkpoint.save(checkpoint_folder(draft) / "step-00000000", weights, step=0, extra=extra)


class ImportedWeights:
    """Tensors under our names and in our shapes, in the form that `zeroshard.checkpoint.save` takes.

    ``tied``: the name under which a tensor is saved, by each of its further names.
    """

    comm: Communicator = LocalCommunicator()

    def __init__(self, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
        self._tensors, self._tied = tensors, dict(tied)
        self.num_params = sum(tensor.numel() for tensor in tensors.values())

    def named_shards(self) -> Iterable[NamedShard]:
        """Yield every tensor, unsharded; one that is contiguous is not copied."""
        for name, tensor in self._tensors.items():
            flat = tensor.detach().reshape(-1)
            yield NamedShard(name, "param", tuple(tensor.shape), (0, flat.numel()), flat)

    def tied_names(self) -> dict[str, str]:
        """Return ``tied``."""
        return self._tied


def is_nanogpt(path: Path) -> bool:
    """Whether ``path`` is taken for a checkpoint of nanoGPT: a file with the suffix ``.pt``."""
    return path.is_file() and path.suffix == ".pt"


def import_nanogpt(path: Path, out: Path) -> str:
    """Create the run folder ``out``, and return a description of its content.

    Raises:
        UserError: the file is not nanoGPT's, contains more than tensors and plain values, or is damaged.
    """
    found = _read(path)
    model = _config(path, found.get("model_args"))
    weights = ImportedWeights(_tensors(path, model, found["model"]), {"lm_head.weight": "wte.weight"})
    with drafted(out) as draft:
        tokenizer = _keep_tokenizer(tokenizer_folder(draft), model.vocab_size, path)
        data = DataConfig(source=UNNAMED, tokenizer=tokenizer or "bytes")
        facts = {"model": model_table(model), "data": data, "seq_len": model.seq_len, "out": str(out)}
        write_run(draft, facts, weights, path)
    text = "GPT-2's tokens" if tokenizer else "no tokenizer (its ids are not GPT-2's), so it writes no text"
    form = "the exact GELU" if model.activation == "gelu" else "GELU by tanh, as nanoGPT's first versions had it"
    return f"GPT-2 with {form}, {weights.num_params:,} parameters, {text}"


def _read(path: Path) -> dict[str, Any]:
    try:
        require_regular(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        first_line = next(iter(str(error).splitlines()), "")
        what = f"{path} holds more than tensors and plain values ({first_line})"
        raise UserError("source", what, "save its model and model_args alone") from None
    except Exception as error:  # damaged bytes may make torch's reader and the unpickler raise anything
        if is_out_of_memory(error):
            raise
        first_line = next(iter(str(error).splitlines()), "")
        raise UserError("source", f"{path} cannot be read ({first_line})", "copy it again") from None
    if not isinstance(found, dict) or not isinstance(found.get("model"), Mapping):
        raise UserError("source", f"{path} has no `model` in it", "give a ckpt.pt of nanoGPT")
    return found


def _config(path: Path, args: Any) -> GPT2Config:
    if not isinstance(args, Mapping) or any(not isinstance(args.get(key), int) for key in _SIZES):
        raise UserError("source", f"{path} has no `model_args` with {', '.join(_SIZES)}", "give a ckpt.pt of nanoGPT")
    vocab_size, seq_len, n_layer, n_head, n_embd = (args[key] for key in _SIZES)
    bias, dropout = args.get("bias", True), args.get("dropout", 0.0)
    # Its first versions had the approximation by tanh; they knew no `bias` either. https://github.com/karpathy/nanoGPT
    activation = "gelu" if "bias" in args else "gelu_tanh"
    sizes = (vocab_size, seq_len, n_layer, n_head, n_embd)
    return GPT2Config(*sizes, bias=bias, dropout=dropout, activation=activation)


def _tensors(path: Path, config: GPT2Config, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors under our names; raises UserError if they are not those of the model."""
    with torch.device("meta"):
        wanted = {name: param.shape for name, param in GPT2(config).named_parameters()}
    if not all(
        isinstance(name, str)
        and isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.layout == torch.strided
        for name, tensor in found.items()
    ):
        raise UserError("source", f"{path}: `model` holds more than weights by name", "give a ckpt.pt of nanoGPT")
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        # prefixes of torch.compile and of nanoGPT
        ours = re.sub(r"^h\.", "blocks.", name.removeprefix("_orig_mod.").removeprefix("transformer."))
        if ours.endswith(".attn.bias"):  # the causal mask, which its models kept among their weights
            continue
        kept = tensors.setdefault("wte.weight" if ours == "lm_head.weight" else ours, tensor)
        if kept is not tensor and not torch.equal(kept, tensor):
            what = f"{path}: {name} differs from another tensor of the same place, and one model has one of them"
            raise UserError("source", what, "give a ckpt.pt of nanoGPT, which ties head and embedding")
    for name in sorted(wanted.keys() | tensors.keys()):
        shape = tuple(tensors[name].shape) if name in tensors else None
        if name not in wanted or shape != tuple(wanted[name]):
            what = f"{path}: {name} has shape {shape}, and {tuple(wanted.get(name, ())) or 'no such tensor'} is due"
            raise UserError("source", what, "give a ckpt.pt of nanoGPT")
    return tensors


def _keep_tokenizer(folder: Path, vocab_size: int, path: Path) -> str:
    """Write GPT-2's tokenizer into ``folder``, in the form of a prepared data folder, if the ids are as many as its.

    Returns:
        ``gpt2``; empty if it is none that is known.
    """
    if vocab_size not in (GPT2_IDS, PADDED_IDS):
        return ""
    folder.mkdir()
    no_tokens = {split: SplitMeta(0, ()) for split in SPLITS}
    source = SourceMeta(f"imported from {path.name}", 0, 0, "")
    dtype, eos_id = dtype_for(vocab_size), TIKTOKEN["gpt2"][1]
    write_meta(folder, DataMeta({}, source, "gpt2", "", vocab_size, dtype, no_tokens, eos_id=eos_id))
    return "gpt2"
