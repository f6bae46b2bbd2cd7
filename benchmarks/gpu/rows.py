"""The rows of quarter.py: each is a function ``(budget, say)`` that measures, and says a record for each result.

Without a GPU, or in a rehearsal, models and shapes are toys; the figures then claim nothing.
"""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

REHEARSES = "QUARTER_REHEARSES" in os.environ
ON_GPU = torch.cuda.is_available()
MAY_RUN = ON_GPU or REHEARSES
PLANS = "QUARTER_PLANS" in os.environ  # plans are made on a CPU for what a GPU measured
TOY = REHEARSES or not (ON_GPU or PLANS)
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when kernels are imported

import kernel_cases  # noqa: E402
import torch._functorch.config  # noqa: E402
from kernel_times import STREAM, copy_bytes_per_s, measure_case, timer  # noqa: E402
from planted import (  # noqa: E402, F401 -- rows too
    planted_failure,
    planted_hang,
    planted_kill,
    planted_out_of_memory,
)
from qwen_shapes import QWEN, QWEN_ALIKE, QWEN_TOY  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from zeroshard import kernels  # noqa: E402
from zeroshard.comm import LocalCommunicator, NullCommunicator  # noqa: E402
from zeroshard.host.process import num_cpus  # noqa: E402
from zeroshard.kernels import Choice  # noqa: E402
from zeroshard.kernels.linear_cross_entropy import _product  # noqa: E402
from zeroshard.lab.bench.report import environment  # noqa: E402
from zeroshard.models import LanguageModel, build_model  # noqa: E402
from zeroshard.models.base import materialize  # noqa: E402
from zeroshard.zero import MixedPrecision, Zero  # noqa: E402

DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
SEQ_LEN, TOKENS_A_STEP = (8, 64) if TOY else (1024, 524_288)
VOCAB = 97 if TOY else 50304
TINY = {"n_layer": 2, "n_embd": 16, "n_head": 2}
COMPILER = "aot_eager" if TOY else "inductor"  # a rehearsal traces as inductor would, and generates no code
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Say(Protocol):
    """Appends a record to the results file, which is ``out``."""

    out: Path

    def __call__(self, **record: Any) -> None:
        """Append it."""


class Budget:
    """The seconds of a row, from its beginning on."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def rounds(self, at_least: int, at_most: int) -> Iterator[int]:
        """Numbers of rounds, for as long as one more of the mean length fits, within bounds."""
        began = time.monotonic()
        for index in range(2 if TOY else at_most):
            mean_s = (time.monotonic() - began) / max(index, 1)
            if index >= at_least and time.monotonic() + mean_s > self._until:
                return
            yield index

    def spent(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() > self._until


@contextmanager
def losing_itself_alone(say: Say, case: str) -> Generator[None]:
    """A case that fails is recorded, and the row goes on; a device that no longer answers fails the next one too."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- whatever a library raises on first contact
        traceback.print_exc()
        say(case=case, failed=f"{type(error).__name__}: {error}"[:300])
        cleared()


def synchronise() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


def cleared() -> None:
    """Give memory back that nothing refers to."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def built(name: str, kernels: Choice = "auto", **changes: Any) -> LanguageModel:
    """A GPT-2 on the default device; a toy where all is."""
    if TOY:
        name, changes = "gpt2-demo", {**TINY, **changes}
    return build_model(name, vocab_size=VOCAB, seq_len=SEQ_LEN, overrides=changes, kernels=kernels)


def gpt2(name: str = "gpt2-124m", kernels: Choice = "auto", **changes: Any) -> LanguageModel:
    """The same on the device, with the same weights each time."""
    return filled(lambda: built(name, kernels, **changes))


def filled(build: Callable[[], LanguageModel]) -> LanguageModel:
    """The model with values drawn on the device: our own initial values are drawn on a CPU, a second for 100 M."""
    with torch.device("meta"):
        model = build()
    materialize(model, DEVICE, draw=False)
    generator = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim > 1:
                param.normal_(std=0.02, generator=generator)
            else:
                param.fill_(float(name.endswith("weight")))
    return model


def batch(rows: int, vocab: int = VOCAB, seed: int = 0, seq_len: int = SEQ_LEN) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[rows, seq_len]``."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, vocab, (rows, seq_len), generator=generator).to(DEVICE) for _ in range(2))
    return tokens, targets


# ------------------------------------------------------------------------------------------------------------ right


def right(budget: Budget, say: Say) -> None:
    """Weights after a few steps, to the bit: a world of one, null ranks, two ranks on this device."""
    from two_ranks import digests_of_two_ranks

    torch.use_deterministic_algorithms(True)
    for precision in (None, BF16):
        name = "fp32, 2 micro-batches" if precision is None else "bf16"
        wanted = _plain_weights(precision)
        for stage in range(4):
            zero = _stepped(stage, LocalCommunicator(), precision)
            found = zero.state_dict()
            say(
                case=f"world of one, {name}", stage=stage, same=all(torch.equal(found[n], w) for n, w in wanted.items())
            )
    wanted = _plain_weights(None, num_steps=1)
    for stage in range(3):  # at stage 3 the first forward already reads the shards of the ranks that are not there
        same = True
        for rank in (0, 7) if TOY else range(8):
            zero = _stepped(stage, NullCommunicator(8, rank), None, num_steps=1)
            for shard in zero.named_shards():
                if shard.kind == "param":
                    same &= torch.equal(shard.tensor.cpu(), wanted[shard.name].view(-1)[slice(*shard.interval)])
        say(case="a rank of 8 without peers, slice by slice", stage=stage, same=same)
    for case, by_stage in digests_of_two_ranks().items():
        say(case=f"two ranks, {case}", same=len(set(by_stage.values())) == 1, digests=by_stage)


def _micro_batches(precision: MixedPrecision | None, step: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(2, seed=10 * step + micro) for micro in range(2 if precision is None else 1)]


def _small() -> LanguageModel:
    return gpt2("gpt2-demo", kernels="reference")


def _stepped(stage: int, comm: Any, precision: MixedPrecision | None, num_steps: int = 3) -> Zero:
    model = _small()
    zero = Zero(model, stage, units=model.units, comm=comm, precision=precision)
    optimizer = zero.optimizer(torch.optim.AdamW, **ADAMW)
    for step in range(num_steps):
        micro_batches = _micro_batches(precision, step)
        for tokens, targets in micro_batches:
            (model(tokens, targets) / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero


def _plain_weights(precision: MixedPrecision | None, num_steps: int = 3) -> dict[str, Tensor]:
    """What the loop gives that uses nothing of ours; in bf16 with fp32 weights that the optimizer updates."""
    model = _small()
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    if precision is not None:
        model.bfloat16()
    optimizer = torch.optim.AdamW(masters.values(), **ADAMW)
    for step in range(num_steps):
        micro_batches = _micro_batches(precision, step)
        for tokens, targets in micro_batches:
            (model(tokens, targets) / len(micro_batches)).backward()
        for name, param in model.named_parameters():
            masters[name].grad = None if param.grad is None else param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
                param.grad = None
    return {name: master.detach().cpu() for name, master in masters.items()}


def environment_of(say: Say) -> None:
    """Say on what is measured."""
    found = environment()
    if ON_GPU:
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(DEVICE).total_memory
    say(environment=found, toy=TOY)


# ---------------------------------------------------------------------------------------------------- kernels right


def kernels_right(budget: Budget, say: Say) -> None:
    """The largest relative error of outputs and gradients, against the reference in fp32 on the same numbers."""
    from kernel_errors import errors

    torch.use_deterministic_algorithms(False)  # the references have operations without such an algorithm
    for record in errors(TOY):
        say(**record)


# --------------------------------------------------------------------------------------------------------- training


def gpt2_124m(budget: Budget, say: Say) -> None:
    """Seconds of a step, round by round, for each contestant; in rounds of shuffled order."""
    flops = gpt2().num_flops_per_token(SEQ_LEN)
    micro = 2 if TOY else 16
    cases = [(who, how) for how in ("eager", "compile") for who in ("plain", "zero1", "fsdp2", "zero1 + kernels")]
    cases += [("zero1 + loss kernel", "compile"), ("plain", "compile whole")]
    with ExitStack() as stack:
        with losing_itself_alone(say, "process group"):
            stack.enter_context(_world_of_one())
        steps = {}
        for who, how in cases:
            name = f"{who}, {how}"
            with losing_itself_alone(say, name):
                step = _contestant(who, how, micro)
                synchronise()
                began = time.perf_counter()
                loss = float(step(1))  # one micro-batch: compiles, and makes states and buffers
                say(case=name, first_loss=loss, warm_up_s=time.perf_counter() - began)
                steps[name] = step
        order = random.Random(0)
        for index in budget.rounds(2, 9):
            for name in order.sample(list(steps), len(steps)):
                _timed_step(say, steps[name], name, index, flops, micro)


def _timed_step(say: Say, step: Callable[[int], Tensor], case: str, index: int, flops_a_token: int, micro: int) -> None:
    synchronise()
    began = time.perf_counter()
    step(TOKENS_A_STEP // (micro * SEQ_LEN))
    synchronise()
    say(case=case, round=index, step_s=time.perf_counter() - began, tokens=TOKENS_A_STEP,
        flops_per_token=flops_a_token, micro_batch=micro)  # fmt: skip


@contextmanager
def _world_of_one() -> Generator[None]:
    """A process group of this process alone, as FSDP2 asks for one."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def _compiled_blocks(blocks: Iterable[nn.Module]) -> None:
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=COMPILER)


def _contestant(who: str, how: str, micro: int) -> Callable[[int], Tensor]:
    """A function that takes a step of so many micro-batches in bf16, clipped at 1.0, and returns the last loss."""
    model = gpt2(kernels="triton" if "kernel" in who else "reference")
    tokens, targets = batch(micro)
    if "loss" in who:  # the compiler makes norms of its own, into which it draws what is around them
        for module in model.modules():
            if isinstance(module, kernels.LayerNorm):
                module.kernels = "reference"
    if how == "compile":
        _compiled_blocks(model.blocks)
    elif how == "compile whole":
        model.compile(backend=COMPILER)
    precision: Any = nullcontext
    micro_batch: Callable[[bool], Any] = lambda last: nullcontext()  # noqa: E731
    if who == "plain":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
        precision = lambda: torch.autocast(DEVICE.type, torch.bfloat16)  # noqa: E731
        clip: Callable[[], object] = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    elif who == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(DEVICE.type, (1,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
        sharded: Any = model
        micro_batch = lambda last: nullcontext(sharded.set_requires_gradient_sync(last))  # noqa: E731
        clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    else:
        zero = Zero(model, 1, units=model.units, comm=LocalCommunicator(), precision=BF16)
        optimizer = zero.optimizer(torch.optim.AdamW, **ADAMW, fused=True)
        micro_batch, clip = zero.micro_batch, lambda: zero.clip_grad_norm_(1.0)

    def step(num_micro: int) -> Tensor:
        for index in range(num_micro):
            with micro_batch(index == num_micro - 1):
                with precision():
                    loss = model(tokens, targets)
                (loss / num_micro).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def qwen(budget: Budget, say: Say) -> None:
    """Seconds of a step of Qwen2.5 by transformers' code, blocks compiled, under our stage 1 in a world of one."""
    for name, sizes in QWEN.items():
        for micro in (2,) if TOY else (16, 8, 4):
            try:
                step, flops = _qwen_step({**QWEN_ALIKE, **(QWEN_TOY if TOY else sizes)}, micro)
                step(1)
            except torch.OutOfMemoryError:
                step = None
                say(case=name, micro_batch=micro, out_of_memory=True)
                cleared()
                continue
            for index in range(1 if TOY else 3):
                _timed_step(say, step, name, index, flops, micro)
            del step
            cleared()
            break


def _qwen_step(config: Mapping[str, object], micro: int) -> tuple[Callable[[int], Tensor], int]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = filled(lambda: build_model(f"hf:{folder}", seq_len=SEQ_LEN, overrides={"from_config": True}))
    flops = model.num_flops_per_token(SEQ_LEN)
    _compiled_blocks(model.blocks)
    zero = Zero(model, 1, units=model.units, comm=LocalCommunicator(), precision=BF16)
    optimizer = zero.optimizer(torch.optim.AdamW, **ADAMW, fused=True)
    tokens, targets = batch(micro, int(str(config["vocab_size"])))

    def step(num_micro: int) -> Tensor:
        for index in range(num_micro):
            with zero.micro_batch(index == num_micro - 1):
                loss = model(tokens, targets)
                (loss / num_micro).backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, flops


# ---------------------------------------------------------------------------------------------------------- kernels


def norms(budget: Budget, say: Say) -> None:
    """RMSNorm, then LayerNorm: 4096 rows of three widths, forward and backward."""
    dtypes = ("bfloat16", "float32")
    _cases(
        budget,
        say,
        [
            case
            for name in ("rms_norm", "layer_norm")
            for width in ((64,) if TOY else (16384, 8192, 4096))
            for dtype in dtypes
            for case in kernel_cases.norm_cases(name, dtype, ((24 if TOY else 4096, width),), residuals=(False,))
        ],
        ("forward", "backward"),
    )


def loss(budget: Budget, say: Say) -> None:
    """The loss alone at 131,072 words, and with the layer before it at two vocabularies."""
    alone = (8, 97) if TOY else (8192, 131_072)
    odd, even = (97, 128) if TOY else (50_257, 50_304)
    shapes = ((8, 16, odd), (8, 16, even)) if TOY else ((8192, 768, odd), (8192, 768, even), (8192, 4096, 131_072))
    cases = [*kernel_cases.cross_entropy_cases("bfloat16", (alone,))]
    cases += kernel_cases.linear_cross_entropy_cases("bfloat16", shapes)
    _cases(budget, say, cases, ("both",), without=("compile",))
    _products(say, *((8, 16, odd) if TOY else (4096, 768, odd)))


def _products(say: Say, rows: int, width: int, vocab: int) -> None:
    """The products of a chunk of logits whose rows are padded to 64: over all words, over most, over those left."""
    dtype, whole = torch.bfloat16, vocab // 64 * 64
    buffer = torch.randn(rows, -(-vocab // 64) * 64, device=DEVICE).to(dtype)
    hidden, weight = (torch.randn(n, width, device=DEVICE).to(dtype) for n in (rows, vocab))
    d_hidden, d_weight = (torch.zeros(n, width, device=DEVICE) for n in (rows, vocab))
    with torch.no_grad(), torch.cuda.stream(STREAM) if STREAM else nullcontext():
        for words in (slice(0, vocab), slice(0, whole), slice(whole, vocab)):
            x = buffer[:, words]
            products: dict[str, Callable[[], object]] = {
                "logits": partial(torch.mm, hidden, weight[words].t(), out=x),
                "d_hidden": partial(_product, x, weight[words], d_hidden, add=False),
                "d_weight": partial(_product, x.t(), hidden, d_weight[words], add=True),
            }
            for name, product in products.items():
                measure, _ = timer([product], 0.005)
                seconds = min(measure() for _ in range(3))
                flops = 2 * rows * width * x.shape[1]
                say(case=f"product {name}, words {words.start} to {words.stop}", seconds=seconds, flops=flops / seconds)


def _cases(
    budget: Budget, say: Say, cases: list[kernel_cases.Case], modes: tuple[str, ...], without: tuple[str, ...] = ()
) -> None:
    """Measure the cases for as long as the budget lasts; what is left is not measured, and the page says so."""
    compiling: Any = torch._functorch.config
    copy_rate = copy_bytes_per_s()
    say(case="copy", bytes_per_s=copy_rate)
    order = random.Random(0)
    # The compiled backward runs many times, so it may not donate its saved buffers.
    with compiling.patch(donated_buffer=False), torch.cuda.stream(STREAM) if STREAM else nullcontext():
        for case in cases:
            if budget.spent():
                say(case=f"{case.operation} {case.shape} {case.dtype}", left_out="no time was left")
                continue
            case.bytes = {mode: case.bytes[mode] for mode in modes}
            case.contestants = tuple(name for name in case.contestants if name not in without)
            for row in _measured(case, say, copy_rate, order):
                say(case=f"{row.operation} {row.shape} {row.dtype}", mode=row.mode, contestant=row.contestant,
                    seconds=row.seconds, bytes_per_s=row.bytes_per_s, peak_bytes=row.peak_bytes)  # fmt: skip


def _measured(case: kernel_cases.Case, say: Say, copy_rate: float, order: random.Random) -> list[Any]:
    """The rows of a case; if it fails, those of PyTorch and ourselves alone."""
    found: list[Any] = []
    contestants, ours = case.contestants, tuple(name for name in case.contestants if name in ("eager", "triton"))
    for names in dict.fromkeys((contestants, ours)):
        case.contestants = names
        with losing_itself_alone(say, f"{case.operation} {case.shape} {case.dtype}, {' '.join(names)}"):
            found = measure_case(case, 3 if ON_GPU else 1, copy_rate, order)
            break
    return found


def host(budget: Budget, say: Say) -> None:
    """Microseconds of the host for an operation on small tensors, forward and backward, and in which functions."""
    from host_times import microseconds_of_the_host

    microseconds_of_the_host(budget, say)


def adamw(budget: Budget, say: Say) -> None:
    """torch's fused AdamW with a clipping factor, and the search for writes before it: by our kernel, by PyTorch."""
    from update_times import updates

    updates(budget, say)


def adamw8bit(budget: Budget, say: Say) -> None:
    """An update with 8-bit states beside torch's fused AdamW."""
    from low_bit_times import updates

    updates(budget, say)


def bitsandbytes(budget: Budget, say: Say) -> None:
    """The same beside bitsandbytes' AdamW8bit, if it is installed."""
    from low_bit_times import beside_bitsandbytes

    beside_bitsandbytes(budget, say)


# ----------------------------------------------------------------------------------------------------------- memory


def memory(budget: Budget, say: Say) -> None:
    """Peak bytes of the allocator in the third step of a rank, its peers being absent."""
    cases = [
        (name, checkpointing, stage, world)
        for world in ((1, 8) if TOY else (1, 8, 64))
        for name in (("gpt2-124m",) if TOY else ("gpt2-124m", "gpt2-1.5b"))  # toys are all alike
        for stage in (1, 3)
        for checkpointing in ("none", "full")
    ]
    for name, checkpointing, stage, world in cases:
        rows = (1 if TOY else 8) if name == "gpt2-124m" else (1 if TOY else 4)
        case = {"model": name, "checkpointing": checkpointing, "stage": stage, "world": world, "rows": rows}
        if budget.spent():
            say(**case, left_out="no time was left")
            continue
        with losing_itself_alone(say, f"{name} {checkpointing} {stage} {world}"):
            say(**case, **_peak_of_a_step(name, checkpointing, stage, world, rows))
        cleared()


def _peak_of_a_step(name: str, checkpointing: str, stage: int, world: int, rows: int) -> dict[str, int]:
    """Bytes beyond what the process held before, a row that ran earlier may have left something."""
    from peaks import step_of_a_rank

    before = torch.cuda.memory_allocated() if ON_GPU else 0
    step, zero, model, optimizer = step_of_a_rank(name, checkpointing, stage, world, rows)
    for _ in range(2):
        step()
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return {"peak_bytes": torch.cuda.max_memory_allocated() - before, "before_bytes": before,
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "requested_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"] - before}  # fmt: skip
    from zeroshard.train.profiling.memory import AllocationRecorder

    recorder = AllocationRecorder(zero.holdings).follow(model, optimizer)
    with recorder:
        step()
    recorder.remove()
    return {"peak_bytes": recorder.peak.num_bytes}


def overlap(budget: Budget, say: Say) -> None:
    """A step of a rank of 8 with copies for collectives and without any; and what a trace of the former shows."""
    from overlap import measured

    for stage in (1, 3, 2):
        if budget.spent():
            say(case=f"zero{stage}", left_out="no time was left")
        else:
            say(
                case=f"zero{stage}", **measured(stage, say.out.with_name(f"{say.out.stem}-overlap-zero{stage}.json.gz"))
            )
            cleared()


def breakdown(budget: Budget, say: Say) -> None:
    """Kernels of a step by kind, and how long the host takes to queue it."""
    from breakdown import steps_broken_down

    steps_broken_down(budget, say)


def offload(budget: Budget, say: Say) -> None:
    """Steps with the optimizer's state on the host."""
    from offloading import offloaded

    offloaded(budget, say)


def offload_7b(budget: Budget, say: Say) -> None:
    """A model of 7 billion parameters on one GPU: tokens/s with all of the optimizer on the host."""
    from offloading import seven_billion

    seven_billion(budget, say)


def long_sequences(budget: Budget, say: Say) -> None:
    """Adapters of Qwen3-8B's shape, by the length of a sequence, up to the longest that fits."""
    from long_sequences import steps

    steps(budget, say)


def peak_blocks(budget: Budget, say: Say) -> None:
    """What tensors ask for at the peak of a step, what the allocator gives, and the largest blocks then."""
    from peaks import blocks_of_cases

    blocks_of_cases(budget, say)


def device(budget: Budget, say: Say) -> None:
    """What the device reaches, as the file that ``zeroshard plan --gpu FILE`` reads."""
    from zeroshard.lab.bench import device as bench

    report, calibration = bench.measured(1, [], 3 if ON_GPU else 1, DEVICE.type, num_cpus() if ON_GPU else 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "device.json")
        bench.write(report, calibration, path)
        say(calibration=json.loads(path.read_text()))
