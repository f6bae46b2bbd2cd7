"""Evaluations of `transformers.Trainer` in one process and on two ranks: ``python evaluations.py OUT``.

It writes ``OUT/losses.pickle``: of both ``{(model, number of rows, rows in a batch of all ranks): loss and metrics}``.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch
from loops import in_ranks
from torch import nn

LABELS = (24, 6, 12, 3, 20, 9, 24, 4)  # that count, of each row


class Own(nn.Module):
    """A model that knows nothing of the Trainer's counts of labels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _rows(count):
    ids = torch.randint(0, 64, (count, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row, counted in zip(labels, LABELS, strict=False):
        row[counted:] = -100
    return [{"input_ids": row, "labels": theirs} for row, theirs in zip(ids, labels, strict=True)]


def evaluated(out):
    """The losses, and the numbers of rows in the metrics."""
    from transformers import Trainer, TrainingArguments

    from zeroshard.integrations.plugin import ZeroPlugin
    from zeroshard.integrations.transformers import ZeroTrainer

    world_size, found = int(os.environ.get("WORLD_SIZE", "1")), {}
    seen = []
    for name, model in (("gpt2", _gpt2), ("own", Own)):
        for count in (8, 7, 5, 3):
            for batch in (2, 4, 8):
                torch.manual_seed(0)
                arguments = TrainingArguments(
                    str(out / "trainer"),
                    per_device_eval_batch_size=batch // world_size,
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=True,
                )
                kind, kwargs = (Trainer, {}) if world_size == 1 else (ZeroTrainer, {"zero_plugin": ZeroPlugin(stage=3)})

                def rows_of(predicted):
                    seen.append(len(predicted.predictions))
                    return {"labels": int((predicted.label_ids != -100).sum())}

                trainer = kind(model(), arguments, eval_dataset=_rows(count), compute_metrics=rows_of, **kwargs)
                metrics = trainer.evaluate()
                found[name, count, batch] = (metrics["eval_loss"], metrics["eval_labels"], seen.pop())
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    import transformers  # noqa: F401 -- before the ranks are forked

    plain, ranks = in_ranks(1, evaluated, folder)[0], in_ranks(2, evaluated, folder)
    (folder / "losses.pickle").write_bytes(pickle.dumps((plain, ranks)))
