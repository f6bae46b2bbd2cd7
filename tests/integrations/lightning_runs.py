"""Fits by Lightning's Trainer, with the callbacks and arguments that people give it; see `beside_one_process`."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from beside_one_process import main


def module():
    from lightning.pytorch import LightningModule
    from torch import nn

    class Net(LightningModule):
        """Calls itself, keeps a list of what it saw, has a scheduler."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(31, 16)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3))
            self.head = nn.Linear(16, 31)
            self.losses, self.val_losses = [], []

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return self.head(x)

        def _loss(self, batch):
            return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        def training_step(self, batch):
            loss = self._loss(batch)
            self.losses.append(self.trainer.strategy.reduce(loss.detach()).item())
            return loss

        def validation_step(self, batch):
            self.log("val_loss", self._loss(batch), sync_dist=True)

        def on_validation_end(self):
            self.val_losses.append(self.trainer.callback_metrics["val_loss"].item())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)}

    return Net()


def _loader(rows, world_size):
    """Each rank's rows of the same batches."""
    from torch.utils.data import DataLoader, DistributedSampler

    rank = int(os.environ.get("RANK", "0"))
    sampler = DistributedSampler(rows, world_size, rank, shuffle=False)
    return DataLoader(rows, batch_size=4 // world_size, sampler=sampler)


def fitted(out, stage, callbacks=(), net=None, ckpt=None, units="auto", **settings):
    """A Trainer that has fitted, and its module: 8 steps of 4 rows."""
    from lightning.pytorch import Trainer

    from zeroshard.integrations.lightning import ZeroStrategy
    from zeroshard.integrations.plugin import ZeroPlugin

    num_ranks = 1 if stage is None else 2
    strategy = "auto" if stage is None else ZeroStrategy(ZeroPlugin(stage=stage, units=units))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy, default_root_dir=str(out),
        **{"max_steps": 8, "enable_checkpointing": False, **quiet, **settings}, callbacks=list(callbacks),
    )  # fmt: skip
    rows = torch.randint(0, 31, (32, 9), generator=torch.Generator().manual_seed(1))
    net = net or module()
    net.loaders = [_loader(rows, num_ranks), _loader(rows[:8], num_ranks)]
    trainer.fit(net, *net.loaders, ckpt_path=ckpt)
    return trainer, net


def told(trainer, net):
    engine = getattr(trainer.strategy, "engine", None)
    state = net.state_dict() if engine is None else engine.state_dict()
    return {
        "losses": net.losses,
        "val": net.val_losses,
        "weights": {name: value.clone() for name, value in state.items()},
    }


SCHEDULED = {"max_steps": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 4}


def fit(out, stage):
    """With accumulation, clipping by the norm, a schedule, and evaluations between steps and after them."""
    return told(*fitted(out, stage, **SCHEDULED))


def memory(out, stage):
    """The engine's bytes; of one process nothing."""
    trainer, _ = fitted(out, stage, max_steps=1)
    engine = getattr(trainer.strategy, "engine", None)
    return None if engine is None else engine.memory_bytes()


def resumed(out, stage):
    """From the second step on: from a checkpoint of its own, of the other stage, and of one process."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(out, "{step}", save_top_k=-1, every_n_train_steps=2, save_on_train_epoch_end=False)
    trainer, net = fitted(out, stage, [saves], enable_checkpointing=True, **SCHEDULED)
    for _ in range(2):  # over what it has written
        trainer.save_checkpoint(out / "last.ckpt")
    validated = trainer.validate(net, net.loaders[1], verbose=False)
    own, plain = out / "step=2.ckpt", out.parent / "resumed-None" / "step=2.ckpt"
    assert stage is None or sorted(path.name for path in own.iterdir()) == ["meta.ckpt", "zero"]
    other = None if stage is None else 4 - stage
    found = [(own, stage), (own, other), (plain, stage)]
    again = [
        told(*fitted(out, at, ckpt=path, units="auto" if at is None else "blocks", **SCHEDULED)) for path, at in found
    ]
    return {"again": again, "validated": validated}


def bf16(out, stage):
    """What it computes in, and how far the losses may be from those of fp32."""
    trainer, net = fitted(out, stage, precision="bf16-mixed" if stage else "32-true", **SCHEDULED)
    engine = getattr(trainer.strategy, "engine", None)
    groups = () if engine is None else engine._runtime.groups()
    weights = told(trainer, net)["weights"].values()
    return {
        "computes": {group.params.full.dtype for group in groups},
        "kept": {w.dtype for w in weights},
        "losses": net.losses,
    }


def refused_precision(out, stage):
    return fitted(out, stage, precision="16-true") and None


def ema(out, stage):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return told(*fitted(out, stage, [EMAWeightAveraging(decay=0.5)]))


def ema_bf16(out, stage):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return told(*fitted(out, stage, [EMAWeightAveraging(decay=0.5)], precision="bf16-mixed"))


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
    fit, memory, resumed, bf16, refused_precision,
    ema, ema_bf16, best_checkpoint, finetuning, finetuning_of_trained, manual, pruning,
    weights_by_name, module_state,
]  # fmt: skip

if __name__ == "__main__":
    main(RUNS, prepare)
