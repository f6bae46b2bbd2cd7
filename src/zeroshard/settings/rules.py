"""Rules of what goes with what: sizes of groups of ranks, wire formats, reproducible steps, second copies of weights.

Plain integers and names, without torch: the engine, the settings of a run and the planner ask here, so one question has
one answer. Each check raises UserError, a ValueError, about the setting; ``field`` is its name, where callers differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.host.errors import UserError

_EITHER = "leave one of the two out"
_ALL_OF_OURS = "choose stage 1, 2 or 3, or leave it out"


def check_count(field: str, value: object, at_least: int = 1) -> None:
    """Check that ``value`` is a whole number, and not below ``at_least``; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{field} must be at least {at_least}, got {value!r}")


def _check_divisor(field: str, size: int, whole: int, what: str) -> None:
    """Check that ``size`` divides ``whole``; ``what`` says that it does not."""
    sizes = [each for each in range(1, whole + 1) if whole % each == 0]
    if isinstance(size, bool) or size not in sizes:
        raise UserError(field, what, f"choose one of {', '.join(map(str, sizes))}")


def check_shard_size(size: int, world_size: int) -> None:
    """Check that ``world_size`` ranks divide into groups of ``size``."""
    what = f"groups of {size} ranks do not partition a world of {world_size}"
    _check_divisor("shard_size", size, world_size, what)


def check_groups(field: str, size: int, num_ranks: int, sizes: Sequence[int] | None = None) -> None:
    """Check that ``num_ranks`` ranks divide into several groups of ``size`` ranks, at least two each.

    ``sizes``: those that are possible, each in a node; None: every proper divisor.
    """
    each_in_a_node = "" if sizes is None else ", each in a node"
    if sizes is None:
        sizes = [each for each in range(2, num_ranks) if num_ranks % each == 0]
    if isinstance(size, bool) or size < 2:
        raise UserError(field, f"must be at least 2, got {size}", "leave it out")
    if size not in sizes:
        todo = f"choose one of {', '.join(map(str, sizes))}" if sizes else "leave it out"
        raise UserError(
            field, f"groups of {size} do not partition {num_ranks} ranks into several{each_in_a_node}", todo
        )


def check_sequence_parallel(size: int, world_size: int) -> None:
    """Check that ``world_size`` ranks divide into groups of ``size``, which share a sequence each."""
    what = f"groups of {size} ranks that share a sequence do not partition a world of {world_size}"
    _check_divisor("sequence_parallel", size, world_size, what)


def check_replicas_share(size: int, shard_size: int) -> None:
    """Check that the ``size`` ranks that share a sequence belong to one replica of ``shard_size`` ranks."""
    if shard_size % size:
        what = f"{size} ranks share a sequence, and a replica that takes local steps has {shard_size} (shard_size)"
        raise UserError("sequence_parallel", what, "choose a divisor of shard_size")


def check_heads(size: int, num_heads: int) -> None:
    """Check that ``size`` ranks divide the query heads of an attention layer evenly."""
    _check_divisor("sequence_parallel", size, num_heads, f"{size} ranks do not divide {num_heads} query heads")


def check_cut(seq_len: int, size: int) -> None:
    """Check that a sequence can be cut into ``size`` parts of one length."""
    if seq_len < size:
        what = f"{seq_len} tokens are fewer than the {size} ranks that share them (sequence_parallel)"
        raise UserError("seq_len", what, f"give {size} or more, or lower sequence_parallel")
    if seq_len % size:
        near = seq_len - seq_len % size
        what = f"{seq_len} tokens cannot be cut into {size} equal parts (sequence_parallel)"
        raise UserError("seq_len", what, f"give {near} or {near + size}, or change sequence_parallel")


def check_node_sums(field: str, size: int | None, shard_size: int | None) -> None:
    """Check that gradients are not added up in nodes of ``size`` and in groups of ``shard_size`` ranks, too."""
    if size and shard_size:
        what = f"{size} is given, and with shard_size = {shard_size} gradients are added up inside these ranks"
        raise UserError(field, what, _EITHER)


def check_wire(field: str, value: object, stage: int, todo: str = _ALL_OF_OURS) -> None:
    """Check that the stage has wire formats; ``value``: the format that is asked for."""
    if stage == 0:
        what = f"{value} is given, and stage 0 has no wire format: no rank owns a shard to send or sum"
        raise UserError(field, what, todo)


def check_something_is_sharded(stage: int) -> None:
    """Check that the stage shards something, so that a ``shard_size`` has an effect."""
    if stage == 0:
        raise UserError("shard_size", "stage 0 shards nothing", _ALL_OF_OURS)


def check_second_copy(
    field: str, size: int, who: str, *, shards: bool, reshards: bool, todo: str = "leave it out, or choose stage 3"
) -> None:
    """Check that a second copy of weights has a use: ``who`` shards weights, and frees them after forward."""
    if not shards:
        raise UserError(field, f"{size} is given, and {who} has no sharded weights to gather again", todo)
    if not reshards:
        what = f"{size} is given, and weights that stay unsharded for backward are not gathered again"
        raise UserError(field, what, "leave it out, or the setting that keeps them unsharded")


def check_reproducible(number: int, world_size: int = 1) -> None:
    """Check that ``number`` is a power of two, as dividing by another number rounds, and that ranks share it evenly."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or number & (number - 1):
        near = 1 << number.bit_length() if isinstance(number, int) and number > 1 else 8
        raise UserError(
            "reproducible", f"{number!r} is no power of two", f"give the most ranks that you will use, as {near}"
        )
    if number % world_size:
        sizes = ", ".join(str(1 << power) for power in range(number.bit_length()))
        what = f"{number} micro-batches cannot be shared out evenly to {world_size} ranks"
        raise UserError("reproducible", what, f"use {sizes} ranks, or another power of two here")


def check_same_bits(
    number: int,
    *,
    wire: str = "",
    local_steps: bool = False,
    shard_size: int | None = None,
    accumulate: str | None = None,
    tiles: bool = False,
    sequence_parallel: bool = False,
) -> None:
    """Check that nothing beside reproducible steps rounds partial sums: bits would depend on the number of ranks.

    ``number``: that of micro-batches; ``wire``: the name of a setting that gives a wire format; empty: none does.
    """
    for name, given, why in (
        ("tiles", tiles, "cuts sequences: parts round in another way"),
        ("sequence_parallel", sequence_parallel, "cuts sequences: parts round in another way"),
        (wire, wire, "rounds what each rank sends"),
        ("local_steps", local_steps, "lets replicas take steps of their own"),
        ("shard_size", shard_size, "adds up over two levels of ranks, with a rounding between them"),
        ("accumulate", accumulate == "local", "adds up on each rank first, with a rounding after it"),
    ):
        if given:
            raise UserError("reproducible", f"{number} is given, and {name} {why}", _EITHER)


def left_uncompiled_with(reproducible: int | None, tiles: str, sequence_parallel: int, recomputation: str) -> str:
    """The setting with which a run on a GPU is not compiled unless it says so; empty: it is compiled.

    Parts of blocks around the attention of shared sequences would keep what ``selective`` recomputation is to drop.
    """
    named = {
        "reproducible": bool(reproducible),
        "tiles": tiles != "none",
        "sequence_parallel": sequence_parallel > 1 and recomputation.startswith("selective"),
    }
    return next((name for name, given in named.items() if given), "")


def check_local_steps(field: str, every: object, shard_size: int | None, num_ranks: int | None = None) -> None:
    """Check that ranks form several replicas, groups of ``shard_size``, which take ``every`` steps of their own."""
    if not shard_size:
        what = f"{every} needs several replicas, and without a shard_size all ranks form one"
        raise UserError(field, what, "give a shard_size, the ranks of a replica; 1: each rank is one")
    if num_ranks is not None and shard_size >= num_ranks:
        what = f"{every} needs several replicas, and {num_ranks} ranks of shard_size {shard_size} form one"
        raise UserError(field, what, "lower shard_size, start more ranks, or leave it out")


def rows(world_size: int, length: int) -> list[list[int]]:
    """Group ``length`` neighbouring ranks each."""
    return [list(range(first, first + length)) for first in range(0, world_size, length)]


def columns(world_size: int, length: int) -> list[list[int]]:
    """Group the ranks that have the same place in each row of ``length`` neighbours."""
    return [list(range(first, world_size, length)) for first in range(length)]
