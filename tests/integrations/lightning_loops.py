"""What the tests of the strategy for Lightning ask about, run once: ``python lightning_loops.py OUT [all]``.

Lightning is imported in one process, which forks the ranks: one for the runs that nothing shards, then two.
Without ``all`` only the first run of each is made.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from loops import in_ranks

SIZES = {"max_steps": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 4}


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


def run(out, world_size, ckpt=None, strategy="auto", **changes):
    """A fit; its losses, its weights and the Trainer."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    rows = torch.randint(0, 31, (32, 9), generator=torch.Generator().manual_seed(1))
    saves = ModelCheckpoint(out, "{step}", save_top_k=-1, every_n_train_steps=2, save_on_train_epoch_end=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    settings = {
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": strategy,
        "callbacks": [saves],
        **SIZES,
        **quiet,
    }
    trainer, net = Trainer(**{**settings, **changes}), module()
    trainer.fit(net, _loader(rows, world_size), _loader(rows[:8], world_size), ckpt_path=ckpt)
    engine = getattr(trainer.strategy, "engine", None)
    state = net.state_dict() if engine is None else engine.state_dict()
    weights = {name: value.clone() for name, value in state.items()}
    return {"losses": net.losses, "val": net.val_losses, "weights": weights}, trainer


def plain(out):
    """Nothing is sharded, in one process."""
    return {"first": run(out / "plain", 1)[0]}


def plain_resumed(out):
    """The same, and once more from its second step on."""
    found = plain(out)
    found["resumed"] = run(out / "plain-again", 1, out / "plain" / "step=2.ckpt")[0]
    return found


def sharded(out):
    """Two ranks, stage 3."""
    return _first_sharded(out)[0]


def _first_sharded(out):
    from zeroshard.integrations.lightning import ZeroStrategy

    found = {}
    found["first"], trainer = run(out / "zero", 2, strategy=ZeroStrategy())
    found["memory"] = trainer.strategy.engine.memory_bytes()
    return found, trainer


def sharded_all(out):
    """Two ranks: what follows the first run too."""
    from zeroshard.integrations.lightning import ZeroStrategy
    from zeroshard.integrations.plugin import ZeroPlugin

    found, trainer = _first_sharded(out)
    for _ in range(2):  # over what it has written
        trainer.save_checkpoint(out / "last.ckpt")
    found["validated"] = trainer.validate(trainer.lightning_module, trainer.val_dataloaders, verbose=False)
    found["files"] = sorted(path.name for path in (out / "zero" / "step=2.ckpt").iterdir())
    for stage in (3, 1):
        again = ZeroStrategy(ZeroPlugin(stage=stage, units="blocks"))
        found[f"resumed at {stage}"] = run(out / f"again-{stage}", 2, out / "zero" / "step=2.ckpt", again)[0]
    found["from plain"] = run(out / "moved", 2, out / "plain" / "step=2.ckpt", ZeroStrategy(ZeroPlugin(stage=2)))[0]
    found["bf16"], trainer = run(out / "bf16", 2, strategy=ZeroStrategy(), precision="bf16-mixed")
    found["computes"] = {str(group.params.full.dtype) for group in trainer.strategy.engine._runtime.groups()}
    found["refused"] = []
    for options, changes in (({}, {"precision": "16-true"}), ({"find_unused_parameters": True}, {})):
        try:
            run(out / "refused", 2, strategy=ZeroStrategy(**options), **changes)
        except ValueError as error:
            found["refused"].append(str(error))
    return found


def main(out, runs):
    warnings.simplefilter("ignore")  # Lightning has advice for larger runs
    import lightning.pytorch  # noqa: F401 -- before the ranks are forked

    import zeroshard.integrations.lightning  # noqa: F401

    alone, together = (plain_resumed, sharded_all) if runs == ["all"] else (plain, sharded)
    results = {"plain": in_ranks(1, alone, out)[0], "ranks": in_ranks(2, together, out)}
    torch.save(results, out / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
