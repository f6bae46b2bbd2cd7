"""Plans `zeroshard train --fit`: the levers of `plan --fit` for the run of these settings, on what is free here.

The run is planned as `zeroshard plan` plans it, at its own micro-batch and at each stage that is open (`fit`). Where
that is not enough and the user allows it, the frozen base and then states have fewer bits, and all levers are tried
again. What comes next, if memory runs out all the same, is chosen beforehand: the first lever that needs less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeroshard.host.columns import columns
from zeroshard.lab.planner.advice import GIB
from zeroshard.lab.planner.command import arguments, ways_of
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.fit import Tried, chosen, every_lever, fitted, try_levers
from zeroshard.lab.planner.plan import asked, planned
from zeroshard.lab.planner.plan_rows import Needs
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds, text, text_without_times
from zeroshard.lab.planner.ways import Ways
from zeroshard.lab.predict.hardware import Link, read_calibration
from zeroshard.lab.predict.process_memory import CONTEXT_BYTES
from zeroshard.models import LanguageModel
from zeroshard.parallel.registry import strategy_entry
from zeroshard.settings.flags_given import path_of, with_flags
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.profiling.devices import Device
from zeroshard.train.setup.fit import FitJob, Fitted
from zeroshard.train.setup.schedule import accumulation_steps
from zeroshard.zero import STAGES, LocalSteps

WAITING_COPY = "--checkpoint-async=false"
FEWER_BITS = {"states": ("--state-format bf16", "--state-format int8"), "base": ("--base int8", "--base nf4")}
MOST_OF_A_STATE = {"disk": 12, "disk-all": 16}  # bytes of a parameter in a rank's file


@dataclass(frozen=True)
class Choice:
    """A set of levers, with all flags that make it.

    Attributes:
        bits: flags that give something fewer bits.
        tried: the levers beside them.
        stage: the lowest open one at which it fits; if none does, the highest.
    """

    bits: tuple[str, ...]
    tried: Tried
    stage: int

    @property
    def needs(self) -> Needs:
        """The memory."""
        return self.tried.planner.needs(*self._way)

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.tried.planner.fits(*self._way)

    @property
    def step_s(self) -> float:
        """Seconds of a step by the plan."""
        return self.tried.planner.row(*self._way).timing.step_s

    @property
    def _way(self) -> tuple[int, int, int | None, LocalSteps | None]:
        ways = self.tried.ways
        return self.stage, ways.micro_batch or 1, ways.shard_size, ways.local_steps


class _Job:
    """A run to make fit, and the sets of levers for it."""

    def __init__(self, job: FitJob) -> None:
        self.job, config = job, job.config
        self.given = _plan_config(job)
        self.stages = _stages(job)
        kept = job.kept
        if config.grad_accum_steps > 1 and not config.global_batch_size and ("grad_accum_steps",) in kept:
            kept |= {("sequence_parallel",)}  # with fewer groups of ranks a step of as many sequences has more of them
        self.kept = kept

    def choices(self, bits: tuple[str, ...], start: Sequence[str] = ()) -> Iterator[Choice]:
        """Yield what is tried with so many bits, the choice last; with the levers of ``start`` or more, if given."""
        planner, ways = self._asked(bits, _stage_of(start))
        if not start:
            tried = fitted(planner, ways)
            best = chosen(tried)
            yield from (self._choice(bits, each) for each in tried if each is not best)
            yield self._choice(bits, best)
            return
        pulled = [lever for lever in every_lever(planner, ways) if lever.flag in start]
        found: Choice | None = self._choice(bits, try_levers(planner, pulled, ways) or Tried((), planner, ways))
        while found is not None:
            yield found
            found = None if found.fits else self.next(found)

    def next(self, now: Choice) -> Choice | None:
        """``now`` with the first lever beside its own that needs less, or at a higher stage; None: there is neither."""
        planner, ways = self._asked(now.bits, now.stage)
        every = every_lever(planner, ways)
        for lever in every:
            pulled = [each for each in every if each.flag in now.tried.flags or each is lever]
            tried = try_levers(planner, pulled, ways)
            if tried is None or tried.flags == now.tried.flags:
                continue
            more = self._choice(now.bits, tried)
            if more.needs.needed_bytes < now.needs.needed_bytes:
                return more
        higher = [stage for stage in self.stages if stage > now.stage] if planner.stages_differ else []
        return replace(now, stage=higher[0]) if higher else None

    def flags(self, choice: Choice) -> tuple[str, ...]:
        """All flags that make a choice."""
        job, config, found = self.job, self.job.config, [*choice.bits]
        if choice.stage != self.stages[0]:
            found.append(f"--strategy zero{choice.stage}")
        found += choice.tried.flags
        shares = any(each.startswith("--sequence-parallel") for each in choice.tried.flags)
        if shares and not config.global_batch_size:
            found.append(f"--global-batch-size {_rows(job)}")
        if self._copies_do_not_fit(choice):
            found.append(WAITING_COPY)
        return tuple(found)

    def _copies_do_not_fit(self, choice: Choice) -> bool:
        """Whether there is no room for copies of the state, from which checkpoints are written while steps go on."""
        config, planner = self.job.config, choice.tried.planner
        on_disk = any(each.startswith("--offload disk") for each in choice.tried.flags) or config.offload.on_disk
        if planner.device.device_type == "cuda" or not config.checkpoint_async or on_disk:
            return False
        micro, size = config.micro_batch_size, choice.tried.ways.shard_size
        copied = planner.held_bytes(choice.stage, micro, size)
        given = ("checkpoint_async",) in self.kept
        return not given and not planner.leaves_room(choice.needs.needed_bytes + copied)

    def _choice(self, bits: tuple[str, ...], tried: Tried) -> Choice:
        planner, ways = tried.planner, tried.ways
        stages = [stage for stage in self.stages if stage in ways.stages][: None if planner.stages_differ else 1]
        micro, size, local = self.job.config.micro_batch_size, ways.shard_size, ways.local_steps
        fits = (stage for stage in stages if planner.fits(stage, micro, size, local))
        return Choice(bits, tried, next(fits, stages[-1]))

    def _asked(self, bits: Sequence[str], least_stage: int) -> tuple[Planner, Ways]:
        config, job = with_flags(self.given, bits), self.job
        link = Link(f"{job.backend} among {job.ranks_per_node}", 0.0, 1.0, "", num_ranks=job.ranks_per_node)
        given: dict[str, Any] = arguments(config) | {"gpu": _device(job)}
        given |= {"within_node": link} if job.device.device_type == "cpu" else {}
        given["overrides"] = {**given["overrides"], "vocab_size": job.vocab_size}
        planner, ways = asked(**given, **ways_of(config))
        planner = planner.on(device=replace(planner.device, memory_bytes=self._free_bytes(planner)))
        kept = self.kept | {path_of(each) for each in bits}
        stages = tuple(stage for stage in self.stages if stage >= least_stage)
        return planner, replace(ways, stages=stages, kept=kept, files=self._has_room_on_disk(planner))

    def _free_bytes(self, planner: Planner) -> int:
        """Bytes for what is planned: without an average of the weights, which no plan has."""
        job = self.job
        free = job.device.memory_bytes + (CONTEXT_BYTES if job.device.device_type == "cuda" else 0)
        shards = (job.config.shard_size or job.world_size) if self.stages[0] else 1
        return free - (4 * planner.workload.num_trained_params // shards if job.config.ema_decay else 0)

    def _has_room_on_disk(self, planner: Planner) -> bool:
        least = MOST_OF_A_STATE["disk-all"] * planner.workload.num_trained_params // self.job.world_size
        return planner.device.device_type == "cuda" or (
            planner.workload.optimizer == "AdamW" and least <= self.job.disk_bytes
        )


def fit_run(job: FitJob) -> Fitted:
    """Choose the levers of a run.

    Raises:
        UserError: no plan can be made of it.
    """
    run = _Job(job)
    every = list(_bits(job))
    from_start = [each for each in every if set(each) <= set(job.start)]
    place = every.index(from_start[-1]) if job.start else 0
    tried: list[Choice] = []
    for bits in every[place:]:
        tried += run.choices(bits, job.start)
        if tried[-1].fits:
            break
    best = tried[-1] if tried[-1].fits else min(tried, key=lambda each: each.needs.needed_bytes)
    following = run.next(best)
    if following is None and every.index(best.bits) + 1 < len(every):
        *_, following = run.choices(every[every.index(best.bits) + 1], run.flags(best))
    given = next(run.choices(())) if best.tried.flags or best.bits else best
    flags = run.flags(best)
    return Fitted(
        flags=flags,
        fits=best.fits,
        needed_bytes=best.needs.needed_bytes,
        next_flags=None if following is None else run.flags(following),
        said=(_chosen_in_words(job, best, given, flags), _cost_in_words(job, best, given)),
        table="\n".join([*_table(run, job, tried), "", _plan_in_words(job, best)]) if job.config.dry_run else "",
    )


def _plan_config(job: FitJob) -> PlanConfig:
    """The run as `zeroshard plan` would be asked for it."""
    run, named = job.config, PlanConfig.model_fields.keys() & TrainConfig.model_fields.keys()
    alike = run.model_dump(include={*named} - {"fit", "plan"}, exclude_unset=True)
    impl = {"on": "compile", "off": "eager" if run.kernels == "reference" else "kernels"}.get(run.compile, "auto")
    by_default = ("compile",) not in job.kept or job.device.device_type == "cpu"
    values: dict[str, Any] = {
        **alike,
        "dtype": run.dtype,
        "gpus": job.world_size,
        "gpus_per_node": job.ranks_per_node,
        "seq_len": run.seq_len,
        "micro_batch": run.micro_batch_size,
        "global_batch": _rows(job),
        "document_mask": job.document_mask,
        "impl": "auto" if by_default else impl,
        "headroom": 0.02 if job.device.device_type == "cuda" else 0.0,  # of a CPU what is free is less that already
    }
    return validate(PlanConfig, values)


def _rows(job: FitJob) -> int:
    """Sequences of a step over all ranks."""
    config = job.config
    groups = config.num_groups(job.world_size)
    return config.micro_batch_size * groups * accumulation_steps(config, job.world_size)


def _stages(job: FitJob) -> tuple[int, ...]:
    """The stages that are open: the given one, or those from the default one on."""
    stage = strategy_entry(job.config.strategy).stage
    return (stage,) if ("strategy",) in job.kept else tuple(each for each in STAGES if each >= stage)


def _stage_of(flags: Sequence[str]) -> int:
    """The stage that is one of these flags; 0: none is."""
    return next((int(flag[-1]) for flag in flags if flag.startswith("--strategy zero")), 0)


def _bits(job: FitJob) -> Iterator[tuple[str, ...]]:
    """Yield the flags for fewer bits that are allowed, none first."""
    allowed, base = job.config.fit.split(","), ()
    yield base
    if "base" in allowed and ("base", "format") not in job.kept:
        yield from ((each,) for each in FEWER_BITS["base"])
        base = FEWER_BITS["base"][-1:]
    if "states" in allowed and ("state_format",) not in job.kept:
        yield from ((*base, each) for each in FEWER_BITS["states"])


def _device(job: FitJob) -> Device:
    if not job.config.plan.device:
        return job.device
    measured = read_calibration(job.config.plan.device, "plan.device").device
    return replace(measured, memory_bytes=job.device.memory_bytes, host_memory_bytes=job.host_bytes)


def _has_rates(job: FitJob) -> bool:
    return job.has_rates or bool(job.config.plan.device)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= 10 * GIB else f"{num_bytes / 2**20:,.1f} MiB"


def _chosen_in_words(job: FitJob, best: Choice, given: Choice, flags: Sequence[str]) -> str:
    needed, free = best.needs.needed_bytes, best.tried.planner.device.memory_bytes
    who, words = "a rank" if job.world_size > 1 else "the run", " ".join(flags)
    if not best.fits:
        return f"nothing fits: {f'with {words} ' * bool(words)}{who} needs {_mib(needed)} and may use {_mib(free)}"
    as_given = "" if best is given else f", where {_mib(given.needs.needed_bytes)} are needed as given"
    return f"fit: {words or 'as given'}: {_mib(needed)} of {_mib(free)} that {who} may use{as_given}"


def _cost_in_words(job: FitJob, best: Choice, given: Choice) -> str:
    if best is given:
        return "fit: that costs no time" + (f": {seconds(best.step_s)} a step by the plan" if _has_rates(job) else "")
    if _has_rates(job):
        return f"fit: {seconds(best.step_s)} a step by the plan, and {seconds(given.step_s)} as given if that fitted"
    described, seq_len = best.tried.planner.workload.described, job.config.seq_len
    found = []
    if isinstance(described, LanguageModel) and (again := described.num_recomputed_flops_per_token(seq_len)):
        found.append(f"{again / described.num_flops_per_token(seq_len):.0%} more FLOPs a step, which are recomputed")
    if in_file := best.tried.row.offloaded.file_bytes:
        found.append(f"{_mib(in_file)} of a file read and written in each step")
    what = " and ".join(found) or "no more FLOPs"
    return f"fit: that costs {what}; `zeroshard bench device` measures what it needs to say seconds (--plan.device)"


def _plan_in_words(job: FitJob, best: Choice) -> str:
    """The plan of the choice, as `zeroshard plan` prints it; without seconds if rates are not known."""
    found = planned(best.tried.planner, replace(best.tried.ways, stages=(best.stage,)))
    return text(found) if best.fits and _has_rates(job) else text_without_times(found)


def _table(run: _Job, job: FitJob, tried: Sequence[Choice]) -> list[str]:
    cells = [("with", "memory", "step", "fits")]
    for each in tried:
        flags = " ".join(run.flags(each)) or "what is given"
        time = seconds(each.step_s) if _has_rates(job) else "not known"
        cells.append((flags, _mib(each.needs.needed_bytes), time, "yes" if each.fits else "no"))
    return list(columns(cells, right=(1, 2)))
