"""Settings of the commands prepare, export, import, eval and generate; the settings of training are in `config`.

How defaults, the TOML file and flags combine is described in `zeroshard.train.config.config`.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.parallel.registry import strategies_with
from zeroshard.settings.base import Config
from zeroshard.settings.sizes import parse_size
from zeroshard.train.config.data_section import DataConfig
from zeroshard.train.config.registered import EvaluatingName


class PrepareConfig(Config):
    """Settings of `zeroshard prepare`: the same ``data`` table as in a training run."""

    data: DataConfig = DataConfig()
    verify: bool = Field(
        False,
        description="Prepare nothing; read the prepared folder, and say what is damaged; status 3 if anything is.",
    )


class TrustConfig(Config):
    """Whether a command may run the code that a model's or a run's files name."""

    trust_remote_code: bool = Field(
        False, description="Run code that files of the run or model name: an hf: model's own Python files, module:name."
    )


class ExportConfig(Config):
    """Settings of `zeroshard export`: which weights to write as a Hugging Face model, and where."""

    model: TrustConfig = TrustConfig()
    source: str = Field(min_length=1, description="Run folder (its newest checkpoint), or a checkpoint.")
    out: str = Field(min_length=1, description="New folder for the Hugging Face model.")
    weights: Literal["last", "ema"] = Field("last", description="The last step's, or their moving average.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the weights in the files.")
    merged: bool = Field(
        False, description="Of a run with adapters: the whole model with these added to it; else the adapters alone."
    )
    max_shard_size: str = Field("5GB", min_length=1, description="Largest weights file, as 5GB or 512MiB.")

    @model_validator(mode="after")
    def _sizes_are_sizes(self) -> Self:
        parse_size("max_shard_size", self.max_shard_size)
        return self


class ImportConfig(Config):
    """Settings of `zeroshard import`: the model to read, and the run folder to make of it."""

    source: str = Field(
        min_length=1, description="Folder of a Hugging Face GPT-2 or LLaMA with safetensors, or nanoGPT's ckpt.pt."
    )
    out: str = Field(min_length=1, description="New run folder, as in runs/NAME.")


class EvalConfig(Config):
    """Settings of `zeroshard eval`: the run to evaluate, and the data to evaluate it on."""

    model: TrustConfig = TrustConfig()
    run: str = Field(
        min_length=1,
        description="Run folder (its newest checkpoint), a Hugging Face GPT-2 or LLaMA's, or hf:FOLDER, hf:OWNER/NAME.",
    )
    data: str = Field(
        "", description="Text to evaluate on, all of it, as mine.txt or a .jsonl: it is prepared here; empty: data_dir."
    )
    data_dir: str = Field("", description="Prepared folder; empty: the run's own.")
    split: Literal["val", "train"] = Field("val", description="Split of the prepared folder.")
    weights: Literal["last", "ema", "best"] = Field(
        "last", description="The last step's, their moving average, or those of checkpoints/best."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Compute type.")
    strategy: EvaluatingName = Field(
        "none",
        description="How weights are spread over ranks: none (replicated), "
        f"{', '.join(strategies_with('evaluates'))}, or module:name of your own.",
    )
    nproc: int = Field(0, ge=0, description="Ranks to start here; 0: torchrun's or SLURM's, else 1.")
    port: int = Field(0, ge=0, le=65535, description="Port where --nproc ranks meet; 0: any free.")
    seq_len: int = Field(0, ge=0, description="Tokens in a sequence; 0: as it was trained.")
    sequence_parallel: int = Field(1, ge=1, description="Consecutive ranks that share each sequence.")
    micro_batch_size: int = Field(8, ge=1, description="Sequences per rank in one forward pass.")
    rows: int = Field(0, ge=0, description="Sequences to read, spread over the split; 0: all of it.")
    batches: int = Field(0, ge=0, description="In place of rows: batches x micro_batch_size sequences; 0: rows.")
    json_line: bool = Field(False, description="Print one JSON object in place of words.")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.data and self.data_dir:
            raise UserError("data", "is given beside data_dir", "give one of the two")
        if self.rows and self.batches:
            raise UserError("batches", "is given beside rows", "give rows alone")
        return self


class GenerateConfig(Config):
    """Settings of `zeroshard generate`: the run to sample from, the prompt, and how tokens are sampled."""

    model: TrustConfig = TrustConfig()
    run: str = Field(
        min_length=1,
        description="Run folder, as in runs/NAME, a Hugging Face GPT-2 or LLaMA's, or hf:FOLDER, hf:OWNER/NAME.",
    )
    weights: Literal["last", "ema", "best"] = Field(
        "last", description="The last step's, their moving average, or those of checkpoints/best."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Compute type.")
    prompt: str = Field("", description="Text to continue; empty: what begins a document, or a line break.")
    message: str = Field("", description="What a user says to a model of conversations; its answer is written.")
    system: str = Field("", description="message: what the model is told before.")
    template: str = Field(
        "", description="message: chat template, a file in Jinja2 or chatml; empty: that of the run or the model."
    )
    samples: int = Field(1, ge=1, description="Texts to write; the N-th has the draws of --seed SEED+N-1.")
    max_new_tokens: int = Field(200, ge=1, description="Tokens to write.")
    temperature: float = Field(0.8, ge=0, allow_inf_nan=False, description="0: always the likeliest token.")
    top_k: int = Field(0, ge=0, description="Draw from the k likeliest; 0: from all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Draw from the likeliest that have this probability together.")
    stop: bool = Field(True, description="End where the model ends its document.")
    seed: int = Field(0, ge=0, description="Seed of the draws.")

    @model_validator(mode="after")
    def _a_prompt_or_a_message(self) -> Self:
        if "message" in self.model_fields_set and not self.message:
            raise UserError("message", "is empty", "say something, or leave it out")
        if self.prompt and self.message:
            raise UserError("message", "is given beside a prompt", "give one of the two")
        for name in ("system", "template"):
            if getattr(self, name) and not self.message:
                raise UserError(name, "is given without a message", "add --message TEXT, or leave it out")
        return self
