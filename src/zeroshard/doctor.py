"""`zeroshard doctor`: text to paste into a bug report: versions, machine, devices, and what `auto` chooses here."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import psutil

import zeroshard
from zeroshard.columns import columns
from zeroshard.errors import UserError
from zeroshard.launch.environment import variable, world_from_env
from zeroshard.process import ALLOCATOR, allocator_settings, num_cpus

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zeroshard.zero import OptimizerKind

GIB = 2**30
# Environment variables that decide over which network ranks communicate, and how.
VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"),
    *("NCCL_NET_GDR_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_DEBUG"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"),
)
_OF_DEVELOPERS = ("dev", "docs", "notebook")  # extras for those who change zeroshard


def report() -> str:
    """The complete report, with one ``name  value`` per line."""
    lines = _requires()
    required = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]
    how = "" if required else " (run from its source, not installed)"
    rows = [("zeroshard", zeroshard.__version__ + how), ("python", platform.python_version())]
    rows += [(name, _version(name)) for name in required or ("torch", "numpy")]
    rows += [("triton", _version("triton")), ("os", platform.platform()), ("cpus", str(num_cpus()))]
    memory = psutil.virtual_memory()
    rows.append(("memory", f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"))
    rows += _devices()
    rows += _extras(lines)
    world = world_from_env()
    rows.append(("world", "none" if world is None else f"rank {world.rank} of {world.world_size}"))
    rows += [(name, variable(name)) for name in VARIABLES if variable(name)]
    return "\n".join(columns(rows))


def optimizers(specs: Sequence[str] = ()) -> str:
    """A table of torch's optimizers and the classes in ``specs``: what each may be given when it is sharded, and why.

    If a class in ``specs`` declares its reach, which training trusts, the experiment of `zeroshard.reach_probe` is made
    with its default settings, and the line says whether it agrees.

    Args:
        specs: optimizer classes, as ``module:Class``.

    Raises:
        UserError: a name in ``specs`` is not that of an optimizer class.
    """
    import torch

    of_torch = [value for _, value in sorted(vars(torch.optim).items()) if _is_optimizer(value)]
    found = [*((cls.__name__, cls) for cls in of_torch), *((spec, _load_class(spec)) for spec in specs)]
    rows = [("optimizer", "kind", "layout", "why")]
    for name, cls in found:
        kind, why = _kind_of(cls)
        layout = "refused" if kind.refused else _LAYOUTS[kind.reach.value]
        rows.append((name, kind.reach.value, layout + ", matrices only" * (kind.ndims == (2,)), why))
    return "\n".join(columns(rows))


_LAYOUTS = {"element-wise": "slices", "per-tensor": "whole tensors"}


def _is_optimizer(value: object) -> TypeGuard[type[Optimizer]]:
    from torch.optim import Optimizer

    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def _kind_of(optimizer_cls: type[Optimizer]) -> tuple[OptimizerKind, str]:
    """The kind of a class with its default settings, and why; for a declared one also what the experiment finds."""
    import torch

    from zeroshard.reach_probe.answers import found_by_probe
    from zeroshard.zero import OptimizerKind, Reach, classify

    try:
        kind = classify(optimizer_cls)
        if "zero_reach" not in vars(optimizer_cls):
            return kind, kind.reason
        tried = found_by_probe(optimizer_cls, {}, {}, torch.device("cpu")).reach
    except Exception as error:  # noqa: BLE001 -- a class's code may raise anything
        reason = f"it cannot be built without settings: {type(error).__name__}: {error}"
        return OptimizerKind(Reach.UNUSABLE, reason), reason
    # Whole tensors are safe even if they are not needed; the experiment cannot tell blocks from whole tensors.
    agrees = kind.reach in (tried, Reach.BLOCK_WISE) or (kind.reach, tried) == (Reach.PER_TENSOR, Reach.ELEMENT_WISE)
    return kind, f"{kind.reason}; an experiment finds it {tried.value}{'' if agrees else ': THE DECLARATION IS WRONG'}"


def _load_class(spec: str) -> type[Optimizer]:
    """Import the class that ``module:Class`` names; modules in the current folder are found too."""
    module_name, colon, class_name = spec.partition(":")
    if not (module_name and colon and class_name):
        what = f"{spec!r} is not of the form module:Class"
        raise UserError("--optimizers", what, "write for example torch.optim:Muon")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module_name), class_name, None)
    except Exception as error:  # noqa: BLE001 -- a module's code may raise anything
        what = f"{module_name} cannot be imported ({type(error).__name__}: {error})"
        raise UserError("--optimizers", what, "check the name, or install it in this environment") from None
    finally:
        sys.path.remove(str(Path.cwd()))
    if not _is_optimizer(found):
        what = f"{module_name} has no optimizer class {class_name!r}"
        raise UserError("--optimizers", what, "name a subclass of torch.optim.Optimizer")
    return found


def _devices() -> list[tuple[str, str]]:
    import torch
    import torch.distributed as dist

    rows = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{facts.name}, {facts.total_memory / GIB:.1f} GiB"))
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        rows.append(
            ("cuda", f"none (torch built {'for CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'})")
        )
    rows.append(("gloo", _yes(dist.is_available() and dist.is_gloo_available())))
    rows.append(("nccl", _yes(dist.is_available() and dist.is_nccl_available())))
    rows.append(("bfloat16 on cuda", _yes(has_cuda and torch.cuda.is_bf16_supported())))
    if has_cuda:
        rows.append(("cuda memory", allocator_settings() or f"runs set {ALLOCATOR}=expandable_segments:True"))
    rows.append(("device auto", "cuda" if has_cuda else "cpu"))
    rows.append(("kernels auto", _kernels(torch.device("cuda" if has_cuda else "cpu"))))
    rows.append(("comm auto", "torch (nccl)" if has_cuda else "shm on one host, ring on several"))
    return rows


def _kernels(device: Any) -> str:
    from zeroshard.kernels import describe

    served = describe(device, "auto")
    return ", ".join(f"{operation}: {backend}" for operation, backend in served.items())


def _requires() -> list[str]:
    """What zeroshard's metadata say that it requires, one package a line; empty if it is not installed."""
    try:
        return metadata.requires("zeroshard") or []
    except metadata.PackageNotFoundError:
        return []


def _extras(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Which extras have all of their packages here, and which packages the others lack; empty if not installed."""
    if not lines:
        return []
    needed: dict[str, list[str]] = {}
    for line in lines:
        found = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if found and found[2] not in _OF_DEVELOPERS:
            needed.setdefault(found[2], []).append(found[1])
    missing = {extra: [name for name in names if not _is_installed(name)] for extra, names in needed.items()}
    there = ", ".join(extra for extra, names in missing.items() if not names)
    absent = ", ".join(f"{extra} ({', '.join(names)})" for extra, names in missing.items() if names)
    return [("extras", (there or "none") + (f"; missing: {absent}" if absent else ""))]


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "present, version unknown" if find_spec(name) else "not installed"


def _yes(found: bool) -> str:
    return "yes" if found else "no"
