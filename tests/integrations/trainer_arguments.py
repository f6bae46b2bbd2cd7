"""What people give `transformers.Trainer`: ``python trainer_arguments.py OUT [STAGE-NAME ...]``.

Each run is made in one process, and in two ranks at stages 1 and 3. It takes a folder and a stage (None: one process,
without the engine) and returns numbers, which must agree. ``OUT/results.pt`` has by "plain", 1 and 3 (of each rank),
and by the run's name, what it returned, or its error's text.
"""

import sys
from pathlib import Path

import torch
from loops import in_ranks

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


def coded(stage):
    """Adapters on a base that the engine keeps in four bits; of one process, with the values of these."""
    from zeroshard.comm import NullCommunicator
    from zeroshard.zero import Zero

    model = lora()
    if stage is None:
        Zero(model, 0, "auto", NullCommunicator(1), frozen_format="nf4").remove()
    return model


def rows(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(0, 64, (16,), generator=generator) for _ in range(number)]
    return [{"input_ids": row, "labels": row.clone()} for row in found]


def trainer(out, stage, model, callbacks=(), frozen_format=None, **settings):
    """A Trainer of 4 steps of 4 rows: in one process, or at ``stage`` on two ranks."""
    from transformers import Trainer, TrainingArguments

    from zeroshard.integrations.plugin import ZeroPlugin
    from zeroshard.integrations.transformers import ZeroTrainer

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
    given = {"model": model, "args": args, "train_dataset": rows(16), "eval_dataset": rows(8, seed=5)}
    if stage is None:
        return Trainer(**given, callbacks=list(callbacks))
    return ZeroTrainer(
        **given, callbacks=list(callbacks), zero_plugin=ZeroPlugin(stage=stage, frozen_format=frozen_format)
    )


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


def lora_resumed(out, stage):
    first = trainer(out, stage, lora(), save_strategy="steps", save_steps=2)
    first.train()
    again = trainer(out, stage, lora(), save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {"log": numbers(again)[:-1], "weights": weights(again)}


def coded_base(out, stage):
    """The best is loaded at the end, and the training goes on elsewhere from a checkpoint in the middle."""
    best = _best(coded(stage), out, stage, frozen_format="nf4")
    again = trainer(out, stage, coded(stage), frozen_format="nf4")
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {**best, "resumed": weights(again)}


def prompt_tuning_best(out, stage):
    return _best(prompts(), out, stage)


def only_model_resumed(out, stage):
    """A checkpoint without optimizer: the stock Trainer resumes with a new one."""
    first = trainer(out, stage, llama(), save_strategy="steps", save_steps=2, save_only_model=True)
    first.train()
    again = trainer(out, stage, llama(), save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {"log": numbers(again)[:-1], "weights": weights(again)}


class Means(torch.nn.Module):
    """A classifier whose loss is the mean over its rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids).mean(dim=1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 0]), "logits": logits}


class TakingMeans(Means):
    """One that takes the number of labels as well, and does not divide by it, as those of transformers."""

    def forward(self, input_ids, labels, **kwargs):
        return super().forward(input_ids, labels)


def _uneven(model, out, stage, rows_of_evaluations=(1, 2, 3, 5, 7), **settings):
    """Rows that ranks cannot share evenly, with other numbers of labels in each: in two epochs, and evaluated."""
    at_once = 4 if stage is None else 2
    settings = {"max_steps": -1, "num_train_epochs": 2, "per_device_eval_batch_size": at_once, **settings}
    found, data, given = trainer(out, stage, model, **settings), rows(7, seed=3), []
    for number, row in enumerate(data):
        row["labels"][1 : 2 * number] = -100
    found.compute_metrics = lambda each: given.append(each) or {"rows": len(each.label_ids)}
    evaluated = [found.evaluate(data[:number]) for number in rows_of_evaluations]
    found.train_dataset = data[:6]  # of the second step a rank has none
    found.train()
    predicted = found.predict(data[:5])
    return {
        "log": numbers(found),
        "weights": weights(found),
        "evaluated": [[each["eval_loss"], each["eval_rows"]] for each in evaluated],
        "predictions": torch.from_numpy(predicted.predictions),
        "labels": torch.from_numpy(predicted.label_ids),
        "seen": [torch.from_numpy(each.label_ids) for each in given],
    }


def uneven_rows(out, stage):
    return _uneven(llama(), out, stage)


def uneven_rows_of_means(out, stage):
    return _uneven(Means(), out, stage)


def uneven_rows_of_means_with_a_number(out, stage):
    return _uneven(TakingMeans(), out, stage)


def uneven_rows_generated(out, stage):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from zeroshard.integrations.plugin import ZeroPlugin
    from zeroshard.integrations.transformers import ZeroTrainerMixin

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes))
    settings = {"use_cpu": True, "report_to": [], "predict_with_generate": True, "generation_max_length": 4}
    args = Seq2SeqTrainingArguments(str(out), per_device_eval_batch_size=4 if stage is None else 2, **settings)
    if stage is None:
        found = Seq2SeqTrainer(model, args)
    else:
        ours = type("Ours", (ZeroTrainerMixin, Seq2SeqTrainer), {})
        found = ours(model, args, zero_plugin=ZeroPlugin(stage=stage))
    return torch.from_numpy(found.predict(rows(5)).predictions)


def uneven_rows_by_length(out, stage):
    settings = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2}
    return _uneven(llama(), out, stage, **settings)


def uneven_rows_dropped(out, stage):
    return _uneven(llama(), out, stage, rows_of_evaluations=(5, 7), dataloader_drop_last=True)


def all_runs(out, names, stage):
    from accelerate.state import AcceleratorState, GradientState

    found = {}
    for run in RUNS:
        stages = (1, 3) if stage is None else (stage,)
        if names and all(f"{each}-{run.__name__}" not in names for each in stages):
            continue
        AcceleratorState._reset_state()
        GradientState._reset_state()
        try:
            found[run.__name__] = run(out / f"{run.__name__}-{stage}", stage)
        except Exception as error:  # noqa: BLE001 -- it is told to the test
            found[run.__name__] = f"{type(error).__name__}: {error}"
    return found


def prepare():
    import peft  # noqa: F401
    import transformers.trainer  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    import zeroshard.integrations.transformers  # noqa: F401


def main(out, names):
    prepare()  # before the ranks are forked
    one, first, third = (
        in_ranks(num_ranks, lambda _, stage=stage: all_runs(out, names, stage), out)
        for num_ranks, stage in ((1, None), (2, 1), (2, 3))
    )
    torch.save({"plain": one[0], 1: first, 3: third}, out / "results.pt")


UNEVEN = [uneven_rows, uneven_rows_of_means_with_a_number, uneven_rows_generated]
UNEVEN += [uneven_rows_of_means, uneven_rows_by_length, uneven_rows_dropped]
RUNS = [
    modules_to_save,
    modules_to_save_best,
    lora_resumed,
    coded_base,
    prompt_tuning_best,
    only_model_resumed,
    *UNEVEN,
]

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
