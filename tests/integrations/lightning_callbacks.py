"""Callbacks and arguments that people give Lightning's Trainer; see `beside_one_process`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from beside_one_process import main
from lightning_loops import _loader, module


def fitted(out, stage, callbacks=(), net=None, **settings):
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


def clip_value(out, stage):
    return told(*fitted(out, stage, gradient_clip_val=0.01, gradient_clip_algorithm="value"))


def pruning(out, stage):
    from lightning.pytorch.callbacks import ModelPruning

    return told(*fitted(out, stage, [ModelPruning("l1_unstructured", amount=0.5)], max_steps=-1, max_epochs=2))


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


def weights_by_name(out, stage):
    trainer, net = fitted(out, stage, max_steps=1)
    return {"names": sorted(told(trainer, net)["weights"]), "own": sorted(name for name, _ in net.named_parameters())}


def module_state(out, stage):
    """After fit, as scripts do: the module's own state."""
    trainer, net = fitted(out, stage, max_steps=1)
    engine = getattr(trainer.strategy, "engine", None)
    with nullcontext() if engine is None else engine.full_params():
        return {name: value.clone() for name, value in net.state_dict().items()}


def prepare():
    warnings.simplefilter("ignore")  # Lightning has advice for larger runs
    import lightning.pytorch  # noqa: F401

    import zeroshard.integrations.lightning  # noqa: F401


RUNS = [
    ema, ema_bf16, swa, best_checkpoint, finetuning, finetuning_of_trained, manual, clip_value, pruning,
    weights_by_name, module_state,
]  # fmt: skip

if __name__ == "__main__":
    main(RUNS, prepare)
