"""`zeroshard plan`: turns settings into the printed answer and the exit status."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.lab.planner import next_command
from zeroshard.lab.planner.advice import recommended
from zeroshard.lab.planner.compare_gpus import Comparison, Offer, Refusal
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.explain import explain
from zeroshard.lab.planner.fit import Tried, chosen, fitted, levers_in_words
from zeroshard.lab.planner.inverse import Answer, fewest
from zeroshard.lab.planner.longest import longest_sequence
from zeroshard.lab.planner.plan import asked, check_node_copy, check_wire_nodes, plan
from zeroshard.lab.planner.plan_rows import Plan, Row
from zeroshard.lab.planner.planner import Planner, planner_for
from zeroshard.lab.planner.price import parse_prices
from zeroshard.lab.planner.request import Request
from zeroshard.lab.planner.show import text
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.hardware import find_device
from zeroshard.lab.predict.workload import DTYPES
from zeroshard.settings.flags_given import with_flags
from zeroshard.train.setup.assemble import local_steps, lora_of, model_overrides, offload_of
from zeroshard.zero import STAGES


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
    if config.fit:
        tried = fitted(*asked(**given, **ways_of(config)))
        config = with_flags(config, chosen(tried).flags)
        return _with_cost(config, _plan(config), width, tried)
    found = _plan(config)
    if config.explain:
        explained = explain(planner_for(**given), chosen_row(config, found))
        said = _printed(config, found.as_dict(), explained, _unused_network(config, [found.cluster]))
        return PlanAnswer(ExitStatus.OK if found.fits else ExitStatus.CHECK_FAILED, said)
    return _with_cost(config, found, width)


def _asked_planner(config: PlanConfig, given: dict[str, Any]) -> Planner:
    planner = planner_for(**given)
    check_node_copy(planner, 3, config.shard_size or None)
    check_wire_nodes(planner)
    return planner


def ways_of(config: PlanConfig) -> dict[str, Any]:
    """The ways to run that the settings ask for, as arguments of `plan`."""
    return {
        "stage": None if config.stage == "all" else int(config.stage),
        "shard_size": config.shard_size or None,
        "micro_batch": config.micro_batch or None,
        "local_steps": local_steps(config.local_steps, config.local_steps.fragments),  # units are not known here
    }


def _plan(config: PlanConfig) -> Plan:
    return plan(**arguments(config), **ways_of(config))


def _with_cost(config: PlanConfig, found: Plan, width: int, tried: Sequence[Tried] = ()) -> PlanAnswer:
    """The complete answer: with the levers that ``--fit`` tried, and with the cost of the recommended row if asked."""
    asked = bool(config.price or config.tokens)
    cost = found.cost(config.tokens, parse_prices(config.price, 1)[0]) if asked else None
    content = found.as_dict() | ({"cost": None if cost is None else cost.as_dict()} if asked else {})
    content["command"] = next_command.next_command(config, found)
    content |= {"fit": [each.as_dict() for each in tried]} if tried else {}
    lines = [
        *([levers_in_words(tried), ""] if tried else []),
        text(found, width),
        *([cost.sentence()] if cost is not None else []),
        *next_command.suggestion(config, found),
    ]
    printed = _printed(config, content, "\n".join(lines), _unused_network(config, [found.cluster]))
    return PlanAnswer(ExitStatus.OK if found.fits else ExitStatus.CHECK_FAILED, printed)


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
    """The row to explain: the recommended one of those requested, or if none fits, that with least memory.

    If a stage is given without a ``shard_size``, only rows that shard over all GPUs count as requested.
    """
    rows = list(found.rows)
    if config.stage != "all" and not config.shard_size:
        rows = [row for row in rows if row.shard_size == found.cluster.world_size]
    return recommended(rows) or min(rows, key=lambda row: row.needed_bytes)


def arguments(config: PlanConfig) -> dict[str, Any]:
    """The arguments of `plan` and `planner_for`: fields of `Request`, which have the same names.

    Where such a field may be None, the command line has 0, an empty text or the name of what is then chosen.
    """
    nothing = 0, "", "auto", "master"
    alike = [(each.name, each.default) for each in fields(Request) if hasattr(config, each.name)]
    given = [(name, getattr(config, name), default) for name, default in alike]
    return {
        **{name: None if default is None and value in nothing else value for name, value, default in given},
        "model": config.model.name,
        "overrides": model_overrides(config.model, config.tiles),
        "world_size": config.gpus,
        "gpu": find_device(config.gpu),
        "wire": config.wire.as_precision(DTYPES),
        "lora": lora_of(config.lora),
        "offload": offload_of(config.offload, Path("OUT"), shards_weights=True, exact_sums=config.reproducible > 0),
    }


def ask(config: PlanConfig, planner: Planner) -> Answer:
    """The answer to ``config.ask`` at the given stage, or else at the highest one."""
    stages = tuple(STAGES) if config.stage == "all" else (int(config.stage),)
    micro_batch = config.micro_batch or 1
    if config.ask == "fewest-gpus":
        return fewest(planner, stages, micro_batch)
    return longest_sequence(planner, stages[-1], micro_batch)


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
