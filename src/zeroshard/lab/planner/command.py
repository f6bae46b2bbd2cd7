"""`zeroshard plan`: turns settings into the printed answer and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from zeroshard.errors import ExitStatus, UserError
from zeroshard.lab.planner import next_command
from zeroshard.lab.planner.advice import describe, recommended
from zeroshard.lab.planner.compare_gpus import Comparison, Offer, Refusal
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.explain import explain
from zeroshard.lab.planner.inverse import Answer, fewest, largest_micro_batch, lowest_bandwidth
from zeroshard.lab.planner.longest import longest_sequence
from zeroshard.lab.planner.plan import check_node_copy, check_wire_nodes, micro_batches, plan
from zeroshard.lab.planner.plan_rows import Plan, Row
from zeroshard.lab.planner.planner import Planner, planner_for
from zeroshard.lab.planner.price import parse_prices
from zeroshard.lab.planner.remedy import remedies
from zeroshard.lab.planner.show import seconds, size, text
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.dry_run import Measured, dry_run
from zeroshard.lab.predict.hardware import find_device, this_machine
from zeroshard.lab.predict.memory import on_disk
from zeroshard.lab.predict.step import Step
from zeroshard.lab.predict.workload import DTYPES
from zeroshard.models import LanguageModel
from zeroshard.optim import AdamW8bit, FlashAdamW
from zeroshard.state_formats.formats import FORMATS
from zeroshard.train.setup.assemble import local_steps, lora_of, model_overrides, offload_of
from zeroshard.train.setup.auto import num_free_bytes
from zeroshard.zero import STAGES, Offload, Zero


class PlanAnswer(NamedTuple):
    """The exit status, and what is printed."""

    status: int
    text: str


def answer_plan(config: PlanConfig, width: int = 0) -> PlanAnswer:
    """The text to print, and the exit status, which is 3 if nothing fits; ``width``: the terminal's columns, 0: none.

    Raises:
        UserError: the settings cannot be planned.
    """
    try:
        return _answer(config, width)
    except RuntimeError as error:
        if "overflow" not in str(error):  # torch says so of a size that 64 bits do not hold
            raise
        what = f"one of its tensors has more bytes than 64 bits count ({' '.join(str(error).split())})"
        raise UserError("model", what, "choose smaller sizes, seq_len or micro_batch") from None


def _answer(config: PlanConfig, width: int) -> PlanAnswer:
    if len(config.gpu_names) > 1:
        return _compared_gpus(config)
    given = arguments(config)
    if config.ask != "none":
        planner = _asked_planner(config, given)
        answer = ask(config, planner)
        content: dict[str, Any] = {"question": config.ask, "value": answer.value, "unit": answer.unit}
        content |= {"rows": list(answer.rows)} if answer.rows else {}
        status = ExitStatus.CHECK_FAILED if answer.value is None else ExitStatus.OK
        return PlanAnswer(
            status, _printed(config, content, answer.sentence, _unused_network(config, [planner.cluster]))
        )
    found = _plan(config)
    if config.explain or config.dry_run:
        planner = planner_for(**given)
        row = chosen_row(config, found)
        unused = _unused_network(config, [found.cluster])
        said = [_printed(config, found.as_dict(), explain(planner, row), unused)] if config.explain else []
        if config.dry_run:
            compared = compare(config, planner, row)
            said.append(_printed(config, compared, _comparison_text(compared)))
            return PlanAnswer(ExitStatus.OK, "\n".join(said))
    else:
        said = [_with_cost(config, found, width)]
    return PlanAnswer(ExitStatus.OK if found.fits else ExitStatus.CHECK_FAILED, "\n".join(said))


def _asked_planner(config: PlanConfig, given: dict[str, Any]) -> Planner:
    planner = planner_for(**given)
    check_node_copy(planner, 3, config.shard_size or None)
    check_wire_nodes(planner)
    if config.ask == "lowest-bandwidth":
        micro_batches(planner, config.micro_batch or 1)  # raises if the global batch is no multiple of it
    return planner


def _plan(config: PlanConfig) -> Plan:
    return plan(
        **arguments(config),
        stage=None if config.stage == "all" else int(config.stage),
        shard_size=config.shard_size or None,
        micro_batch=config.micro_batch or None,
        local_steps=local_steps(
            config.local_steps, config.local_steps.fragments
        ),  # units of the model are not known here
    )


def _with_cost(config: PlanConfig, found: Plan, width: int) -> str:
    """The complete answer, with the cost of the recommended row if that was asked for."""
    asked = bool(config.price or config.tokens)
    cost = found.cost(config.tokens, parse_prices(config.price, 1)[0]) if asked else None
    content = found.as_dict() | ({"cost": None if cost is None else cost.as_dict()} if asked else {})
    content["command"] = next_command.next_command(config, found)
    lines = [
        text(found, width),
        *([cost.sentence()] if cost is not None else []),
        *next_command.suggestion(config, found),
    ]
    return _printed(config, content, "\n".join(lines), _unused_network(config, [found.cluster]))


def _compared_gpus(config: PlanConfig) -> PlanAnswer:
    """Plan each kind of GPU, in float16 if it has no bfloat16, and compare them.

    A kind that fails is listed with the reason; if all fail, raise.
    """
    answers: list[Offer | Refusal] = []
    errors = []
    for name, price in zip(config.gpu_names, parse_prices(config.price, len(config.gpu_names)), strict=True):
        try:
            served = find_device(name).device.matmul_flops_per_s
            narrow = config.dtype == "bfloat16" and config.dtype not in served and "float16" in served
            found = _plan(config.model_copy(update={"gpu": name, **({"dtype": "float16"} if narrow else {})}))
            answers.append(Offer(found, found.cost(config.tokens, price)))
        except UserError as error:
            errors.append(error)
            answers.append(Refusal(name, str(error)))
    if len(errors) == len(answers):
        raise errors[0]
    compared = Comparison(answers, config.dtype)
    status = ExitStatus.CHECK_FAILED if compared.best is None else ExitStatus.OK
    unused = _unused_network(config, [offer.plan.cluster for offer in compared.offers])
    return PlanAnswer(status, _printed(config, compared.as_dict(), compared.text(), unused))


def chosen_row(config: PlanConfig, found: Plan) -> Row:
    """The row to explain or to run: the recommended one of those requested, or if none fits, that with least memory.

    If a stage is given without a ``shard_size``, only rows that shard over all GPUs count as requested.
    """
    rows = list(found.rows)
    if config.stage != "all" and not config.shard_size:
        rows = [row for row in rows if row.shard_size == found.cluster.world_size]
    return recommended(rows) or min(rows, key=lambda row: row.needed_bytes)


_ALIKE = (
    "sequence_parallel",
    *(
        "network",
        "gpus_per_node",
        "dtype",
        "optimizer",
        "state_format",
        "prefetch",
        "reshard_after_forward",
        "kernels",
        "attention",
    ),
    *("document_mask", "headroom", "autocast"),
)
_OR_NONE = ("within_node", "node_copy", "reproducible", "global_batch", "seq_len")  # here 0 or empty means None


def arguments(config: PlanConfig) -> dict[str, Any]:
    """The arguments (`Given`) of `plan` and `planner_for`."""
    return {
        **{name: getattr(config, name) for name in _ALIKE},
        **{name: getattr(config, name) or None for name in _OR_NONE},
        "model": config.model.name,
        "overrides": model_overrides(config.model),
        "world_size": config.gpus,
        "gpu": find_device(config.gpu),
        "wire": config.wire.as_precision(DTYPES),
        "reduce_dtype": None if config.reduce_dtype == "master" else config.reduce_dtype,
        "accumulate": None if config.accumulate == "auto" else config.accumulate,
        "impl": "compile" if config.compile else None if config.impl == "auto" else config.impl,
        "lora": lora_of(config.lora),
        "offload": offload_of(config.offload, Path("OUT"), shards_weights=True, exact_sums=config.reproducible > 0),
    }


def ask(config: PlanConfig, planner: Planner) -> Answer:
    """The answer to ``config.ask`` at the given stage, or else at the highest one."""
    stages = tuple(STAGES) if config.stage == "all" else (int(config.stage),)
    stage = stages[-1]
    micro_batch = config.micro_batch or 1
    if config.ask == "largest-micro-batch":
        return largest_micro_batch(planner, stage)
    if config.ask == "fewest-gpus":
        return fewest(planner, stages, micro_batch)
    if config.ask == "longest-sequence":
        return longest_sequence(planner, stage, micro_batch)
    if config.ask == "lowest-bandwidth":
        return lowest_bandwidth(planner, stage, micro_batch)
    return remedies(planner, stages, config.micro_batch or None, config.shard_size or None)


def compare(config: PlanConfig, planner: Planner, row: Row) -> dict[str, Any]:
    """Run the row's step on this machine's device, and compare: predicted, measured, ratio.

    Memory and collectives are predicted for that device. Time is only measured, because the plan's is for another one.
    """
    runs: dict[str, Any] = {"AdamW": None, **{cls.__name__: _making(cls) for cls in (AdamW8bit, FlashAdamW)}}
    runs |= {f"AdamW in {form}": partial(_adamw_in, form) for form in FORMATS}
    if planner.workload.optimizer not in runs:
        what = f"it runs AdamW or AdamW8bit, and optimizer is {config.optimizer}"
        raise UserError("dry_run", what, "leave one of the two out")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    here: dict[str, Any] = {"gpu": this_machine(2**62, kind), "within_node": config.network}
    local = planner_for(**{**arguments(config), **here})
    shard_size = None if row.shard_size == planner.cluster.world_size else row.shard_size
    stage = row.stage if row.stage is not None else 3
    again = local.row(stage, row.micro_batch, shard_size)
    workload = local.workload
    assert isinstance(workload.model, LanguageModel)
    _require_memory(device, again.step.peak.total)
    with _scratch(local.offload_at(local.strategy(stage, row.shard_size)), config.offload.path) as offload:
        measured = dry_run(
            workload.model,
            workload.inputs,
            world_size=planner.cluster.world_size,
            strategy=local.strategy(stage, row.shard_size),
            micro_batch=row.micro_batch,
            units=workload.model.units,
            precision=workload.precision,
            num_micro=again.num_micro,
            accumulate=local.accumulate,
            prefetch=local.prefetch,
            shard_size=shard_size,
            reproducible=local.reproducible or None,
            offload=offload,
            sequence_parallel=workload.sequence_parallel,
            optimizer=runs[workload.optimizer],
            device=device,
            record=device.type != "cuda",
        )
    return {
        "row": describe(row, planner.cluster.world_size),
        "device": str(device),
        "compared": {
            name: {"predicted": ours, "measured": theirs, "ratio": ours / theirs if theirs else None}
            for name, (ours, theirs) in _predicted_and_measured(again.step, measured).items()
        },
        "step_s": min(measured.step_s),
    }


@contextmanager
def _scratch(offload: Offload | None, folder: str) -> Generator[Offload | None]:
    """``offload`` with a new folder for the file, in ``folder`` or, if that is empty, in the system's, then removed."""
    if offload is None or not on_disk(offload):
        yield offload
        return
    try:
        made = TemporaryDirectory(prefix="zeroshard-", dir=folder or None)
    except OSError as error:
        what = f"{folder or error.filename}: {error.strerror or error}"
        raise UserError("offload.path", what, "name a folder on a local disk that can be written") from None
    with made as path:
        yield replace(offload, path=path)


def _making(cls: type[torch.optim.Optimizer]) -> Callable[[Zero], list[torch.optim.Optimizer]]:
    return lambda zero: [zero.optimizer(cls, [p for p in zero.model.parameters() if p.requires_grad], lr=1e-4)]


def _adamw_in(form: str, zero: Zero) -> list[torch.optim.Optimizer]:
    return [zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True, state_format=form)]


def _predicted_and_measured(step: Step, measured: Measured) -> dict[str, tuple[int, int]]:
    """Pairs of a predicted and a measured value by name: bytes, and the number of collectives."""
    lines = {"peak": (step.peak.total, measured.peak_bytes)}
    for name in step.before_update:
        lines[name] = (step.before_update[name], measured.before_update.get(name, 0))
    for name, num_bytes in measured.peak_by_category.items():
        predicted = step.peak.by_category.get(name, 0)
        if predicted or num_bytes:
            lines[f"peak: {name}"] = (predicted, num_bytes)
    messages = step.messages()
    lines["messages"] = (len(messages), len(measured.messages))
    lines["message bytes"] = (
        sum(each.num_bytes for each in messages),
        sum(each.num_bytes for each in measured.messages),
    )
    return lines


def _require_memory(device: torch.device, num_bytes: int) -> None:
    free = num_free_bytes(device, 1)
    if num_bytes > free:
        what = f"this step takes {size(num_bytes)} and {size(free)} are free here"
        todo = "choose a smaller model or micro-batch, a higher stage, or more GPUs"
        raise UserError("dry_run", what, todo)


def _comparison_text(compared: dict[str, Any]) -> str:
    lines = [f"{compared['row']}, one rank on {compared['device']}, no peers", ""]
    lines.append(f"{'':<20} {'predicted':>12} {'measured':>12} {'ratio':>8}")
    for name, each in compared["compared"].items():
        shown = [str(each[k]) if name == "messages" else size(each[k]) for k in ("predicted", "measured")]
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.4f}"
        lines.append(f"{name:<20} {shown[0]:>12} {shown[1]:>12} {ratio:>8}")
    return "\n".join([*lines, "", f"A step takes {seconds(compared['step_s'])} here, with nothing sent."])


def _unused_network(config: PlanConfig, clusters: Iterable[Cluster]) -> str:
    """A sentence if ``network`` was given and no plan on ``clusters`` uses it; else empty.

    GPUs without links of their own use the network within a node too.
    """
    one_node = config.gpus <= config.gpus_per_node and config.ask != "fewest-gpus"
    default = PlanConfig.model_fields["network"].default
    used = not one_node or any(each.within is each.between for each in clusters if config.gpus > 1)
    if used or config.network == default:
        return ""
    if config.gpus == 1:
        return "--network is not used: one GPU sends nothing."
    return (
        f"--network is not used: all {config.gpus} GPUs are in one node, whose links are --within-node's; for GPUs in "
        "several nodes give --gpus-per-node."
    )


def _printed(config: PlanConfig, content: dict[str, Any], plain: str, unused_network: str = "") -> str:
    """The answer as JSON or as text; ``unused_network``: why ``network`` had no effect, or empty."""
    if config.json:
        return json.dumps(content | ({"unused": ["network"]} if unused_network else {}), indent=2, allow_nan=False)
    return "\n".join([plain, *([unused_network] if unused_network else [])])
