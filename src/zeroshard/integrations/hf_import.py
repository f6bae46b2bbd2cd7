"""``zeroshard import``: make a run at step 0 from a GPT-2 or LLaMA in the format of Hugging Face's `transformers`.

Training resumes from the run with any strategy and number of ranks, at a learning rate for fine-tuning (``zeroshard
train --config RUN/config.toml --resume auto --data text --data.path FILES``); ``zeroshard generate RUN`` generates
text. Weights keep the dtype of the files, and are read through memory maps. Pickles (``pytorch_model.bin``) are never
read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from zeroshard.checkpoint.hf_weight_reader import tensors_of
from zeroshard.checkpoint.streamed_safetensors import drafted
from zeroshard.data.chat_templates import TEMPLATE_FILES
from zeroshard.data.meta import read_meta, write_meta
from zeroshard.data.tokenizer import TOKENIZER_FILE, keep_tokenizer, read_tokenizer
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.integrations.nanogpt_weights import ImportedWeights, import_nanogpt, is_nanogpt, write_run
from zeroshard.models.hugging_face.folder import ADAPTER_CONFIG, only_adapters, read_json, require_unquantised
from zeroshard.models.hugging_face.gpt2_llama_conversion import embedding_of, from_hf_config
from zeroshard.models.hugging_face.weights import find_tensors, mapped
from zeroshard.train.config.command_settings import ImportConfig
from zeroshard.train.config.data_section import UNNAMED, DataConfig
from zeroshard.train.setup.assemble import model_table
from zeroshard.train.setup.run_folder import tokenizer_folder

_SEQ_LEN = 1024  # largest sequence length in the run's configuration


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
    raw = read_json(source / "config.json", "source")
    require_unquantised("source", source, raw)
    model = from_hf_config(raw)
    tokenizer = read_tokenizer(source / TOKENIZER_FILE) if (source / TOKENIZER_FILE).is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        what = f"has {tokenizer.vocab_size} tokens, the model {model.vocab_size}"
        raise UserError(TOKENIZER_FILE, what, "take model and tokenizer from one folder")
    found = tensors_of(model, find_tensors(source, "source"))
    tied = {"lm_head.weight": embedding_of(model)} if model.tie_embeddings else {}
    ours = {name: mapped(file).t() if weight.transposed else mapped(file) for name, (file, weight) in found.items()}
    weights = ImportedWeights(ours, tied)
    with drafted(out) as draft:
        data = DataConfig(source=UNNAMED)
        if tokenizer is not None:
            described = f"imported from {source.name}"
            keep_tokenizer(tokenizer_folder(draft), tokenizer, model.vocab_size, described)
            for name in TEMPLATE_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, tokenizer_folder(draft) / name)
            tokenizer.keep_special_tokens(tokenizer_folder(draft))
            write_meta(tokenizer_folder(draft), read_meta(tokenizer_folder(draft)))  # with checksums of these files
            data = DataConfig(source=UNNAMED, tokenizer=f"json:{tokenizer_folder(out) / TOKENIZER_FILE}")
        facts = {"model": model_table(model), "data": data, "seq_len": min(model.seq_len, _SEQ_LEN), "out": str(out)}
        write_run(draft, facts, weights, source)
    text = f"{tokenizer.vocab_size:,} tokens" if tokenizer else "no tokenizer that we read, so it writes no text"
    print(f"{source} in {out}: {weights.num_params:,} parameters, {text}\n{_next(out)}")
    return int(ExitStatus.OK)


def _next(out: Path) -> str:
    return f"to train on: zeroshard train --config {out}/config.toml --resume auto --data text --data.path FILES"
