"""Train directly from tables, local or remote, without preparing them: exact epochs at any world size.

Training documents are read in *turns* (`lanes`). A turn reads the next documents of up to 16 parts that lie far from
each other. Their tokens, after the tokens left over from the previous turn, are cut into rows, and the rows are
shuffled:

    turn    | left over | lane 0's documents | lane 1's ... |   -> rows of T + 1 tokens, in a shuffled order
    run     | turn 0    | turn 1        | turn 2            |   -> row ``step * G + j`` is the j-th of a step

So an epoch has each row once, and as many rows as the same text has when it is prepared. Only the epoch's last tokens,
too few for a row, are left out; they are different ones in each epoch. Turns do not depend on ranks or batches, so a
step has the same rows at any world size, and consecutive steps take consecutive rows whatever the batch size is.

Early turns are small (a run begins with 16 KiB of text from each lane). Later ones grow to 256 KiB per lane, so rows
are shuffled within 4 MiB of text from 16 parts.

The number of rows of a turn is known only once its text is encoded. So a batch is a pure function of (seed, step), but
computing it requires reading all turns before it. A checkpoint therefore stores where its turn begins
(`StreamBatches.position`): the epoch, the place of each lane, and the tokens left over. It can be loaded at any world
size. Without it the turns are read again, which is slower and gives the same rows. A run that resumes with another
batch size continues at the next row.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from zeroshard.data import order
from zeroshard.data.batches import Cut, given_or_alone
from zeroshard.data.lanes import Gather, Ids, Lanes, Place, Places, StreamedText
from zeroshard.data.tokens import TokenDataset
from zeroshard.host.errors import UserError

FIRST_BYTES, MOST_BYTES = 16 << 10, 256 << 10  # text from each lane in the first turn, and in late ones
_GOLDEN = 0x9E3779B97F4A7C15
_VAL_SEED = 0  # every run validates on the same text


@dataclass(frozen=True)
class Beginning:
    """The place where a turn begins: all that is needed to read on from there, at any world size."""

    epoch: int  # number of the epoch, from 0
    turn: int  # number of the turn, counted from the beginning of the run
    first_row: int  # the turn's first row, counted from the beginning of the run
    epoch_row: int  # the epoch's first row, counted likewise
    places: Places  # the places of the lanes
    left_over: Ids  # tokens of the previous turn that are in none of its rows, [n]

    @property
    def num_bytes(self) -> int:
        """Size of the text that the turn takes from each lane."""
        return min(FIRST_BYTES << min(self.turn, 32), MOST_BYTES)


@dataclass(frozen=True)
class _Turn:
    """A turn that has been read: its rows are ``[begin.first_row, end_row)``."""

    begin: Beginning
    tokens: TokenDataset
    end_row: int


_Number = Annotated[int, Field(ge=0, lt=2**40)]  # rows and turns are multiplied, in 64 bits


class _SavedPosition(BaseModel):
    """What `StreamBatches.position` returns, from a checkpoint that may say anything."""

    model_config = ConfigDict(strict=True)
    row: _Number
    seq_len: _Number
    seed: int
    epoch: Annotated[int, Field(ge=0, lt=2**20)]
    turn: _Number
    first_row: _Number
    epoch_row: _Number
    places: list[Annotated[list[_Number], Field(min_length=2, max_length=2)] | None]
    left_over: str


class StreamBatches:
    """Training batches of one rank, read as they are needed; implements `zeroshard.data.Batches`.

    With a ``gather`` all ranks must ask for the same steps in the same order, as a training loop does, because the
    first call for a step may be a collective. ``sequence_parallel`` neighbouring ranks share each row.

    Raises:
        ValueError: a size below 1, a rank outside its world, or no rank in a process that is not alone.
    """

    def __init__(
        self,
        text: StreamedText,
        *,
        seq_len: int,
        micro_batch_size: int,
        grad_accum_steps: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        gather: Gather | None = None,
        sequence_parallel: int = 1,
    ) -> None:
        rank, world_size = given_or_alone(rank, world_size)
        if min(seq_len, micro_batch_size, grad_accum_steps, world_size) < 1 or not 0 <= rank < world_size:
            raise ValueError(f"sizes must be at least 1 and rank in [0, world_size), got rank {rank} of {world_size}")
        self._text, self._seq_len, self._seed = text, seq_len, seed
        self._micro_batch_size, self._grad_accum_steps = micro_batch_size, grad_accum_steps
        self._cut = Cut.of(rank, sequence_parallel)
        self._rank, self._world_size = rank // sequence_parallel, world_size // sequence_parallel
        self._lanes = Lanes(text, "train", seed, rank, world_size, gather)
        self._origin = self._next = self._start()
        self._turns: list[_Turn] = []  # consecutive turns, up to `_next`
        self._base_step = self._base_row = 0

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """Return ``(tokens_BT, targets_BT)``, int64, on the CPU; always the same for the same arguments.

        Raises:
            ValueError: ``micro_step`` is out of range, or ``step`` is before the step from which the run resumed.
            UserError: a file failed, or the training text has fewer tokens than one row.
        """
        if not 0 <= micro_step < self._grad_accum_steps:
            raise ValueError(f"micro_step must be in [0, {self._grad_accum_steps}), got {micro_step}")
        first = self._row_of(step)
        self._hold(first, self._row_of(step + 1))
        block = micro_step * self._world_size + self._rank
        rows = np.arange(self._micro_batch_size) + first + block * self._micro_batch_size
        window = np.empty((rows.size, self._seq_len + 1), np.int64)  # [B, T + 1]
        for turn in self._turns:
            inside = (rows >= turn.begin.first_row) & (rows < turn.end_row)
            if inside.any():
                seed = self._seed ^ (turn.begin.turn + 1) * _GOLDEN
                places = rows[inside] - turn.begin.first_row
                shuffled = order.rows(seed, places, turn.end_row - turn.begin.first_row)
                window[inside] = turn.tokens.gather(shuffled * self._seq_len, self._seq_len + 1)
        both = torch.from_numpy(window)
        tokens_BT, targets_BT = self._cut((both[:, :-1].contiguous(), both[:, 1:].contiguous()))
        return tokens_BT, targets_BT

    def position(self, step: int) -> dict[str, Any]:
        """Return, as JSON values, where the rows of ``step`` begin; the argument of `restore_position`."""
        row = self._row_of(step)
        begins = [self._origin, *(turn.begin for turn in self._turns), self._next]
        begin = max((each for each in begins if each.first_row <= row), key=lambda each: each.first_row)
        return {
            "row": row,
            "seq_len": self._seq_len,
            "seed": self._seed,
            "epoch": begin.epoch,
            "turn": begin.turn,
            "first_row": begin.first_row,
            "epoch_row": begin.epoch_row,
            "places": [list(place) if place else None for place in begin.places],
            "left_over": base64.b64encode(begin.left_over.tobytes()).decode(),
        }

    def restore_position(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Resume: make ``step`` begin at the row that a saved run was to take next.

        Args:
            saved: the result of `position` for the same text, at any world size; None: all earlier turns are read
                again.
            step: the first step that will be asked for.

        Raises:
            UserError: ``saved`` is damaged, or was made with another seed.
        """
        if saved is None:
            return
        try:
            at = _SavedPosition.model_validate(saved)
            left_over = np.frombuffer(base64.b64decode(at.left_over, validate=True), self._text.dtype)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise _unreadable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except ValueError as error:
            raise _unreadable(str(error)) from None
        places = tuple(None if place is None else Place(*place) for place in at.places)
        begin = Beginning(at.epoch, at.turn, at.first_row, at.epoch_row, places, left_over)
        in_order = begin.epoch_row <= begin.first_row <= at.row
        is_text = not left_over.size or int(left_over.max()) < self._text.tokenizer.vocab_size
        if not (in_order and is_text and self._lanes.has(places)):
            raise _unreadable("it contradicts itself, or the text")
        row = at.row
        if at.seed != self._seed:
            what = f"the checkpoint's stream was shuffled with seed {at.seed}, not {self._seed}"
            raise UserError("seed", what, f"use --seed {at.seed}")
        if at.seq_len != self._seq_len:
            row = begin.first_row  # rows have another length now: cut them again from the beginning of the turn
        self._origin = self._next = begin
        self._turns = []
        self._base_step, self._base_row = step, row

    def close(self) -> None:
        """Release threads and files; does not wait for reads in progress."""
        self._lanes.close()
        self._turns = []

    def _row_of(self, step: int) -> int:
        """Return the first row of a step."""
        rows = self._micro_batch_size * self._grad_accum_steps * self._world_size
        if step < self._base_step:
            raise ValueError(f"step {step} is before step {self._base_step}, which the stream went on from")
        return self._base_row + (step - self._base_step) * rows

    def _start(self) -> Beginning:
        return Beginning(0, 0, 0, 0, self._lanes.start(), np.empty(0, self._text.dtype))

    def _hold(self, first: int, end: int) -> None:
        """Read turns until `_turns` covers rows ``[first, end)``, and drop the turns before them."""
        if first < (self._turns[0].begin if self._turns else self._next).first_row:
            self._turns, self._next = [], self._origin  # an earlier step: read again from the origin
        while self._next.first_row < end:
            self._turns.append(self._read_turn())
            self._turns = [turn for turn in self._turns if turn.end_row > first]
        self._turns = [turn for turn in self._turns if turn.end_row > first]

    def _read_turn(self) -> _Turn:
        begin = self._next
        ids, places = self._lanes.take(begin.epoch, begin.places, begin.num_bytes)
        tokens = np.concatenate([begin.left_over, ids])
        num_rows = max(0, tokens.size - 1) // self._seq_len
        end_row = begin.first_row + num_rows
        if begin is self._origin and self._base_row > end_row:
            raise _unreadable("its row is beyond its turn")
        following = replace(begin, turn=begin.turn + 1, first_row=end_row, places=places)
        if any(places):
            following = replace(following, left_over=tokens[num_rows * self._seq_len :].copy())
        elif end_row == begin.epoch_row:
            what = f"the text that trains has {tokens.size:,} tokens, and a row takes {self._seq_len + 1:,}"
            raise UserError("data", what, "use more text, or lower seq_len")
        else:
            fresh = self._start()
            following = replace(fresh, epoch=begin.epoch + 1, turn=begin.turn + 1, first_row=end_row, epoch_row=end_row)
        self._next = following
        self._lanes.read_ahead(following.epoch, following.places, following.num_bytes)
        return _Turn(begin, TokenDataset([tokens], self._text.tokenizer.vocab_size), end_row)


def _unreadable(why: str) -> UserError:
    what = f"the checkpoint's place in the stream cannot be read ({why})"
    return UserError("resume", what, "take another checkpoint")


def validation_tokens(
    text: StreamedText, num_tokens: int, rank: int = 0, world_size: int = 1, gather: Gather | None = None
) -> TokenDataset:
    """Return at least ``num_tokens`` validation tokens from parts far from each other, or all there are; collective.

    If ``val_fraction`` is small, much text is read to find them; training text is read but not encoded.

    Raises:
        UserError: a file failed.
    """
    lanes = Lanes(text, "val", _VAL_SEED, rank, world_size, gather)
    try:
        places, pieces, have = lanes.start(), [], 0
        while any(places) and have < num_tokens:
            ids, places = lanes.take(0, places, FIRST_BYTES)
            pieces.append(ids)
            have += ids.size
    finally:
        lanes.close()
    return TokenDataset(pieces, text.tokenizer.vocab_size)
