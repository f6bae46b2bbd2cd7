"""Arguments and callbacks that people give `transformers.Trainer`: ``python trainer_arguments.py OUT [NAME ...]``.

Each entry of `RUNS` trains in one process with the stock Trainer, and in two ranks at stages 1 and 3; the numbers that
it returns must agree. ``OUT/results.pt`` has, by name, what each returned, or the text of its error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from loops import in_ranks

NAMES: list[str] = []
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES))


def adapted(config):
    from peft import get_peft_model

    model = llama()
    torch.manual_seed(1)
    return get_peft_model(model, config)


def lora(**settings):
    from peft import LoraConfig

    return adapted(LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings))


def prompts():
    from peft import PromptTuningConfig

    return adapted(PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def rows(number, lengths=(16,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(0, 64, (lengths[index % len(lengths)],), generator=generator) for index in range(number)]
    return [{"input_ids": row, "labels": row.clone()} for row in found]


def padded(features):
    long = max(len(each["input_ids"]) for each in features)
    values = {"input_ids": 0, "labels": -100}
    return {
        name: torch.stack(
            [torch.nn.functional.pad(each[name], (0, long - len(each[name])), value=value) for each in features]
        )
        for name, value in values.items()
    }


def trainer(out, stage, model, callbacks=(), data=None, kind=None, **settings):
    """A Trainer of 4 steps of 4 rows: in one process, or at ``stage`` on two ranks."""
    from transformers import Trainer, TrainingArguments

    from zeroshard.integrations.plugin import ZeroPlugin
    from zeroshard.integrations.transformers import ZeroTrainerMixin

    kind = kind or Trainer
    defaults = {
        "max_steps": 4,
        "learning_rate": 5e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_eval_batch_size": 2,
    }
    args = TrainingArguments(
        str(out), per_device_train_batch_size=4 if stage is None else 2, **{**defaults, **settings}
    )
    given = {"model": model, "args": args, "train_dataset": data or rows(16), "eval_dataset": rows(8, seed=5)}
    if stage is None:
        return kind(**given, callbacks=list(callbacks))
    mixed = type("Mixed", (ZeroTrainerMixin, kind), {})
    return mixed(**given, callbacks=list(callbacks), zero_plugin=ZeroPlugin(stage=stage))


def numbers(trainer):
    names = ("loss", "grad_norm", "eval_loss", "eval_best")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def weights(trainer):
    engine = getattr(trainer, "engine", None)
    state = trainer.model.state_dict() if engine is None else engine.state_dict()
    return {name: value.clone() for name, value in state.items()}


def saved(folder):
    from safetensors.torch import load_file

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    files = {path.name: load_file(path) for path in Path(folder).glob("*.safetensors")}
    return {f"{file}:{name}": value for file, tensors in files.items() for name, value in tensors.items()}


def _best(model, out, stage, **settings):
    """The best is not the last: the rate is too high."""
    found = trainer(
        out, stage, model,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        **{"load_best_model_at_end": True, "learning_rate": 2.0, **settings},
    )  # fmt: skip
    found.train()
    best = Path(found.state.best_model_checkpoint).name
    return {"log": numbers(found), "weights": weights(found), "best": best, "again": found.evaluate()["eval_loss"]}


def modules_to_save(out, stage):
    found = trainer(out, stage, lora(modules_to_save=["lm_head"]), save_strategy="steps", save_steps=2)
    found.train()
    found.save_model(str(out / "last"))
    half = saved(out / "checkpoint-2")
    return {"log": numbers(found), "weights": weights(found), "saved": saved(out / "last"), "half": half}


def modules_to_save_best(out, stage):
    return _best(lora(modules_to_save=["lm_head"]), out, stage)


def lora_best(out, stage):
    return _best(lora(), out, stage)


def lora_resumed(out, stage):
    first = trainer(out, stage, lora(), save_strategy="steps", save_steps=2)
    first.train()
    again = trainer(out, stage, lora(), save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {"log": numbers(again)[:-1], "weights": weights(again)}


def prompt_tuning(out, stage):
    found = trainer(out, stage, prompts(), save_strategy="steps", save_steps=2)
    found.train()
    found.save_model(str(out / "last"))
    return {"log": numbers(found), "saved": saved(out / "last")}


def prompt_tuning_best(out, stage):
    return _best(prompts(), out, stage)


def early_stopping(out, stage):
    from transformers import EarlyStoppingCallback

    found = trainer(
        out, stage, llama(), [EarlyStoppingCallback(1)], max_steps=8, learning_rate=0.5,
        eval_strategy="steps", eval_steps=1, save_strategy="best", metric_for_best_model="eval_loss",
        greater_is_better=False, save_total_limit=1,
    )  # fmt: skip
    found.train()
    return {"log": numbers(found), "step": found.state.global_step, "kept": sorted(p.name for p in Path(out).iterdir())}


def by_length(out, stage):
    found = trainer(out, stage, llama(), data=rows(16, (16, 8, 12, 5)), train_sampling_strategy="group_by_length")
    found.data_collator = padded
    found.train()
    return {"log": numbers(found), "weights": weights(found)}


def predictions(out, stage):
    found = trainer(out, stage, llama(), eval_accumulation_steps=1)
    found.train()
    told = found.predict(rows(8, seed=6))
    return {"predictions": torch.tensor(told.predictions), "loss": told.metrics["test_loss"]}


def metrics(out, stage):
    found = trainer(out, stage, llama(), eval_strategy="epoch", eval_on_start=True)
    found.compute_metrics = lambda told: {"best": float((told.predictions.argmax(-1) == told.label_ids).mean())}
    found.train()
    return {"log": numbers(found)}


def accumulation(out, stage):
    found = trainer(out, stage, llama(), gradient_accumulation_steps=2, max_steps=2, gradient_checkpointing=True)
    found.train()
    return {"log": numbers(found), "weights": weights(found)}


def noise_and_smoothing(out, stage):
    found = trainer(out, stage, llama(), label_smoothing_factor=0.1, max_grad_norm=0.0, weight_decay=0.1)
    found.train()
    return {"log": numbers(found), "weights": weights(found)}


def neftune(out, stage):
    found = trainer(out, stage, llama(), neftune_noise_alpha=1e-9)
    found.train()
    return {"log": numbers(found), "weights": weights(found)}


def adafactor(out, stage):
    found = trainer(out, stage, llama(), optim="adafactor")
    found.train()
    return {"log": numbers(found), "weights": weights(found)}


def trained_twice(out, stage):
    found = trainer(out, stage, llama())
    found.train()
    found.train()
    return {"log": numbers(found), "weights": weights(found)}


def model_init(out, stage):
    from transformers import Trainer

    class Made(Trainer):
        def __init__(self, model, **kwargs):
            super().__init__(model_init=llama, **kwargs)

    found = trainer(out, stage, None, kind=Made)
    found.train()
    found.train()
    return {"log": numbers(found), "weights": weights(found)}


def only_model_resumed(out, stage):
    """A checkpoint without optimizer: the stock Trainer resumes with a new one."""
    first = trainer(out, stage, llama(), save_strategy="steps", save_steps=2, save_only_model=True)
    first.train()
    again = trainer(out, stage, llama(), save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {"log": numbers(again)[:-1], "weights": weights(again)}


RUNS = [
    modules_to_save, modules_to_save_best, lora_best, lora_resumed, prompt_tuning, prompt_tuning_best, early_stopping,
    by_length, predictions, metrics, accumulation, noise_and_smoothing, neftune, adafactor, trained_twice, model_init,
    only_model_resumed,
]  # fmt: skip


def run_all(out, stage):
    """By name: what the run returned, or its error."""
    from accelerate.state import AcceleratorState, GradientState

    found = {}
    for run in RUNS:
        if NAMES and run.__name__ not in NAMES:
            continue
        AcceleratorState._reset_state()
        GradientState._reset_state()
        try:
            found[run.__name__] = run(out / f"{run.__name__}-{stage}", stage)
        except Exception as error:  # noqa: BLE001 -- it is told to the test
            found[run.__name__] = f"{type(error).__name__}: {error}"
    return found


def plain(out):
    return run_all(out, None)


def first_stage(out):
    return run_all(out, 1)


def third_stage(out):
    return run_all(out, 3)


def main(out):
    import peft  # noqa: F401 -- before the ranks are forked
    import transformers.trainer  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    import zeroshard.integrations.transformers  # noqa: F401

    results = {"plain": in_ranks(1, plain, out)[0], 1: in_ranks(2, first_stage, out), 3: in_ranks(2, third_stage, out)}
    torch.save(results, out / "results.pt")
    print(json.dumps(sorted(results["plain"])))


if __name__ == "__main__":
    NAMES += sys.argv[2:]
    main(Path(sys.argv[1]))
