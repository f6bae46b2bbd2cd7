"""The trainer's optimizers: what each of them excludes, and from which others' checkpoints a run may go on."""

from __future__ import annotations

from typing import Any, Literal

from zeroshard.host.errors import UserError

OptimizerName = Literal["adamw", "adamw8bit", "flash-adamw", "muon"]
IN_8_BITS = frozenset({"adamw8bit", "flash-adamw"})
WEIGHTS_IN_BF16 = frozenset({"flash-adamw"})


def same_rule(one: str, other: str) -> bool:
    """Whether two optimizers update by the same rule, so that states of one can be converted to those of the other."""
    return (one == "muon") == (other == "muon")


def check_optimizer(config: Any) -> None:
    """Raise UserError if another setting of ``config``, the `TrainConfig`, contradicts the optimizer."""
    name, without = config.optimizer, "leave it out, or use --optimizer adamw"
    if name == "muon" and config.lora.rank:
        what = f"{name} is made for whole matrices, and lora.rank = {config.lora.rank} trains narrow ones"
        raise UserError("optimizer", what, "use adamw")
    if name == "muon" and config.plan.enforce:
        raise UserError("plan.enforce", f"{name} needs unsharded matrices, which no plan predicts", without)
    if config.state_format != "fp32" and name != "adamw":
        what = f"{config.state_format} is for states of torch's AdamW, and optimizer is {name}"
        raise UserError("state_format", what, without)
    narrow = f"{name}'s" if name in IN_8_BITS else config.state_format
    if config.plan.enforce and config.keeps_state_on_disk and narrow != "fp32":
        what = f"no plan predicts a file of {narrow} states"
        raise UserError("plan.enforce", what, f"{without} with states in fp32")
    if name in WEIGHTS_IN_BF16:
        _check_weights_in_bf16(config)


def _check_weights_in_bf16(config: Any) -> None:
    name, instead = config.optimizer, "or use --optimizer adamw8bit"
    if config.dtype not in ("auto", "bfloat16"):
        what = f"{config.dtype}, and weights of {name} are bfloat16"
        raise UserError("dtype", what, f"leave it out, {instead}")
    if config.ema_decay:
        what = f"{name} keeps weights in bfloat16, and an average of such weights would hardly move"
        raise UserError("ema_decay", what, f"leave it out, {instead}")
    if config.local_steps.on:
        what = f"{name} keeps a part of each weight in its states, which outer steps do not average"
        raise UserError("local_steps.every", what, f"leave it out, {instead}")
