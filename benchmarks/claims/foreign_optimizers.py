"""Optimizers of other packages under `Zero`: does each train, and resume, as in one process, or say that it does not?

    pip install prodigyopt dadaptation schedulefree pytorch_optimizer heavyball bitsandbytes torchao
    python benchmarks/claims/foreign_optimizers.py
    python benchmarks/claims/foreign_optimizers.py --packages pytorch_optimizer --only MADGRAD SPAM
    python benchmarks/claims/foreign_optimizers.py --markdown docs/optimizers.md

Every class of an installed package trains `NUM_STEPS` steps on two ranks (threads) at stages 0 to 3, and each step's
weights are compared with those of one process, which adds the gradients of both halves of the rows. Half way it is
saved at stage 3 and resumed at stage 1. What rounding alone may do is known from a process whose first weights differ
in their last bits. A class that does not resume in one process either, by its own ``state_dict``, is told apart.

Exit status 1 if any class trains or resumes otherwise without a word.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard
from zeroshard import Zero
from zeroshard.comm import Communicator, run_threads

NUM_STEPS, HALF = 30, 15
STAGES = (0, 1, 2, 3)
TOLERANCE, ROUNDING = 1e-3, 10.0  # of how far weights have moved; of what rounding does to one process
PACKAGES = {
    "torch": "torch.optim",
    "transformers": "transformers.optimization",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "schedulefree": "schedulefree",
    "heavyball": "heavyball",
    "pytorch_optimizer": "pytorch_optimizer",
    "bitsandbytes": "bitsandbytes.optim",
    "torchao": "torchao.optim",
}
_SAM = {"base_optimizer": torch.optim.SGD, "lr": 0.1}
SETTINGS: Mapping[str, dict[str, Any]] = {
    "transformers.Adafactor": {"lr": None},
    **{f"bitsandbytes.{name}": {"lr": 1e-2} for name in ("LARS", "LARS8bit", "LARS32bit", "PytorchLARS")},
    **{f"bitsandbytes.{name}": {"lr": 1e-2, "momentum": 0.9} for name in ("SGD", "SGD8bit", "SGD32bit")},
    "pytorch_optimizer.BSAM": {"num_data": 8},
    "pytorch_optimizer.Ranger21": {"num_iterations": NUM_STEPS},
    **{f"pytorch_optimizer.{name}": _SAM for name in ("SAM", "FriendlySAM", "LookSAM")},
    "pytorch_optimizer.GaLore": {"rank": 2, "update_proj_gap": 5},
}
NOT_OVER_PARAMETERS = {  # classes that are not made of parameters and settings, as those of torch.optim are
    **dict.fromkeys(("AdaLOMO", "LOMO", "AdamMini", "GSAM", "WSAM"), "it takes a model"),
    **dict.fromkeys(
        (
            "Lookahead",
            "OrthoGrad",
            "PCGrad",
            "SafeFP16Optimizer",
            "ScheduleFreeWrapper",
            "TRAC",
            "SAMWrapper",
            "SplitOpt",
        ),
        "it takes an optimizer",
    ),
    **dict.fromkeys(("PSGDBase", "SOAPBase", "_AdamW"), "it is the base of others"),
    **dict.fromkeys(("DeMo", "DistributedMuon"), "it communicates itself"),
    "CPUOffloadOptimizer": "it takes a GPU",
}
_WITH_MUON = ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon")  # of pytorch_optimizer: they take groups

torch.manual_seed(0)
FIRST = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)))
NUDGED = copy.deepcopy(FIRST)
for param in NUDGED.parameters():
    param.data *= 1 + 1e-7 * torch.randn_like(param).sign()


@dataclass
class Result:
    """What one class does: ``outcome`` is ``equal``, ``refused``, ``differs``, ``fails`` or ``no optimizer``."""

    name: str
    outcome: str
    reason: str = ""
    stages: list[int] = field(default_factory=list)  # at which it trains
    resumes: str = ""  # equal, differs, fails, refused, or not in one process either


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Class:
    """A class with its settings; ``closed``: its step wants a closure."""

    name: str
    cls: type[Optimizer]
    closed: bool = False

    def make(self, make: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
        params: list[Any] = list(model.parameters())
        package, _, short = self.name.partition(".")
        if package == "pytorch_optimizer" and short in _WITH_MUON:
            params = [{"params": [p for p in params if (p.dim() > 1) is own], "use_muon": own} for own in (True, False)]
        optimizer = make(params, **copy.deepcopy(SETTINGS.get(self.name, {})))
        if callable(train := getattr(optimizer, "train", None)):
            train()
        return optimizer

    def step(self, optimizer: Any, backward: Callable[[], Tensor]) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            return backward()

        if self.closed:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        optimizer.zero_grad()


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return (model(rows.chunk(2)[rank]) - 1).square().mean()


def vector(state: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in state.values()]).clone()


def one_process(of: Class, first: nn.Module = FIRST, *, resumes: bool = False) -> list[Tensor]:
    """The weights after each step; ``resumes``: half way by the state dict of another optimizer."""
    torch.manual_seed(0)
    model, seen = copy.deepcopy(first), list[Tensor]()
    optimizer = of.make(of.cls, model)

    def backward() -> Tensor:
        total = torch.zeros(())
        for rank in range(2):
            one = loss(model, len(seen), rank) / 2
            one.backward()
            total += one.detach()
        return total

    while len(seen) < NUM_STEPS:
        if resumes and len(seen) == HALF:
            states = copy.deepcopy(optimizer.state_dict())
            optimizer = of.make(of.cls, model)
            optimizer.load_state_dict(states)
        of.step(optimizer, backward)
        seen.append(vector(model.state_dict()))
    return seen


def on_two_ranks(of: Class, stage: int, folder: Path | None = None) -> list[list[Tensor]]:
    """The weights after each step, of both ranks; ``folder``: it is saved there half way, and resumed at stage 1."""
    torch.manual_seed(0)

    def rank_main(comm: Communicator) -> list[Tensor]:
        zero, optimizer, seen = *begun(comm, stage), list[Tensor]()

        def backward() -> Tensor:
            one = loss(zero.model, len(seen), comm.rank)
            one.backward()
            return one.detach()

        while len(seen) < NUM_STEPS:
            if folder is not None and len(seen) == HALF:
                zeroshard.save(folder, zero, step=HALF)
                zero, optimizer = begun(comm, 1)
                zeroshard.load(folder, zero)
            of.step(optimizer, backward)
            seen.append(vector(zero.state_dict()))
        return seen

    def begun(comm: Communicator, stage: int) -> tuple[Zero, Optimizer]:
        model = copy.deepcopy(FIRST)
        zero = Zero(model, stage, "auto", comm)
        return zero, of.make(lambda params, **settings: zero.optimizer(of.cls, params, **settings), model)

    return run_threads(rank_main, 2)


# -- comparisons -------------------------------------------------------------------------------------------------------


def measure(name: str, cls: type[Optimizer]) -> Result:
    short = name.partition(".")[2]
    if short in NOT_OVER_PARAMETERS:
        return Result(name, "no optimizer", NOT_OVER_PARAMETERS[short])
    expected: list[Tensor] = []
    failure = ""
    for closed in (False, True):
        of = Class(name, cls, closed)
        try:
            expected, nudged = one_process(of), one_process(of, NUDGED)
        except Exception as error:  # noqa: BLE001 -- each package raises its own
            failure = failure or words(error)
        else:
            break
    if not expected:
        return Result(name, "no optimizer", f"one process fails: {failure}")
    start = vector(FIRST.state_dict())
    moved, rounding = (
        [distance(*pair) for pair in zip(expected, other, strict=True)] for other in ([start] * NUM_STEPS, nudged)
    )

    def compared(run: Callable[[], list[list[Tensor]]]) -> tuple[str, str]:
        try:
            found = run()
        except ValueError as error:
            return "refused", words(error)
        except Exception as error:  # noqa: BLE001
            return "fails", words(error)
        for step in range(NUM_STEPS):
            off = max(distance(rank[step], expected[step]) for rank in found)
            if not off <= max(TOLERANCE * moved[step], ROUNDING * rounding[step]):
                return "differs", f"from step {step + 1} on, by {off / moved[step]:.1g} of what weights have moved"
        return "equal", ""

    by_stage = [compared(lambda stage=stage: on_two_ranks(of, stage)) for stage in STAGES]
    stages = [stage for stage, (outcome, _) in zip(STAGES, by_stage, strict=True) if outcome == "equal"]
    worst = next(
        (each for kind in ("differs", "fails", "refused") for each in by_stage if each[0] == kind), ("equal", "")
    )
    result = Result(name, *worst, stages)
    if worst[0] == "equal":
        with tempfile.TemporaryDirectory() as folder:
            result.resumes, why = compared(lambda: on_two_ranks(of, 3, Path(folder) / "saved"))
        if result.resumes != "equal":
            alone, _ = compared(lambda: [one_process(of, resumes=True)])
            result.resumes = (
                f"{result.resumes}, {'nor' if alone != 'equal' else 'though it does'} in one process: {why}"
            )
    return result


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def classes(package: str) -> Iterator[tuple[str, type[Optimizer]]]:
    """Every optimizer class in the package's namespace, by name."""
    module = importlib.import_module(PACKAGES[package])
    if package == "heavyball":
        module.utils.compile_mode = None
    for name, cls in sorted(vars(module).items()):
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer:
            yield f"{package}.{name}", cls


# -- the table ---------------------------------------------------------------------------------------------------------


def is_wrong(result: Result) -> bool:
    return result.outcome in ("differs", "fails") or result.resumes.startswith(("differs, though", "fails, though"))


ABOUT = """\
# Optimizers of other packages

Which optimizers train under `Zero` as in one process, and which are refused?
`python benchmarks/claims/foreign_optimizers.py --markdown docs/optimizers.md` wrote this page with torch {torch},
{versions}.

Each class trains {steps} steps on two ranks at stages 0 to 3, with the settings that it has by default. Each step's
weights are compared with those of one process, up to {tolerance} of how far weights have moved, or {rounding} times
what other last bits in the first weights do. Half way it is saved at stage 3 and resumed at stage 1.
[Take any optimizer](how-to/own-loop.md#take-any-optimizer) says how a class is tried.

"""


def markdown(results: list[Result]) -> str:
    packages = dict.fromkeys(result.name.partition(".")[0] for result in results)
    about = ABOUT.format(
        torch=torch.__version__.partition("+")[0],
        versions=", ".join(f"{name} {version(name)}" for name in packages if name != "torch"),
        steps=NUM_STEPS,
        tolerance=TOLERANCE,
        rounding=int(ROUNDING),
    )
    head = "| package | classes | equal at each stage | stage 0 alone | refused | wrong |"
    lines = [*about.splitlines(), head, "|---|---|---|---|---|---|"]
    for package in packages:
        own = [each for each in results if each.name.startswith(f"{package}.") and each.outcome != "no optimizer"]
        counts = Counter(
            "wrong" if is_wrong(each) else "stage 0" if each.stages == [0] else each.outcome for each in own
        )
        row = [package, len(own), *(counts[kind] for kind in ("equal", "stage 0", "refused", "wrong"))]
        lines.append(f"| {' | '.join(map(str, row))} |")
    for title, chosen in (
        ("Not equal", [each for each in results if each.outcome not in ("equal", "no optimizer")]),
        ("Not resumed", [each for each in results if each.resumes not in ("", "equal")]),
        ("Not tried", [each for each in results if each.outcome == "no optimizer"]),
    ):
        by_reason: dict[str, list[str]] = {}
        for each in chosen:
            reason = each.resumes if title == "Not resumed" else each.reason
            trains = " (trains at stage 0)" if each.stages == [0] else ""
            by_reason.setdefault(reason.replace(each.name.partition(".")[2], "it"), []).append(each.name + trains)
        lines += ["", f"## {title}", ""]
        lines += [f"- {', '.join(names)}: {reason}".replace("_", "\\_") for reason, names in by_reason.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--only", nargs="+", help="names of classes")
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    warnings.simplefilter("ignore")
    results: list[Result] = []
    for package in args.packages:
        try:
            found = list(classes(package))
        except ImportError as error:
            print(f"{package} is left out: {error}", flush=True)
            continue
        for name, cls in found:
            if not args.only or name.partition(".")[2] in args.only:
                results.append(measure(name, cls))
                print(results[-1], flush=True)
    text = markdown(results)
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    return 1 if any(map(is_wrong, results)) else 0


if __name__ == "__main__":
    sys.exit(main())
