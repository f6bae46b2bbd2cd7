"""Rows of models that are compiled whole, and of what changes beside that: kernels, 8 bits, packed rows, Muon.

A case has one micro-batch shape, whose step is compiled at its first call; then steps of several micro-batches are
timed, as many as the row's seconds allow. What is left out for want of time is said.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overlap
import rows
import torch
from qwen_shapes import QWEN, QWEN_ALIKE, QWEN_TOY
from torch import Tensor

from zeroshard import kernels
from zeroshard.comm import LocalCommunicator
from zeroshard.kernels import Choice
from zeroshard.models import LanguageModel, build_model, decoder
from zeroshard.optim import MuonAdamW, muon_groups
from zeroshard.train.setup.compiled import compile_model
from zeroshard.train.setup.products_in_8_bits import multiply_in_8_bits
from zeroshard.zero import Zero

Step = Callable[[int], Tensor]


def whole_step(
    model: LanguageModel,
    micro: int,
    vocab: int,
    *,
    stage: int = 1,
    state_format: str = "fp32",
    positions_BT: Tensor | None = None,
) -> Step:
    """A function that takes a step of so many micro-batches of the model, compiled as ``--compile`` does; in bf16.

    ``positions_BT``: of tokens in their documents, whose rows may be longer than `rows.SEQ_LEN`.
    """
    compile_model(model, rows.COMPILER, rows.DEVICE)
    zero = Zero(model, stage, units=model.units, comm=LocalCommunicator(), precision=rows.BF16)
    fused = {"fused": True} if state_format == "fp32" else {}
    optimizer = zero.optimizer(torch.optim.AdamW, state_format=state_format, **rows.ADAMW, **fused)
    given = {} if positions_BT is None else {"positions_BT": positions_BT}
    length = rows.SEQ_LEN if positions_BT is None else positions_BT.shape[1]
    tokens, targets = rows.batch(micro, vocab, seq_len=length)

    def step(num_micro: int) -> Tensor:
        for index in range(num_micro):
            with zero.micro_batch(index == num_micro - 1):
                loss = model(tokens, targets, **given)
                (loss / num_micro).backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _measured(
    budget: rows.Budget, say: rows.Say, case: str, build: Callable[[], tuple[Step, int]], tokens: int, num_micro: int
) -> None:
    """Say the first loss, the seconds of the first step, and of steps of ``num_micro`` micro-batches of ``tokens``."""
    if budget.spent():
        say(case=case, left_out="no time was left")
        return
    with rows.losing_itself_alone(say, case):
        step, flops = build()
        began = time.perf_counter()
        loss = float(step(1))
        say(case=case, first_loss=loss, warm_up_s=time.perf_counter() - began)
        step(1)  # the first step that frees gradients
        for index in range(2 if rows.TOY else 3):
            if index and budget.spent():
                break
            if rows.ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            rows.synchronise()
            began = time.perf_counter()
            step(num_micro)
            queued_s = time.perf_counter() - began
            rows.synchronise()
            peak = torch.cuda.max_memory_allocated() if rows.ON_GPU else 0
            say(case=case, round=index, step_s=time.perf_counter() - began, queued_s=queued_s, peak_bytes=peak,
                tokens=tokens * num_micro, flops_per_token=flops)  # fmt: skip
        del step
    torch._dynamo.reset()  # the next case's graphs are other ones
    rows.cleared()


def gpt2_whole(budget: rows.Budget, say: rows.Say) -> None:
    """A plain loop compiled whole, and ours at stages 1 and 3, in that order."""
    micro = 2 if rows.TOY else 16
    flops = rows.gpt2().num_flops_per_token(rows.SEQ_LEN)
    built: dict[str, Callable[[], tuple[Step, int]]] = {
        "plain, compile whole": lambda: (rows._contestant("plain", "compile whole", micro), flops),
        "zero1, compile whole": lambda: (whole_step(rows.gpt2(), micro, rows.VOCAB), flops),
        "zero3, compile whole": lambda: (whole_step(rows.gpt2(), micro, rows.VOCAB, stage=3), flops),
    }
    for case, build in built.items():
        _measured(budget, say, case, build, micro * rows.SEQ_LEN, 2 if rows.TOY else 32)


def stage_3(budget: rows.Budget, say: rows.Say) -> None:
    """A rank of 8 with 16 rows, eager, as the row overlap has it, before anything else of that row."""
    path = say.out.with_name(f"{say.out.stem}-stage-3.json.gz")
    say(case="zero3", **overlap.measured(3, path))
    rows.cleared()


def _qwen(name: str, budget: rows.Budget, say: rows.Say, micros: tuple[int, ...], **how: Any) -> None:
    sizes = {**QWEN_ALIKE, **(QWEN_TOY if rows.TOY else QWEN[name])}

    def build(micro: int) -> tuple[Step, int]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(sizes))
            made = lambda: build_model(f"hf:{folder}", seq_len=rows.SEQ_LEN, overrides={"from_config": True})  # noqa: E731
            model = rows.filled(made)
        return whole_step(model, micro, int(str(sizes["vocab_size"])), **how), model.num_flops_per_token(rows.SEQ_LEN)

    for micro in (2,) if rows.TOY else micros:
        said = "".join(f", {key} {value}" for key, value in how.items())
        # an eighth of llmq's step of 524,288 tokens, so the update weighs eight times as much
        case, num_micro = f"{name}, {micro} rows{said}", 2 if rows.TOY else 64 // micro
        _measured(budget, say, case, lambda micro=micro: build(micro), micro * rows.SEQ_LEN, num_micro)


def qwen_0_5b(budget: rows.Budget, say: rows.Say) -> None:
    """With llmq's 32 rows, and with the 16 of earlier runs."""
    _qwen("qwen2.5-0.5b", budget, say, (32, 16))


def qwen_1_5b(budget: rows.Budget, say: rows.Say) -> None:
    """The same of the larger one."""
    _qwen("qwen2.5-1.5b", budget, say, (32, 16))


def bf16_states(budget: rows.Budget, say: rows.Say) -> None:
    """With both moments in bf16, as llmq has them; master weights stay in fp32."""
    _qwen("qwen2.5-0.5b", budget, say, (32,), state_format="bf16")


def our_kernels(budget: rows.Budget, say: rows.Say) -> None:
    """All operations by inductor, all by our kernels, and the loss alone by ours."""
    micro = 2 if rows.TOY else 16

    def build(choice: Choice, loss: bool) -> tuple[Step, int]:
        model = rows.gpt2(kernels=choice)
        for module in model.modules():
            if loss and isinstance(module, kernels.LayerNorm):
                module.kernels = "reference"
        return whole_step(model, micro, rows.VOCAB), model.num_flops_per_token(rows.SEQ_LEN)

    cases: dict[str, tuple[Choice, bool]] = {
        "none ours": ("reference", False), "the loss": ("triton", True), "all ours": ("triton", False),
    }  # fmt: skip
    for case, how in cases.items():
        _measured(budget, say, case, lambda how=how: build(*how), micro * rows.SEQ_LEN, 2 if rows.TOY else 16)


def fp8(budget: rows.Budget, say: rows.Say) -> None:
    """Eight of a 7B's 32 blocks, as the state of all does not fit."""
    micro = 2 if rows.TOY else 8

    def build(in_8_bits: bool) -> tuple[Step, int]:
        sizes = {**rows.TINY, "n_kv_head": 2} if rows.TOY else {"n_layer": 8}
        model = rows.filled(
            lambda: build_model("llama-7b", vocab_size=rows.VOCAB, seq_len=rows.SEQ_LEN, overrides=sizes)
        )
        if in_8_bits:
            multiply_in_8_bits(model, rows.DEVICE)
        return whole_step(model, micro, rows.VOCAB), model.num_flops_per_token(rows.SEQ_LEN)

    for case, in_8_bits in {"fp8": True, "bfloat16": False}.items():
        _measured(budget, say, case, lambda chosen=in_8_bits: build(chosen), micro * rows.SEQ_LEN, 2 if rows.TOY else 4)


def packed_rows(budget: rows.Budget, say: rows.Say) -> None:
    """One document, which has blocks too, eight by blocks, and eight by a mask of all pairs, whose loss must agree."""
    length = 2 * rows.SEQ_LEN if rows.TOY else 8192
    by_blocks = decoder.takes_blocks

    def build(document: int) -> tuple[Step, int]:
        sizes = {**rows.TINY, "n_kv_head": 2} if rows.TOY else {}
        model = rows.filled(lambda: build_model("llama-small", vocab_size=rows.VOCAB, seq_len=length, overrides=sizes))
        positions = (torch.arange(length, device=rows.DEVICE) % document).expand(2, -1)
        return whole_step(model, 2, rows.VOCAB, positions_BT=positions), model.num_flops_per_token(length)

    for case, document, masked in (("one document", length, False), ("by blocks", length // 8, False),
                                   ("by a mask", length // 8, True)):  # fmt: skip
        if masked:
            setattr(decoder, "takes_blocks", lambda *given: False)  # noqa: B010  a function of another type
        try:
            _measured(budget, say, case, lambda document=document: build(document), 2 * length, 2)
        finally:
            setattr(decoder, "takes_blocks", by_blocks)  # noqa: B010


def muon(budget: rows.Budget, say: rows.Say) -> None:
    """Seconds of an update alone, of gradients that stay the same."""
    for name in ("gpt2-124m",) if rows.TOY else ("gpt2-124m", "gpt2-1.5b"):
        for who in ("muon", "adamw"):
            case = f"{name}, {who}"
            if budget.spent():
                say(case=case, left_out="no time was left")
                continue
            with rows.losing_itself_alone(say, case):
                model = rows.gpt2(name)
                zero = Zero(model, 1, units=model.units, comm=LocalCommunicator(), precision=rows.BF16)
                if who == "muon":
                    names = [f"blocks.{index}" for index in range(len(model.blocks))]
                    groups = muon_groups(model.named_parameters(), 0.1, names)
                    optimizer: torch.optim.Optimizer = zero.optimizer(MuonAdamW, params=groups, lr=1e-3)
                else:
                    optimizer = zero.optimizer(torch.optim.AdamW, **rows.ADAMW, fused=True)
                tokens, targets = rows.batch(1)
                seconds = []
                for _ in range(2 if rows.TOY else 4):
                    model(tokens, targets).backward()
                    rows.synchronise()
                    began = time.perf_counter()
                    optimizer.step()
                    rows.synchronise()
                    seconds.append(time.perf_counter() - began)
                    optimizer.zero_grad()
                say(case=case, seconds=min(seconds[1:]), first_s=seconds[0])
                del model, zero, optimizer
            rows.cleared()
