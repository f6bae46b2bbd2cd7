"""`ZeroTrainer`: a `transformers.Trainer` that shards, accumulates, clips, saves and resumes through `zeroshard.Zero`.

A script changes only the name of the class. The Trainer delegates everything distributed to its accelerator, which is
replaced by ours (`zeroshard.integrations.accelerate`). Saving and loading, which the Trainer itself does with unsharded
weights, are overridden here. A checkpoint is the Trainer's folder with ``model.safetensors``, but without
``optimizer.pt``: its ``zero/`` has master weights and optimizer states in shards, which can be loaded at any stage and
on any number of ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

try:
    import transformers
    from transformers.trainer import SCHEDULER_NAME
except ModuleNotFoundError as error:
    raise ImportError(f"{__name__}: {error.name} is not installed; pip install 'zeroshard[accelerate]'") from None

from zeroshard.checkpoint import load, save
from zeroshard.errors import UserError
from zeroshard.integrations.accelerate import SHARDS, Accelerator, of_first_rank
from zeroshard.integrations.plugin import ZeroPlugin, engine_of
from zeroshard.integrations.state_dicts import through_engine
from zeroshard.zero import Zero

_Trainer: Any = object  # base of the mixin for the type checker: at run time the Trainer comes after it in the MRO

_IN_BACKWARD = ("lomo", "adalomo", "layerwise")  # optimizers that step inside of backward
_REFUSED = {
    "fsdp": ("it shards too", "leave fsdp out"),
    "deepspeed": ("it shards too", "leave deepspeed out"),
    "parallelism_config": ("Zero is data-parallel alone", "leave it out"),
    "torch_compile": (
        "a compiled model hides its blocks from Zero",
        "leave it out and compile the blocks before: `for block in blocks: block.compile()`",
    ),
    "bf16_full_eval": ("the engine's buffers hold the weights", "use bf16, which evaluates in bf16 too"),
    "fp16_full_eval": ("the engine's buffers hold the weights", "use fp16, which evaluates in fp16 too"),
    "auto_find_batch_size": ("a step that ran out of memory cannot be taken back", "set per_device_train_batch_size"),
    "enable_jit_checkpoint": ("a save needs all ranks, a signal reaches one", "use save_steps"),
}


class ZeroTrainerMixin(_Trainer):
    """Adds the engine to `transformers.Trainer` or a subclass of it: ``class Mine(ZeroTrainerMixin, Seq2SeqTrainer)``.

    Args:
        zero_plugin: how to shard; None: stage 3.
        *args: arguments of the Trainer.
        **kwargs: keyword arguments of the Trainer.

    Raises:
        UserError: a setting that cannot work with the engine; the message says which, and what to do.
    """

    zero_plugin: ZeroPlugin

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        self.zero_plugin = zero_plugin or ZeroPlugin()
        super().__init__(*args, **kwargs)

    @property
    def engine(self) -> Zero | None:
        """The model's engine; None before the first training or evaluation."""
        return engine_of(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """As in the Trainer, with our `Accelerator`; every rank uses rank 0's output folder."""
        _require_possible(self.args)
        super().create_accelerator_and_postprocess()
        saves = self.args.save_strategy != transformers.trainer_utils.SaveStrategy.NO and not self.args.save_only_model
        Accelerator.in_place_of(self.accelerator, self.zero_plugin).saves_states = saves
        self.args.output_dir = of_first_rank(self.args.output_dir)

    # -- saving -----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a folder for ``from_pretrained``. Collective: call it on every rank; rank 0 writes."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        state = self.engine.state_dict(rank0_only=not self.args.save_on_each_node)
        # peft computes prompts from weights, which the state does not show.
        adapters = (getattr(self.model, "peft_config", None) or {}).values()
        computes = any(getattr(each, "is_prompt_learning", False) for each in adapters)
        whole = self.engine.full_params() if computes else nullcontext()
        with whole, torch.no_grad(), through_engine(self.engine, state):
            if self.args.should_save:
                self._save(self.args.output_dir if output_dir is None else output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save(Path(output_dir) / SHARDS, self.engine, step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    # -- loading ----------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if (Path(resume_from_checkpoint) / SHARDS).exists():
            return  # the engine loads the shards once it is made
        with self._through_engine():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        shards = None if checkpoint is None else Path(checkpoint) / SHARDS
        if shards is None or not shards.exists() or self.engine is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load(shards, self.engine)
        scheduler = shards.with_name(SCHEDULER_NAME)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))

    def _load_best_model(self) -> None:
        with self._through_engine():
            super()._load_best_model()

    def _through_engine(self) -> AbstractContextManager[None]:
        return nullcontext() if self.engine is None else through_engine(self.engine)


def _require_possible(args: transformers.TrainingArguments) -> None:
    """Raise UserError, before anything is built, for settings that would train something else or fail later."""
    for field, (what, todo) in _REFUSED.items():
        if getattr(args, field, None):
            raise UserError(field, what, todo)
    name = str(getattr(args.optim, "value", args.optim))
    if any(part in name for part in _IN_BACKWARD):
        raise UserError("optim", f"{name} steps inside of backward, before gradients are reduced", "choose adamw_torch")
    if args.n_gpu > 1:
        raise UserError("n_gpu", f"one process would use {args.n_gpu} GPUs", "start it by `torchrun --nproc-per-node`")


class ZeroTrainer(ZeroTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with `zeroshard.Zero`; see `ZeroTrainerMixin` for its additional argument."""
