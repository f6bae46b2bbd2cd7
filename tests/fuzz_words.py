"""Words that may follow `zeroshard`: of each verb's own settings, with values that fit, that nearly fit, and others."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from zeroshard.cli import VERBS
from zeroshard.flags import flags_of
from zeroshard.lab.bench.settings import BENCHES
from zeroshard.lab.sweep.cases import SweepConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.registered import Names
from zeroshard.train.config.sections import SHORTHANDS
from zeroshard.train.config.validate import fields_by_name

INTEGERS = ("0", "1", "2", "3", "16", "-1", "1k", "1e3", "2.0", "2.5", "0x10", "1_000", "2147483648", "2**3", "١٢", "")
INTEGERS_TOO = ("9223372036854775807", "9223372036854775808", "9" * 40, "9" * 400, "9" * 5000, "9" * 400 + "B", "nan")
FLOATS = (
    *("0", "1", "0.5", "1e-3", "-1", "1e-320", "1e308", "1e309"),
    *("nan", "inf", "-inf", "0,5", "1.", "", "x", "9" * 999),
)
TEXTS = (
    *("", "x", "none", "auto", "é", "a" * 300, "a" * 5000, ".."),
    *("/", "a/b", "-", "--", "$(x)", "\x1b[31m", "a\nb", "%s"),
)
BAD_TEXTS = ("a\0b", "\udcff", "\ud800x")
SIZES = ("1GB", "5us", "1Gbit/s", "400", "1e9GB", "9" * 400 + "GB", "0B", "-1GB", "1Gb/s", "0.5s", "64KiB")
# What a verb may be given at once without taking long; the fuzzer's own words follow, and win.
SMALL: dict[str, tuple[str, ...]] = {
    "plan": ("--model.n-layer", "1", "--gpus", "2", "--micro-batch", "1"),
    "generate": ("--max-new-tokens", "3"),
    "eval": (
        "--batches",
        "2",
    ),
    "prepare": ("--data", "text", "--data.path", "text.txt", "--data.dir", "prepared"),
    "submit": ("--cluster", "local"),
}
FILES = (
    *("run", "hf", "sweep", "finished", "ckpt.pt", "nanogpt.py", "deepspeed.json", "settings.toml", "sweep.toml", "."),
    *(
        "device.json",
        "text.txt",
        "docs.jsonl",
        "run/checkpoints",
        "run/checkpoints/step-00000001",
        "nothing",
        "new/out",
    ),
    *("run/config.toml", "tokens", "a" * 5000, "text.txt/x", ""),
)
# Words that keep a case from doing for minutes what it was asked for, or from changing this machine.
_ENDLESS = ("--max-new-tokens", "--data.workers", "--data.max-tokens")


def _joined(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def _of_annotation(annotation: Any) -> tuple[str, ...]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _of_annotation(get_args(annotation)[0])
    if origin is Literal:
        return (*map(str, get_args(annotation)), *TEXTS[:4])
    if origin in (Union, types.UnionType):
        return tuple(word for each in get_args(annotation) for word in _of_annotation(each))
    if origin is tuple:
        return _of_annotation(get_args(annotation)[0])
    return {int: INTEGERS + INTEGERS_TOO, float: FLOATS, bool: ("true", "no", "2", "")}.get(
        annotation, TEXTS + BAD_TEXTS + SIZES + FILES
    )


def _settings(config: type, shorthands: dict[str, str], positionals: Sequence[str], prefix: str = "") -> Any:
    """A list of flags with their values, of one configuration."""
    fields = fields_by_name(config)
    choices: list[Any] = []
    for name, flag in flags_of(config, shorthands, positionals).items():
        spelled = f"--{prefix}{name[2:]}"
        if flag.kind == "switch":
            choices.append(st.sampled_from([[spelled], [spelled], [f"{spelled}=no"], [f"{spelled}=2"]]))
            continue
        field = fields[".".join(flag.path)]
        named = [name for each in field.metadata if isinstance(each, Names) for name in each.now()]
        words = (*named, *TEXTS[:4]) if named else _of_annotation(field.annotation)
        if name in _ENDLESS:
            words = tuple(word for word in words if len(word) < 3)
        value = st.sampled_from(sorted(set(words)))
        if flag.kind == "many":
            choices.append(st.lists(value, max_size=3).map(lambda values, spelled=spelled: [spelled, *values]))
        else:
            choices.append(value.map(lambda value, spelled=spelled: [spelled, value]))
            choices.append(value.map(lambda value, spelled=spelled: [f"{spelled}={value}"]))
    return st.lists(st.one_of(choices), max_size=4) if choices else st.just([])


def _with_settings(verb: str) -> Any:
    table = VERBS[verb]
    assert table.config is not None
    files = st.sampled_from(FILES)
    parts = [st.just([list(SMALL.get(verb, ()))]), _settings(table.config, SHORTHANDS, table.positionals)]
    if table.positionals:
        parts.append(st.lists(files.map(lambda word: [word]), min_size=1, max_size=len(table.positionals)))
    if table.reads_file:
        parts.append(st.lists(st.sampled_from(("settings.toml", *FILES)).map(lambda f: ["--config", f]), max_size=1))
    if table.before:
        run = st.tuples(_settings(TrainConfig, SHORTHANDS, ())).map(lambda found: [["train", *_joined(found[0])]])
        return st.tuples(parts[1], run).map(lambda found: [verb, *_joined([*found[0], *found[1]])])
    # in whatever order
    every = st.tuples(*parts).flatmap(lambda found: st.permutations(found[0] + _joined(found[1:])))
    return every.map(lambda chunks: [verb, *_joined(chunks)])


def _plain(*words: Any) -> Any:
    """One word of each strategy, or none."""
    return st.tuples(*(st.one_of(st.just(()), each.map(lambda word: (word,))) for each in words)).map(
        lambda found: [word for each in found for word in each]
    )


def _without_settings() -> dict[str, Any]:
    files, texts = st.sampled_from(FILES), st.sampled_from(TEXTS + BAD_TEXTS)
    assigned = st.tuples(
        st.sampled_from(
            ("n_layer", "warmup_iters", "gradient_accumulation_steps", "lr_decay_iters", "dropout", "dataset")
        ),
        st.sampled_from(("None", "1", "2.5", "'x'", "[1]", "{[]: 1}", "9**9", "(" * 500, "9" * 5000, "True", "-3", "")),
    ).map(lambda found: f"--{found[0]}={found[1]}")
    bench = st.sampled_from(sorted(BENCHES)).flatmap(
        lambda kind: _settings(BENCHES[kind], {}, ()).map(lambda found: [kind, *_joined(found)])
    )
    sweep = st.tuples(
        _settings(SweepConfig, {}, ()),
        _settings(TrainConfig, SHORTHANDS, (), "base."),
        _settings(TrainConfig, SHORTHANDS, (), "axes."),
        st.sampled_from([[], [["--config", "sweep.toml"]], [["--config", "settings.toml"]]]),
    ).map(lambda found: ["--dry-run", *_joined(_joined(found))])
    outs = st.sampled_from(((), ("--out", "new"), ("--out", "text.txt"), ("--to", "wandb")))
    return {
        "import-config": st.one_of(
            _plain(st.just("nanogpt"), st.sampled_from(("nanogpt.py", *FILES)), assigned, assigned),
            _plain(st.just("deepspeed"), st.sampled_from(("deepspeed.json", *FILES)), texts),
        ),
        "checkpoint": _plain(st.sampled_from(("ls", "show", "verify", "diff", "x")), files, files),
        "bench": st.one_of(bench, _plain(texts, texts)),
        "sweep": sweep,
        "report": st.tuples(st.lists(files, max_size=2), outs).map(_joined),
        "doctor": _plain(st.sampled_from(("--optimizers", "--environment", "x")), texts, st.just("torch.optim:SGD")),
        "completion": _plain(st.sampled_from(("bash", "zsh", "fish", "x")), texts),
    }  # fmt: skip


# Lines that succeed, each with the file or folder in it that is to be spoiled.
READERS: tuple[tuple[str, str], ...] = (
    ("train --config settings.toml", "settings.toml"),
    ("train --config run/config.toml", "run/config.toml"),
    ("prepare --data text --data.path text.txt docs.jsonl --data.dir prepared", "docs.jsonl"),
    ("prepare --data text --data.path text.txt --data.dir tokens", "tokens"),
    ("generate run --max-new-tokens 3", "run"),
    ("generate run --max-new-tokens 3", "run/config.toml"),
    ("generate hf --max-new-tokens 3", "hf"),
    ("eval run --data-dir tokens --batches 1", "run"),
    ("eval run --data-dir tokens --batches 1", "tokens"),
    ("eval hf --data-dir tokens --batches 1 --json-line", "hf"),
    ("export run new", "run"),
    ("import hf new", "hf"),
    ("import hf new", "hf/config.json"),
    ("import ckpt.pt new", "ckpt.pt"),
    ("import-config nanogpt nanogpt.py", "nanogpt.py"),
    ("import-config deepspeed deepspeed.json", "deepspeed.json"),
    ("checkpoint ls run", "run"),
    ("checkpoint show run", "run/checkpoints"),
    ("checkpoint verify run/checkpoints/step-00000001", "run/checkpoints"),
    ("checkpoint diff run run", "run"),
    ("report run", "run"),
    ("report finished --out new", "finished"),
    ("report finished/metrics.jsonl finished", "finished/metrics.jsonl"),
    ("report sweep", "sweep"),
    ("sweep --dry-run --config sweep.toml", "sweep.toml"),
    ("sweep --out sweep --axes.strategy zero0 zero3 --base.max-steps 3", "sweep"),
    ("plan --gpu device.json --model.n-layer 1 --micro-batch 1", "device.json"),
)


@dataclass(frozen=True)
class Line:
    """A command line, and what is to be spoiled before it runs; empty: nothing."""

    words: list[str]
    spoiled: tuple[str, ...] = ()
    seed: int = 0


def command_lines() -> Any:
    """A `Line`: with odd words, with odd files, or both."""
    plain = _without_settings()
    verbs = {
        name: _with_settings(name) if verb.config else plain[name].map(lambda words, name=name: [name, *words])
        for name, verb in VERBS.items()
    }
    words = st.sampled_from(sorted(verbs)).flatmap(lambda name: verbs[name])
    odd = st.tuples(words, st.integers(0, 19), st.integers(0, 30), st.sampled_from(TEXTS + BAD_TEXTS)).map(_disturbed)
    seeds = st.integers(0, 2**32)
    readers = st.tuples(st.sampled_from(READERS), st.integers(1, 2), seeds)
    return st.one_of(odd.map(Line), readers.map(lambda f: Line(f[0][0].split(), (f[0][1],) * f[1], f[2])))


def _disturbed(found: tuple[list[str], int, int, str]) -> list[str]:
    words, what, at, text = found
    at %= len(words)
    match what:
        case 17:
            return words[:at] + words[at + 1 :]
        case 18:
            return [*words[:at], text, *words[at:]]
        case 19:
            return [*words[:at], words[at][:-1], *words[at + 1 :]]
    return words
