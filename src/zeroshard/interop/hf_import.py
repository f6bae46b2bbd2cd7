"""``zeroshard import``: make a run at step 0 from a GPT-2 or LLaMA in the format of Hugging Face's `transformers`.

Training resumes from the run with any strategy and number of ranks, at a learning rate for fine-tuning (``zeroshard
train --config RUN/config.toml --resume auto --data text --data.path FILES``); ``zeroshard generate RUN`` generates
text. Weights keep the dtype of the files, and are read through memory maps. Pickles (``pytorch_model.bin``) are never
read. If `transformers` is installed, the logits of both are compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zeroshard import checkpoint
from zeroshard.checkpoint.streamed_safetensors import drafted
from zeroshard.comm import Communicator, LocalCommunicator
from zeroshard.data.examples.template import TEMPLATE_FILES
from zeroshard.data.tokenizer import TOKENIZER_FILE, BpeTokenizer, keep_tokenizer, read_tokenizer
from zeroshard.errors import ExitStatus, UserError
from zeroshard.interop.nanogpt_weights import import_nanogpt, is_nanogpt
from zeroshard.models.hugging_face.folder import ADAPTER_CONFIG, only_adapters
from zeroshard.models.hugging_face.gpt2_llama_conversion import OurConfig, embedding_of, find_weights, from_hf_config
from zeroshard.regular_files import read_text, require_regular
from zeroshard.train.config.command_settings import ImportConfig
from zeroshard.train.config.config import FINE_TUNING, TrainConfig
from zeroshard.train.config.data_section import UNNAMED, DataConfig
from zeroshard.train.config.toml import dump_toml
from zeroshard.train.loop.run import checkpoint_folder
from zeroshard.train.setup.assemble import model_table
from zeroshard.train.setup.run_folder import tokenizer_folder
from zeroshard.zero.state.named_shards import NamedShard

_SEQ_LEN = 1024  # largest sequence length in the run's configuration
_FLOATS = ("F64", "F32", "F16", "BF16")


def run_import(config: ImportConfig) -> int:
    """Create the run folder, print a summary, and return the exit status; a file of nanoGPT: see `import_nanogpt`.

    Raises:
        UserError: the folder is not a complete GPT-2 or LLaMA with safetensors, our models cannot compute it, or
            ``out`` exists already.
    """
    source, out = Path(config.source), Path(config.out)
    if is_nanogpt(source):
        print(f"{source} in {out}: {import_nanogpt(source, out)}\n{_next(out)}")
        return int(ExitStatus.OK)
    if (source / ADAPTER_CONFIG).is_file():
        raise only_adapters("source", str(source), source / ADAPTER_CONFIG)
    model = from_hf_config(_read_json(source / "config.json"))
    tokenizer = _tokenizer(source)
    with ExitStack() as stack:
        weights = _Weights(model, _open_files(source, stack))
        draft = stack.enter_context(drafted(out))
        data = DataConfig(source=UNNAMED)
        if tokenizer is not None:
            _keep_tokenizer(tokenizer_folder(draft), tokenizer, model.vocab_size, source)
            for name in TEMPLATE_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, tokenizer_folder(draft) / name)
            tokenizer.keep_special_tokens(tokenizer_folder(draft))
            data = DataConfig(source=UNNAMED, tokenizer=f"json:{tokenizer_folder(out) / TOKENIZER_FILE}")
        facts = {"model": model_table(model), "data": data, "seq_len": min(model.seq_len, _SEQ_LEN), "out": str(out)}
        run = TrainConfig.model_validate({**facts, **FINE_TUNING})
        (draft / "config.toml").write_text(dump_toml(run), encoding="utf-8")
        extra = {"config": run.model_dump(mode="json"), "torch": torch.__version__, "imported_from": source.name}
        checkpoint.save(checkpoint_folder(draft) / "step-00000000", weights, step=0, extra=extra)
    text = f"{tokenizer.vocab_size:,} tokens" if tokenizer else "no tokenizer that we read, so it writes no text"
    print(f"{source} in {out}: {weights.num_params:,} parameters, {text}\n{_next(out)}")
    return int(ExitStatus.OK)


def _next(out: Path) -> str:
    return f"to train on: zeroshard train --config {out}/config.toml --resume auto --data text --data.path FILES"


class _Weights:
    """The files' tensors under our names and in our shapes, in the form that `zeroshard.checkpoint.save` takes."""

    comm: Communicator = LocalCommunicator()

    def __init__(self, model: OurConfig, files: Mapping[str, Any]) -> None:
        """``files``: by the name of each tensor, the opened safetensors file that contains it."""
        shapes = {}
        for name, file in files.items():
            piece = file.get_slice(name)
            shapes[name] = tuple(piece.get_shape())
            if piece.get_dtype() not in _FLOATS:
                raise UserError(name, f"is of dtype {piece.get_dtype()}", "take a model that is not quantised")
        self._files = files
        self._found = find_weights(model, shapes)
        self._tied = self._take_tied_head(model)
        self.num_params = sum(prod(weight.shape) for weight in self._found.values())

    def named_shards(self) -> Iterable[NamedShard]:
        """Yield every tensor, unsharded; one that need not be transposed is a memory map."""
        for name, weight in self._found.items():
            assert weight.name is not None
            tensor = self._files[name].get_tensor(name)
            flat = (tensor.t() if weight.transposed else tensor).reshape(-1)
            yield NamedShard(weight.name, "param", weight.shape, (0, flat.numel()), flat)

    def tied_names(self) -> dict[str, str]:
        """Return the names of the output head and of the embedding if they are tied, otherwise nothing."""
        return self._tied

    def _take_tied_head(self, model: OurConfig) -> dict[str, str]:
        """Drop a tied head that the files contain too; raise UserError if it differs from the embedding."""
        if not model.tie_embeddings:
            return {}
        embedding = embedding_of(model)
        head = self._found.pop("lm_head.weight", None)
        if head is not None:
            name = next(name for name, weight in self._found.items() if weight.name == embedding)
            both = (self._files[each].get_tensor(each) for each in ("lm_head.weight", name))
            if not torch.equal(*both):
                todo = "correct tie_word_embeddings in config.json"
                raise UserError("lm_head.weight", f"is tied to {name} and differs from it", todo)
        return {"lm_head.weight": embedding}


def _open_files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return for each tensor's name the opened file that contains it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict) or any(Path(str(file)).name != file for file in places.values()):
            raise UserError(str(index), "has no weight_map of files beside it", "take the folder of a whole model")
        names = sorted(set(places.values()))
    elif (folder / "model.safetensors").is_file():
        places, names = None, ["model.safetensors"]
    else:
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        if pickled is not None:
            todo = "save the model with save_pretrained of transformers, which writes safetensors"
            raise UserError(str(pickled), "is a pickle, and those are never read", todo)
        raise UserError("source", f"{folder} holds no model.safetensors", "give the folder of a Hugging Face model")
    found: dict[str, Any] = {}
    for name in names:
        try:
            require_regular(folder / name)
            opened = stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
        except FileNotFoundError:
            raise UserError(str(folder / name), "is missing", "take the folder of a whole model") from None
        except (SafetensorError, OSError) as error:
            raise UserError(str(folder / name), f"cannot be read ({error})", "fetch it again") from None
        found |= dict.fromkeys(opened.keys(), opened)
    missing = sorted(set(places or ()) - found.keys())
    if missing:
        raise UserError(missing[0], "is in none of the files", "take the folder of a whole model")
    return found


def _tokenizer(folder: Path) -> BpeTokenizer | None:
    """Read the model's ``tokenizer.json``; None if it has none."""
    path = folder / TOKENIZER_FILE
    return read_tokenizer(path) if path.is_file() else None


def _keep_tokenizer(folder: Path, tokenizer: BpeTokenizer, vocab_size: int, source: Path) -> None:
    """Write the tokenizer into ``folder``, in the form of a prepared data folder without tokens."""
    if tokenizer.vocab_size > vocab_size:
        what = f"has {tokenizer.vocab_size} tokens, the model {vocab_size}"
        raise UserError(TOKENIZER_FILE, what, "take model and tokenizer from one folder")
    keep_tokenizer(folder, tokenizer, vocab_size, f"imported from {source.name}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror})"
        raise UserError("source", what, "give the folder of a Hugging Face model") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(str(path), "is not a JSON object", "fetch it again")
    return content
