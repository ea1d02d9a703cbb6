"""Which sequences share a row, and which rows a step: planned once from lengths and seed, before the first step.

Short sequences lie one after another in a row and do not see each other (`segment`); what is left is padding (`.`):

    tokens    a a a a b b b b b b c c c . .
    segment   1 1 1 1 2 2 2 2 2 2 3 3 3 0 0
    position  0 1 2 3 0 1 2 3 4 5 0 1 2 0 0

A row has one of a few lengths, so that there are as few programs; all rows of a step have the same. Step i is read
by the plan alone, so one integer says where a run has come to.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grain
import numpy as np

from train_drafts.data import Example

_OPEN_ROWS = 64  # a sequence is tried on these many rows that are not full yet
_THREADS, _AHEAD = 2, 8  # host threads that build batches, and steps they build ahead of the trainer

Row = tuple[int, ...]  # the examples in a row, from left to right


class Batch(NamedTuple):
    """One optimiser step: `accumulate` batches (A) of rows (R) of one length (T), numpy, all [A, R, T].

    `segment` is 0 at padding and counts a row's sequences from 1; `position` restarts in each; `mask` is True at
    supervised tokens; `example` is the index of the example, -1 at padding.
    """

    tokens: np.ndarray
    segment: np.ndarray
    position: np.ndarray
    mask: np.ndarray
    example: np.ndarray


@dataclass(frozen=True)
class Step:
    """`rows` of `shape` (A, R, T), in reading order; rows beyond them stay empty."""

    epoch: int
    shape: tuple[int, int, int]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Plan:
    """All steps of a run. `fill`: share of places that hold tokens."""

    steps: tuple[Step, ...]
    fill: float

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """The distinct (A, R, T), ascending: one program each."""
        return tuple(sorted({step.shape for step in self.steps}))


def plan(
    lengths: Sequence[int],
    *,
    tokens_per_batch: int,
    ladder: Sequence[int],
    seed: int,
    epochs: int,
    row_multiple: int,
    accumulate: int = 1,
) -> Plan:
    """Plan steps that visit every example once in each epoch, each time in another order and other company.

    Args:
        lengths: tokens of each example.
        tokens_per_batch: places of a batch, padding included; a batch has as many rows as fit, at least
            `row_multiple`.
        ladder: lengths that a row may have; a sequence goes to the shortest that holds it.
        row_multiple: the number of rows is a multiple of it (the mesh's data axis).
        accumulate: batches of one step.

    Raises:
        ValueError: if there is no example, one is empty or longer than the ladder, or a number is not positive.
    """
    lengths = [int(length) for length in lengths]  # sums of numpy's integers may overflow
    _check(lengths, tokens_per_batch, ladder, epochs, row_multiple, accumulate)
    steps = []
    for epoch in range(epochs):
        order = np.random.PCG64([seed, epoch])
        rungs = defaultdict(list)
        for example in shuffled(len(lengths), order):
            rungs[min(rung for rung in ladder if rung >= lengths[example])].append(example)
        planned = []
        for length, members in sorted(rungs.items()):
            rows = _pack(members, lengths, length)
            count = row_multiple * max(1, tokens_per_batch // (length * row_multiple))
            size = accumulate * count
            shape = (accumulate, count, length)
            planned += [Step(epoch, shape, tuple(rows[i : i + size])) for i in range(0, len(rows), size)]
        steps += [planned[i] for i in shuffled(len(planned), order)]
    places = sum(int(np.prod(step.shape)) for step in steps)
    return Plan(tuple(steps), epochs * sum(lengths) / places)


def _check(
    lengths: Sequence[int],
    tokens_per_batch: int,
    ladder: Sequence[int],
    epochs: int,
    row_multiple: int,
    accumulate: int,
) -> None:
    numbers = {
        "tokens_per_batch": tokens_per_batch,
        "epochs": epochs,
        "row_multiple": row_multiple,
        "accumulate": accumulate,
        "the shortest row of the ladder": min(ladder, default=0),
    }
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
    if not lengths:
        raise ValueError("there are no examples to plan for; give at least one")
    if min(lengths) < 1:
        raise ValueError("an example has no tokens; leave it out")
    if max(lengths) > max(ladder):
        raise ValueError(
            f"an example has {max(lengths)} tokens but the longest row {max(ladder)}; cut it or add a longer row"
        )


def shuffled(count: int, order: np.random.PCG64) -> list[int]:
    """A permutation of `count` numbers. Of numpy's streams only the raw one is the same in all its versions."""
    return np.argsort(order.random_raw(count), kind="stable").tolist()


def _pack(members: Sequence[int], lengths: Sequence[int], length: int) -> list[Row]:
    """First fit: each sequence goes to the first open row that has room; the oldest row is closed for a new one."""
    rows: list[list[int]] = []
    room: dict[int, int] = {}  # of the open rows
    for example in members:
        row = next((row for row, left in room.items() if left >= lengths[example]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room[row] = length
            room.pop(row - _OPEN_ROWS, None)
        rows[row].append(example)
        room[row] -= lengths[example]
        if not room[row]:
            del room[row]
    return [tuple(row) for row in rows]


def taught_tokens(plan: Plan, supervised: Sequence[int]) -> np.ndarray:
    """Supervised tokens, of `supervised[i]` in example i, that have been trained on after 0, 1, ... steps."""
    each = [sum(supervised[example] for row in step.rows for example in row) for step in plan.steps]
    return np.concatenate([[0], np.cumsum(each)])


class Batches:
    """The plan's steps as a random-access source: `[i]` builds the `Batch` of step i.

    The plan has to be made from the lengths of these examples.
    """

    def __init__(self, examples: Sequence[Example], plan: Plan):
        self._examples, self._plan = examples, plan

    def __len__(self) -> int:
        return len(self._plan.steps)

    def __getitem__(self, i: int) -> Batch:
        step = self._plan.steps[i]
        batch = Batch(*(np.zeros(step.shape, kind) for kind in (np.int32, np.int32, np.int32, np.bool_, np.int32)))
        batch.example[:] = -1
        for number, row in enumerate(step.rows):
            place = np.unravel_index(number, step.shape[:2])
            start = 0
            for segment, index in enumerate(row, start=1):
                example = self._examples[index]
                stop = start + len(example.ids)
                here = (*place, slice(start, stop))
                values = Batch(example.ids, segment, np.arange(stop - start), example.mask, index)
                for array, value in zip(batch, values):
                    array[here] = value
                start = stop
        return batch


def loader(batches, start: int) -> Iterator:
    """The items of a random-access source from step `start` on, in order, built ahead by threads."""
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
    return iter(grain.MapDataset.source(batches)[start:].to_iter_dataset(options))
