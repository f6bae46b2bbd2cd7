"""What each row means for a user, in a line that is computed of the results; where we lose, it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from page import Found

CONTESTANTS = {"eager": "PyTorch", "compile": "torch.compile", "triton": "ours", "liger": "Liger", "quack": "QuACK"}
KERNELS, WHOLE = "zero1 + kernels, eager", "plain, compile whole"
SPELLED = {
    "plain, eager": "GPT-2 124M, plain loop", "plain, compile": "GPT-2 124M, plain loop, compiled blocks",
    WHOLE: "GPT-2 124M, plain loop, compiled whole",
    "zero1, eager": "GPT-2 124M", "zero1, compile": "GPT-2 124M, compiled blocks", KERNELS: "GPT-2 124M, our kernels",
    "qwen2.5-0.5b": "Qwen2.5-0.5B", "qwen2.5-1.5b": "Qwen2.5-1.5B",
}  # fmt: skip
LONG_MODEL = "qwen3-8b"
# github.com/axolotl-ai-cloud/axolotl, pull request 3733: one GPU, bf16, all weights trained; at 32k without offloading
AXOLOTL = {
    16_384: "2,243 tokens/s and 58.9 GB with inputs of blocks on the host, all weights trained",
    32_768: "1,954 tokens/s and 73.1 GB, 64.3 GB with inputs of blocks on the host, all weights trained",
}
# github.com/NVIDIA-NeMo/RL, issue 3628: one H100
NEMO = "0.75 s, 15.24 GiB and 1.68 s, 10.53 GiB with it on the host"
# github.com/IST-DASLab/llmq, benchmarks/H100x1.md, bf16: tokens/s of 524,288 a step. Weights and both moments are bf16
# in all of its rows, 0.5B and 1.5B have 32 rows, and each block is a CUDA graph; none of these three is offloaded.
LLMQ = {"qwen2.5-0.5b": 149_000, "qwen2.5-1.5b": 59_000, "7b": 13_860}
LLMQ_HOW = "weights and moments in bf16, 32 rows, a CUDA graph for each block"
LLMQ_OFFLOADED = "llmq's offloaded run is a 14B: 6,320 tokens/s"


def fastest(row: str, found: Found) -> str:
    """In how many cases ours is the fastest, and where it is not by how much."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for record in found.of(row):
        if "contestant" in record:
            times.setdefault((record["case"], record["mode"]), {})[record["contestant"]] = record["seconds"]
    compared = {key: each for key, each in times.items() if "triton" in each and len(each) > 1}
    lost = []
    for (case, mode), each in compared.items():
        best = min(each, key=lambda who: each[who])
        if each[best] < 0.98 * each["triton"]:
            lost.append(f"{case}, {mode}: {CONTESTANTS[best]} takes {each[best] / each['triton']:.2f} of our time")
    won = f"Ours is the fastest, or within 2 % of it, in {len(compared) - len(lost)} of {len(compared)} cases."
    return won + (f" **We lose** at {'; '.join(lost)}." if lost else "") if compared else ""


def beside_plain(found: Found) -> str:
    """Stage 1 and FSDP2 beside a plain loop, and what our kernels do in eager mode."""
    steps = {case: found.median("gpt2-124m", "step_s", case=case) for case in SPELLED}
    ours, plain, eager, fused = (steps.get(c) for c in ("zero1, compile", "plain, compile", "zero1, eager", KERNELS))
    if not ours or not plain or not eager or not fused:
        return ""
    loop = f"Sharding costs you nothing on one GPU: a step takes {ours / plain:.2f} of a plain loop's time."
    if ours > plain:
        loop = f"**We lose** {ours / plain - 1:.1%} to a plain loop on one GPU."
    whole = found.median("gpt2-124m", "step_s", case=WHOLE)
    if whole and whole < ours:
        loop += f" A plain loop that compiles the whole model takes {whole / ours:.2f} of that: **we lose** there."
    then = f"Compile the blocks: that takes {ours / eager:.2f} of the eager time."
    if fused > eager:
        then += (
            f" **We lose** with our kernels in eager mode, {fused / eager - 1:.1%}: the host cannot issue them as fast."
        )
    return f"{loop} {then}"


def beside_llmq(found: Found) -> str:
    """How far a trainer in C++ is ahead."""
    parts = []
    for case in ("qwen2.5-0.5b", "qwen2.5-1.5b"):
        step_s, theirs = found.median("qwen", "step_s", case=case), LLMQ[case]
        if step_s:
            ours = found.of("qwen", case=case, round=0)[0]["tokens"] / step_s
            parts.append(f"by {theirs / ours - 1:.0%} with {case}" if ours < theirs else f"not with {case}")
    text = "A model of transformers trains without a change to its code. llmq, a trainer in C++ and CUDA, is ahead"
    how = f"Its runs have {LLMQ_HOW}; ours have fp32 master weights and moments."
    return f"{text}: {', '.join(parts)}. **We lose** there. {how}" if any(p[0] == "b" for p in parts) else ""


def beside_fp32_states(found: Found) -> str:
    """How long an update with 8-bit states takes beside one with states in fp32."""
    ours, theirs = (
        found.median("adamw8bit", "seconds", case=c, numel=774_000_000) for c in ("adamw8bit", "torch fused")
    )
    if not ours or not theirs:
        return ""
    return (
        f"States in 8 bits move 16 of 28 bytes of an element, and their update takes {ours / theirs:.2f} of the time."
    )


def beside_bitsandbytes(found: Found) -> str:
    """How long an update with 8-bit states takes beside that of bitsandbytes."""
    ours, theirs = (
        found.median("bitsandbytes", "seconds", case=case, numel=124_000_000) for case in ("adamw8bit", "bitsandbytes")
    )
    if not ours or not theirs:
        return ""
    return f"Ours takes {ours / theirs:.2f} of its time, and its blocks belong to the parameter."


def of_host(found: Found) -> str:
    """How long a step waits for the host's update."""
    steps = {
        (where, count): record["step_s"]
        for where in ("device", "host")
        for count in (1, 8)
        for record in found.of("offload", case=f"qwen3-0.6b, optimizer on the {where}", num_micro=count)
    }
    if len(steps) < 4:
        return ""
    waits = [steps["host", count] - steps["device", count] for count in (1, 8)]
    return (
        f"A step waits {min(waits):.2f} to {max(waits):.2f} s for the host's update, with few tokens as with many. So "
        "offload where a step has many tokens, or where nothing else fits."
    )


def of_seven_billion(found: Found) -> str:
    """What a step of a 7B is long for."""
    steps = [record for record in found.of("offload 7b") if "tokens_per_s" in record]
    if len(steps) < 2:
        return ""
    few, many = steps[0], steps[-1]
    micro_s = (many["step_s"] - few["step_s"]) / (many["num_micro"] - few["num_micro"])
    rest_s = few["step_s"] - few["num_micro"] * micro_s
    text = (
        f"A micro-batch of {few['tokens'] // few['num_micro']:,} tokens takes {micro_s:.2f} s, and the step waits "
        f"{rest_s:.1f} s for the host's update once."
    )
    ours, theirs = many["tokens_per_s"], LLMQ["7b"]
    behind = f" **We lose** to llmq, {ours / theirs:.2f} of its tokens/s" if ours < theirs else " llmq is behind"
    return f"{text}{behind}; it has a 7B's weights and moments in bf16 and nothing on the host. {LLMQ_OFFLOADED}."


def host_bound(found: Found) -> str:
    """Whether the host or the GPU takes the step's time."""
    shares = [record["idle_share"] for record in found.of("overlap") if record.get("idle_share") is not None]
    if not shares:
        return ""
    return (
        f"The GPU is idle for at least {min(shares):.0%} of this step of 16 rows: the host cannot issue the operations "
        "of a small model as fast as the GPU computes them. Give it more rows, or compile the blocks."
    )


def in_blocks(found: Found) -> str:
    """How far the bytes that tensors ask for are from the plan."""
    keys = ("model", "checkpointing", "stage", "world", "rows")
    apart = []
    for record in (r for r in found.of("memory") if "requested_bytes" in r and r["world"] > 1):
        planned = found.median("memory", "planned_bytes", **{key: record[key] for key in keys})
        if planned:
            apart.append(abs(record["requested_bytes"] - planned))
    if not apart:
        return "the rest is the allocator's."
    most = max(apart) / 2**10
    return f"what tensors ask for is within {most:.1f} KiB of the plan, and the rest is the allocator's blocks."


MEANS: dict[str, Callable[[Found], str]] = {
    "right": lambda found: "Choose a stage by memory and speed alone: the weights are the same, bit by bit.",
    "kernels right": lambda found: "Our kernels compute what PyTorch's operations do, in quantised formats to the bit.",
    "gpt2-124m": beside_plain,
    "norms": lambda found: fastest("norms", found),
    "adamw8bit": beside_fp32_states,
    "bitsandbytes": beside_bitsandbytes,
    "loss": lambda found: "A large vocabulary needs a fraction of the memory. " + fastest("loss", found),
    "memory": lambda found: "`zeroshard plan` says before you rent a GPU whether a model fits it; " + in_blocks(found),
    "overlap": host_bound,
    "qwen": beside_llmq,
    "device": lambda found: "`zeroshard bench device` measures these rates on your GPU; plans of times are this near.",
    "offload": of_host,
    "offload 7b": of_seven_billion,
    "long sequences": lambda found: (
        "Adapters of an 8B train on long sequences on one GPU. The published figures train all weights: beside "
        "attention, a step of adapters has three quarters of the FLOPs of theirs."
    ),
    "breakdown": lambda found: "A step takes what is longer: the GPU's kernels, or the host that issues them.",
}  # fmt: skip
