"""TRL's trainers in one process and on two ranks: ``python trl_loops.py OUT`` writes ``OUT/results.pt``."""

import sys
from pathlib import Path

import torch
from loops import in_ranks

KINDS, STAGES = ("SFT", "DPO"), (2, 3)
VOCAB = 64


def _words(generator, number):
    return " ".join(f"w{int(word)}" for word in torch.randint(VOCAB - 4, (number,), generator=generator))


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    names = [*special.values(), *(f"w{number}" for number in range(VOCAB - 4))]
    made = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def _trained(kind, world_size, stage, out):
    """Losses, norms of gradients, and weights of three steps of four rows."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from zeroshard.integrations.plugin import ZeroPlugin
    from zeroshard.integrations.transformers import ZeroTrainerMixin

    draw, rows = torch.Generator().manual_seed(1), []
    for _ in range(12):
        pair = {name: _words(draw, 5) for name in ("prompt", "chosen", "rejected")}
        rows.append({"text": _words(draw, 12)} if kind == "SFT" else pair)
    base, settings = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    args = settings(
        output_dir=str(out / "trainer"),
        max_steps=3,
        per_device_train_batch_size=4 // world_size,
        learning_rate=1e-3,
        logging_steps=1,
        max_length=32,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    model = AutoModelForCausalLM.from_pretrained(out / "model")  # of which DPO loads its reference
    more = {"train_dataset": Dataset.from_list(rows), "processing_class": _tokenizer()}
    if world_size == 1:
        trainer = base(model=model, args=args, **more)
    else:
        sharded = type(f"Zero{kind}Trainer", (ZeroTrainerMixin, base), {})
        trainer = sharded(model=model, args=args, zero_plugin=ZeroPlugin(stage=stage), **more)
    trainer.train()
    engine = getattr(trainer, "engine", None)
    weights = dict(trainer.model.state_dict() if engine is None else engine.state_dict())
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in log], [entry["grad_norm"] for entry in log], weights


def plain(out):
    """In one process."""
    return {kind: _trained(kind, 1, 0, out) for kind in KINDS}


def sharded(out):
    """Two ranks."""
    return {(kind, stage): _trained(kind, 2, stage, out) for kind in KINDS for stage in STAGES}


def main(out):
    """Save a new model, and train it in both ways."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, **sizes)
    )
    model.save_pretrained(out / "model")
    found = {"plain": in_ranks(1, plain, out)[0], "ranks": in_ranks(2, sharded, out)}
    torch.save(found, out / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
