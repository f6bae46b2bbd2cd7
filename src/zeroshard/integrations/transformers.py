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
from zeroshard.host.errors import UserError
from zeroshard.integrations.accelerate import SHARDS, Accelerator, of_first_rank
from zeroshard.integrations.own_rows import LabelCount, OwnRows, without_labels
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
        "leave it out and compile the model in place before: `model.compile()`",
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
        **kwargs: keyword arguments of the Trainer.

    Raises:
        UserError: a setting that cannot work with the engine; the message says which, and what to do.
    """

    zero_plugin: ZeroPlugin
    _rows: OwnRows | None = None  # of the batch that the loader has given last
    _num_labels: Any = None  # of the batches of a step, or of the one that is evaluated
    _last_of_step: Any = None

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        self.zero_plugin = zero_plugin or ZeroPlugin()
        self._evaluated: list[tuple[int, torch.Tensor]] = []  # rows and loss of each batch
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

    # -- what counts of a batch -------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """As in the Trainer, of each rank's own rows: `zeroshard.integrations.own_rows`."""
        return super().get_batch_samples(map(self._of_own_rows, epoch_iterator), num_batches, device)

    def _of_own_rows(self, batch: Any) -> Any:
        self._rows = OwnRows.of(self.accelerator, batch)
        return batch if self._rows is None else self._rows.take(batch)

    def _get_num_items_in_batch(self, batch_samples: list[Any], *args: Any, **kwargs: Any) -> Any:
        self._last_of_step = batch_samples[-1] if batch_samples else None
        if batch_samples and self._rows is not None and not self._rows.num and self.args.average_tokens_across_devices:
            batch_samples = [*batch_samples[:-1], without_labels(batch_samples[-1])]
        found = super()._get_num_items_in_batch(batch_samples, *args, **kwargs)
        self._num_labels = LabelCount.of(found) if isinstance(found, torch.Tensor) else found
        return self._num_labels

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As in the Trainer, which takes each loss for one that is divided by the number of labels of all ranks."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        unused = isinstance(self._num_labels, LabelCount) and not self._num_labels.is_used
        if not unused or not self.args.average_tokens_across_devices:
            return found
        loss, *outputs = found if return_outputs else (found,)
        loss = loss / self.accelerator.num_processes
        return (loss, *outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in the Trainer; a rank with fewer rows than others has a smaller share in the loss of its last batch."""
        if self._rows is None or self._rows.is_even or inputs is not self._last_of_step:
            return super().training_step(model, inputs, *args, **kwargs)
        with self.accelerator.loss_times(self._share):
            return super().training_step(model, inputs, *args, **kwargs) * self._share()

    def _share(self) -> float:
        """The factor of a rank's loss, once it was computed, in the mean of all ranks'."""
        rows, labels = self._rows, self._num_labels
        assert rows is not None
        counted = labels is not None and (not isinstance(labels, LabelCount) or labels.is_used)
        return rows.share(counted=counted and self.args.average_tokens_across_devices)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """As in the Trainer, of each rank's own rows."""
        self._rows = rows = OwnRows.of(self.accelerator, inputs)
        self._num_labels = None
        if rows is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        loss, logits, labels = super().prediction_step(model, rows.take(inputs), *args, **kwargs)
        if loss is not None and not rows.is_even:
            loss = self.accelerator.reduce(loss * self._share(), reduction="mean")
        if loss is not None:
            self._evaluated.append((rows.total, loss))
        return loss, rows.filled(logits), rows.filled(labels)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As in the Trainer; the loss is the mean over all ranks' own rows."""
        self._evaluated = []
        self.gather_function = self.accelerator.gather_for_metrics  # Seq2SeqTrainer would keep repeated rows
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._evaluated:
            sums = torch.stack([num_rows * loss.double() for num_rows, loss in self._evaluated])
            loss = self.accelerator.reduce(sums.sum(), reduction="mean") / sum(num for num, _ in self._evaluated)
            output.metrics[f"{metric_key_prefix}_loss"] = float(loss)
        return output

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
