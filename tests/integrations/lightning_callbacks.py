"""Callbacks and arguments that people give Lightning's Trainer: ``python lightning_callbacks.py OUT [NAME ...]``.

Each entry of `RUNS` fits in one process, and in two ranks at stages 1 and 3; the numbers that it returns must agree.
``OUT/results.pt`` has, by name, what each returned, or the text of its error.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning_loops import _loader, module
from loops import in_ranks

NAMES: list[str] = []


def fitted(out, stage, callbacks=(), net=None, fits=True, **settings):
    """A Trainer that has fitted, and its module: 8 steps of 4 rows."""
    from lightning.pytorch import Trainer

    from zeroshard.integrations.lightning import ZeroStrategy
    from zeroshard.integrations.plugin import ZeroPlugin

    num_ranks = 1 if stage is None else 2
    strategy = "auto" if stage is None else ZeroStrategy(ZeroPlugin(stage=stage))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy, default_root_dir=str(out),
        **{"max_steps": 8, "enable_checkpointing": False, **quiet, **settings}, callbacks=list(callbacks),
    )  # fmt: skip
    rows = torch.randint(0, 31, (32, 9), generator=torch.Generator().manual_seed(1))
    net = net or module()
    net.loaders = [_loader(rows, num_ranks), _loader(rows[:8], num_ranks)]
    if fits:
        trainer.fit(net, *net.loaders)
    return trainer, net


def told(trainer, net):
    engine = getattr(trainer.strategy, "engine", None)
    state = net.state_dict() if engine is None else engine.state_dict()
    return {
        "losses": net.losses,
        "val": net.val_losses,
        "weights": {name: value.clone() for name, value in state.items()},
    }


def ema(out, stage):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return told(*fitted(out, stage, [EMAWeightAveraging(decay=0.5)]))


def ema_validated(out, stage):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return told(*fitted(out, stage, [EMAWeightAveraging(decay=0.5)], val_check_interval=4))


def ema_bf16(out, stage):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return told(*fitted(out, stage, [EMAWeightAveraging(decay=0.5)], precision="bf16-mixed"))


def swa(out, stage):
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return told(
        *fitted(
            out,
            stage,
            [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, device=None)],
            max_steps=-1,
            max_epochs=3,
        )
    )


def early_stopping(out, stage):
    from lightning.pytorch.callbacks import EarlyStopping

    trainer, net = fitted(out, stage, [EarlyStopping("val_loss", patience=0, mode="max")], max_steps=-1, max_epochs=5)
    return {**told(trainer, net), "steps": trainer.global_step}


def best_checkpoint(out, stage):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(out, "{step}", monitor="val_loss", save_top_k=1, save_last=True, mode="min")
    trainer, net = fitted(out, stage, [saves], enable_checkpointing=True, val_check_interval=2)
    found = trainer.validate(net, net.loaders[1], ckpt_path="best", verbose=False)
    last = trainer.validate(net, net.loaders[1], ckpt_path="last", verbose=False)
    return {
        **told(trainer, net),
        "best": Path(saves.best_model_path).name,
        "found": found,
        "last": last,
        "kept": sorted(p.name for p in Path(out).iterdir()),
    }


def finetuning(out, stage, trained_alone=False):
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreezes(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.embed)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.embed, optimizer, lr=1e-2)

    net = module()
    if trained_alone:
        kind = type(net)
        kind.configure_optimizers = lambda self: torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], 1e-2
        )
    return told(*fitted(out, stage, [Unfreezes()], net, max_steps=-1, max_epochs=2))


def finetuning_of_trained(out, stage):
    return finetuning(out, stage, trained_alone=True)


def accumulation_schedule(out, stage):
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return told(*fitted(out, stage, [GradientAccumulationScheduler({0: 1, 1: 2})], max_steps=-1, max_epochs=2))


def clip_value(out, stage):
    return told(*fitted(out, stage, gradient_clip_val=0.01, gradient_clip_algorithm="value"))


def clip_norm_accumulated(out, stage):
    return told(*fitted(out, stage, gradient_clip_val=0.1, accumulate_grad_batches=2, max_steps=4))


def pruning(out, stage):
    from lightning.pytorch.callbacks import ModelPruning

    return told(*fitted(out, stage, [ModelPruning("l1_unstructured", amount=0.5)], max_steps=-1, max_epochs=2))


def lr_finder(out, stage):
    from lightning.pytorch.tuner import Tuner

    trainer, net = fitted(out, stage, fits=False)
    net.lr = 1e-3
    found = Tuner(trainer).lr_find(net, *net.loaders, num_training=5)
    return {"losses": [float(x) for x in found.results["loss"]], "weights": told(trainer, net)["weights"]}


def tested_and_predicted(out, stage):
    net = module()
    net.test_step = net.validation_step.__func__.__get__(net)
    type(net).test_step = lambda self, batch: self.log("test_loss", self._loss(batch), sync_dist=True)
    type(net).predict_step = lambda self, batch: self(batch)
    trainer, net = fitted(out, stage, net=net)
    found = trainer.test(net, net.loaders[1], verbose=False)
    shown = torch.cat(trainer.predict(net, net.loaders[1]))
    return {"test": found, "shape": tuple(shown.shape[1:]), "finite": bool(shown.isfinite().all())}


def manual(out, stage):
    net = module()

    class Manual(type(net)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch):
            optimizer = self.optimizers()
            loss = self._loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(self.trainer.strategy.reduce(loss.detach()).item())

    return told(*fitted(out, stage, net=Manual()))


def anomaly(out, stage):
    return told(*fitted(out, stage, detect_anomaly=True, max_steps=2))


def weights_by_name(out, stage):
    trainer, net = fitted(out, stage, max_steps=1)
    return {"names": sorted(told(trainer, net)["weights"]), "own": sorted(name for name, _ in net.named_parameters())}


def module_state(out, stage):
    """After fit, as scripts do: the module's own state."""
    trainer, net = fitted(out, stage, max_steps=1)
    engine = getattr(trainer.strategy, "engine", None)
    with nullcontext() if engine is None else engine.full_params():
        return {name: value.clone() for name, value in net.state_dict().items()}


RUNS = [
    ema, ema_validated, ema_bf16, swa, early_stopping, best_checkpoint, finetuning, finetuning_of_trained, manual,
    accumulation_schedule, clip_value, clip_norm_accumulated, pruning, lr_finder, tested_and_predicted, anomaly,
    weights_by_name, module_state,
]  # fmt: skip


def run_all(out, stage):
    """By name: what the run returned, or its error."""
    found = {}
    for run in RUNS:
        if NAMES and run.__name__ not in NAMES:
            continue
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
    warnings.simplefilter("ignore")  # Lightning has advice for larger runs
    import lightning.pytorch  # noqa: F401 -- before the ranks are forked

    import zeroshard.integrations.lightning  # noqa: F401

    results = {"plain": in_ranks(1, plain, out)[0], 1: in_ranks(2, first_stage, out), 3: in_ranks(2, third_stage, out)}
    torch.save(results, out / "results.pt")


if __name__ == "__main__":
    NAMES += sys.argv[2:]
    main(Path(sys.argv[1]))
