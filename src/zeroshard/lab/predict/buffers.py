"""Describes the flat buffers that an engine would make of a model; memory and traffic are computed from them.

The model may be on the meta device: only names, shapes and dtypes are read, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from zeroshard.settings.wire_formats import BlockFormat
from zeroshard.zero import FrozenFormat, ShardingStrategy
from zeroshard.zero.core.layout import ALIGNMENT, FlatLayout
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.core.units import UnitSpec
from zeroshard.zero.frozen_formats.coded import Codes, chosen_of
from zeroshard.zero.kept_modules import kept_params
from zeroshard.zero.precision import Exemption, MixedPrecision
from zeroshard.zero.unit_choice import UnitChoice, partition_of
from zeroshard.zero.whole_tensors.layout import add_loads, whole_layout


@dataclass(frozen=True)
class Buffer:
    """Description of a flat buffer: parameters of one unit and dtype, laid out end to end."""

    unit: str  # the unit's name; ``"root"`` for parameters outside of all other units
    # the buffer's name: the unit's, then ``"unit#1"`` and so on for further buffers of the unit. A buffer of parameters
    # that an optimizer needs unsplit comes last, unless all parameters of their kind are such.
    name: str
    layout: FlatLayout  # the offset of each parameter
    dtype: torch.dtype  # dtype of the parameters, and so of their master weights
    trained: bool  # whether the parameters take gradients
    exemption: Exemption = ""  # from what parts of the dtype policy the parameters are exempt
    form: BlockFormat | None = None  # in which frozen weights are kept as codes; None: as they are computed with
    read_in_backward: bool = True  # whether a backward through the unit reads the parameters

    def codes(self, strategy: ShardingStrategy) -> Codes | None:
        """The codes of a coded buffer at a stage; None: it has none."""
        shards = self.layout.world_size if strategy.params is SHARD else 1
        return None if self.form is None else Codes(self.layout, self.form, shards)

    def policy(self, precision: MixedPrecision) -> MixedPrecision:
        """Return the part of the model's dtype policy that holds for these parameters."""
        return precision.exempt(self.exemption)


def own_numel(layout: FlatLayout, rank: int) -> int:
    """Elements of a rank's shard, padding included."""
    start, stop = layout.interval(rank)
    return stop - start


Named = list[tuple[str, tuple[int, ...]]]
_Kind = tuple[torch.dtype, bool, Exemption, BlockFormat | None]


def buffers_of(
    model: nn.Module,
    world_size: int,
    units: UnitChoice | None = None,
    *,
    whole: Iterable[nn.Parameter] = (),
    precision: MixedPrecision | None = None,
    replicated: bool = False,
    reproducible: int | None = None,
    block: int = 1,
    frozen_format: FrozenFormat | None = None,
) -> list[Buffer]:
    """Describe the flat buffers of ``model``, root first.

    Args:
        model: the model; it is read, not changed.
        world_size: number of shards: the world size, or the ``shard_size`` if there is one.
        units: as `Zero` takes them, in the order in which they run.
        whole: the parameters that the optimizer needs unsplit, for an optimizer such as `torch.optim.Muon`.
        precision: the dtype policy; it may put some parameters of a unit into a separate buffer.
        replicated: whether several groups of ``world_size`` ranks hold the same state.
        reproducible: as `Zero` takes it.
        block: elements of a block of trained parameters that no shard may cut, for an optimizer with 8-bit states; 1:
            shards may end anywhere. See [Note: Blocks of a parameter] in `zeroshard.zero.core.layout`.
        frozen_format: as `Zero` takes it.

    Raises:
        UserError: there is no parameter to apply ``frozen_format`` to.
    """
    policy = precision or MixedPrecision()
    root, specs = partition_of(model, units)
    unsplit, kept = set(whole), kept_params(model, policy)
    parts = 1 if reproducible is None else reproducible // world_size
    loads = [0] * (world_size * parts)
    forms: dict[nn.Parameter, BlockFormat] = {}
    if frozen_format is not None:
        forms = dict.fromkeys(chain(*chosen_of(frozen_format, (root, *specs), kept)), frozen_format.form)

    def kind_of(param: nn.Parameter) -> _Kind:
        exemption = policy.exemption(param.shape, kept=param in kept)
        return param.dtype, param.requires_grad, exemption, forms.get(param)

    buffers = []
    for spec in (root, *specs):
        flat, tensors = _by_kind(spec, kind_of, unsplit)
        here: list[Buffer] = []
        further: list[Buffer] = []
        for index, (kind, named) in enumerate(flat.items()):
            name = f"{spec.name}#{index}" if index else spec.name
            trained = kind[1]
            if named:
                layout = FlatLayout.of(named, world_size, ALIGNMENT, parts, block if trained else 1)
                here.append(Buffer(spec.name, name, layout, *kind, spec.read_in_backward))
            if kind in tensors:
                own = policy.exempt(kind[2])
                packed = any((own.weights_format(kind[0]), own.gradients_format(kind[0])))
                even = replicated or packed or reproducible is not None
                layout = whole_layout(tensors[kind], world_size, loads, even=even, parts=parts)
                add_loads(layout, loads)
                if named:
                    name = f"{spec.name}#{len(flat) + len(further)}"
                (further if named else here).append(Buffer(spec.name, name, layout, *kind, spec.read_in_backward))
        buffers += here + further
    return buffers


def _by_kind(
    spec: UnitSpec, kind_of: Callable[[nn.Parameter], _Kind], unsplit: set[nn.Parameter]
) -> tuple[dict[_Kind, Named], dict[_Kind, Named]]:
    """Names and shapes of a unit's parameters by kind: those that may be split, and those that may not."""
    flat: dict[_Kind, Named] = {}
    tensors: dict[_Kind, Named] = {}
    for name, param in spec.params:
        kind = kind_of(param)
        flat.setdefault(kind, [])  # the order of kinds is that of their first parameters, unsplit or not
        chosen = tensors if param in unsplit else flat
        chosen.setdefault(kind, []).append((name, tuple(param.shape)))
    return flat, tensors
