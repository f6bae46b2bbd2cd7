"""Is the core what runs? The engine as `Zero` steps through it, in numbers: how much of it is `zero/core/`.

    python benchmarks/claims/core_runs.py            # a line for each number; --calls lists what a step calls most

Two ranks are threads of this process. A step is forward, backward, clipping, `optim.step()` and `zero_grad()` of four
units at stage 3, once it is warm, and its numbers are of one rank. Calls are of functions of `zero/`; a switch is one
of them between `zero/core/` and another folder of it, in either direction. Functions that run are counted over stages
0-3 in fp32 and bf16, with accumulation, a dropped block, recomputation of both kinds, clipping, saves, loads and the
account of memory, and as rows that are no number; of a model of blocks with norms, which return a dict.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard.zero
from zeroshard.comm import Communicator, ObservedCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero

ENGINE = Path(zeroshard.zero.__file__).parent
CORE = ENGINE / "core"
NUM_UNITS = 4


class Block(nn.Module):
    """A block with small parameters, whose output is more than a tensor, and that may be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, dropped: bool) -> dict[str, torch.Tensor]:
        """``x [batch, 8]``, and the same by name."""
        return {"x": x if dropped else x + self.linear(self.norm(x))}


class Net(nn.Module):
    """A linear map, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(NUM_UNITS))

    def forward(self, x: torch.Tensor, reentrant: bool | None = None, *, dropped: bool = False) -> torch.Tensor:
        """``x [batch, 8]``; ``reentrant``: recompute blocks in backward so; None: do not; ``dropped``: drop them."""
        x = self.first(x)
        for block in self.blocks:

            def run(x: torch.Tensor, block: nn.Module = block) -> torch.Tensor:
                return block(x, dropped=dropped)["x"]

            x = run(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant)
        return x


def engine(comm: Communicator, stage: int, precision: MixedPrecision | None = None) -> tuple[Zero, Any]:
    """An engine of four units beside the root, and its optimizer."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(NUM_UNITS)]
    zero = Zero(nn.Sequential(nn.Linear(8, 8), *blocks), stage, blocks, comm, precision)
    return zero, zero.optimizer(torch.optim.AdamW, lr=1e-3)


def step(zero: Zero, optim: Any) -> None:
    """An ordinary step."""
    zero.model(torch.ones(4, 8)).square().mean().backward()
    zero.clip_grad_norm_(1.0)
    optim.step()
    optim.zero_grad()


def profiled(run: Callable[[], None], seen: Callable[[FrameType, str], None]) -> None:
    """Run, and show each call and return of a function in Python on this thread and on autograd's."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "return"):
            seen(frame, event)

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()


class Step:
    """What one step of a rank does: a profile of it."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.switches = 0
        self._stack: list[bool] = []  # of the functions of zero/ that run: whether they are the core's

    def __call__(self, frame: FrameType, event: str) -> None:
        """Note an event."""
        file = frame.f_code.co_filename
        if not file.startswith(str(ENGINE)):
            return
        if event == "call":
            self.calls[frame.f_code] += 1
            in_core = file.startswith(str(CORE))
            self.switches += bool(self._stack) and self._stack[-1] is not in_core
            self._stack.append(in_core)
        elif self._stack:
            self._stack.pop()

    @property
    def files(self) -> set[str]:
        """The files of zero/, below it."""
        return {str(Path(code.co_filename).relative_to(ENGINE)) for code in self.calls}


def a_step(comm: Communicator) -> tuple[Step, list[int]]:
    """A profiled step at stage 3, and for each all-gather that a unit's hook begins the frames from there to it."""
    frames: list[int] = []
    watched = ObservedCommunicator(comm)
    gather = watched.all_gather

    def all_gather(*args: Any) -> Any:
        number, frame = 0, sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "_call_impl":
            number, frame = number + frame.f_code.co_filename.startswith(str(ENGINE)), frame.f_back
        if frame is not None:
            frames.append(number)
        return gather(*args)

    zero, optim = engine(watched, 3)
    for _ in range(3):
        step(zero, optim)
    watched.all_gather = all_gather  # ty: ignore[invalid-assignment]
    step(zero, optim)
    del watched.all_gather
    zero.remove()

    zero, optim = engine(comm, 3)
    for _ in range(3):
        step(zero, optim)
    found = Step()
    profiled(lambda: step(zero, optim), found)
    return found, frames


def uses(comm: Communicator) -> set[CodeType]:
    """What runs in stages 0-3, in fp32 and bf16."""
    ran: set[CodeType] = set()

    def run() -> None:
        for precision in (None, MixedPrecision(torch.bfloat16), MixedPrecision(torch.bfloat16, torch.bfloat16)):
            for row in STAGES.values():
                zero = Zero(Net(), replace(row), comm=comm, precision=precision)
                optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
                with zero.no_sync():
                    zero.model(torch.ones(4, 8), dropped=True).sum().backward()
                for _ in range(2):
                    step(zero, optim)
                zero.load_state_dict(zero.state_dict())
                optim.load_state_dict(zero.optim_state_dict())
                for reentrant in (False, True):
                    zero.model(torch.ones(4, 8), reentrant=reentrant).sum().backward()
                saved = [shard.name for shard in zero.named_shards()]
                assert saved
                assert zero.memory_bytes()["grads"]
                optim.zero_grad(set_to_none=False)

    profiled(run, lambda frame, _: ran.add(frame.f_code))
    return ran


def functions() -> dict[tuple[str, int], str]:
    """Every function of the core, by file and line; not those without code, and none that an error alone runs."""
    found: dict[tuple[str, int], str] = {}
    for path in sorted(CORE.glob("*.py")):

        def walk(node: ast.AST, within: str, path: Path = path) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef):
                    first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                    code = [
                        each
                        for each in child.body
                        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))  # a text, or ...
                    ]
                    if code and not isinstance(code[0], ast.Raise):
                        found[str(path), first] = f"{path.name}:{child.lineno} {within}{child.name}"
                    walk(child, f"{within}{child.name}.")
                else:
                    walk(child, f"{within}{child.name}." if isinstance(child, ast.ClassDef) else within)

        walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def overridden() -> tuple[list[str], list[str]]:
    """Methods of the core's classes that classes elsewhere in src define too, and classes with the name of their base.

    By the text of the files, so that nothing optional is imported: a class is known by its name and module.
    """
    package = Path(zeroshard.__file__).parent
    classes: dict[tuple[str, str], tuple[list[tuple[str, str]], set[str]]] = {}
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        tree, names = ast.parse(path.read_text(encoding="utf-8")), dict[str, tuple[str, str]]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {each.asname or each.name: (node.module, each.name) for each in node.names}
        for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            texts = [ast.unparse(each).split("[")[0] for each in node.bases]
            parts = [text.rsplit(".", 1) for text in texts]
            bases = [
                (".".join(names[one]), two[0]) if two and one in names else names.get(one, (module, one))
                for one, *two in parts
            ]
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.name != "__init__"}
            classes[module, node.name] = bases, methods

    def ancestors(key: tuple[str, str]) -> set[tuple[str, str]]:
        known = [base for base in classes[key][0] if base in classes]
        return set(known).union(*map(ancestors, known))

    of_core = {key for key in classes if key[0].startswith("zeroshard.zero.core.")}
    pairs = [(key, base) for key in classes.keys() - of_core for base in ancestors(key) & of_core]
    replaced = {f"{base[1]}.{name}" for key, base in pairs for name in classes[key][1] & classes[base][1]}
    return sorted(replaced), sorted({key[1] for key, base in pairs if key[1] == base[1]})


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    ran = set().union(*run_threads(uses, 2))
    lines = {(code.co_filename, code.co_firstlineno) for code in ran}
    all_of_core = functions()
    missed = [name for place, name in all_of_core.items() if place not in lines]
    found, frames = run_threads(a_step, 2)[0]
    files = sorted(found.files)
    core = [each for each in files if each.startswith("core/")]
    sources = [path for path in ENGINE.rglob("*.py") if "offload" not in path.parts]
    length = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    print(f"functions of zero/core/ that run under Zero: {len(all_of_core) - len(missed)} of {len(all_of_core)}")
    print(f"  not run: {', '.join(missed) or 'none'}")
    methods, names = overridden()
    print(
        f"methods of core classes that src overrides: {len(methods)}; classes that have their base's name: {len(names)}"
    )
    print(f"  {', '.join([*methods, *names]) or 'none'}")
    print(f"files of zero/ in an ordinary step: {len(files)}, {len(core)} of them in core/")
    print(f"  others: {', '.join(each for each in files if each not in core)}")
    print(f"calls of Python in a stage-3 step of {NUM_UNITS} units, two ranks: {found.calls.total()}")
    print(f"switches between core and other files of zero/ in it: {found.switches}")
    print(f"frames from a unit's hook to its all-gather: {min(frames)}-{max(frames)}")
    of_core = sum(number for path, number in length.items() if path.is_relative_to(CORE))
    print(f"lines of zero/ without offload: {sum(length.values())}, {of_core} of them in core/")
    if "--calls" in sys.argv:
        for code, number in found.calls.most_common(70):
            where = Path(code.co_filename).relative_to(ENGINE)
            print(f"{number:6} {where}:{code.co_firstlineno} {code.co_qualname}")


if __name__ == "__main__":
    main()
