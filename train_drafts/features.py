"""The target's states of the training text, kept on disk for several epochs.

Without it every epoch runs the frozen target again, which is most of the work of a step. For a task that does not look
at what stands before the answers, only the spans from the token before the first answer on are kept.

example   p p p p p a a a a a u u a a a        features.bin   bfloat16 [tokens kept, taps, D], example by example
                  ^ kept ...............       features.json  what they are of, and how many batches are done
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specjax.decode.target import Target
from specjax.telemetry import progress_bar, say, write_json
from train_drafts.data import Example
from train_drafts.packing import Batch, Batches, Plan
from train_drafts.step import packed_pass

_FLUSH = 16  # batches between two notes of how far it has come


def trim(examples: Sequence[Example]) -> list[Example]:
    """The examples without what stands before the token that predicts the first supervised one."""
    starts = [_start(example) for example in examples]
    return [
        dataclasses.replace(example, ids=example.ids[start:], mask=example.mask[start:])
        for example, start in zip(examples, starts)
    ]


class FeatureBatches:
    """`Batches` with the target's states of their tokens: `[i]` -> (Batch, bfloat16 [A, R, T, taps, D]), or
    (Batch, None) where none are kept. `features`: those of `build` for these `examples`."""

    def __init__(self, batches: Batches, features: np.ndarray | None = None, examples: Sequence[Example] = ()):
        self._batches, self._features = batches, features
        self._offset = np.concatenate([[0], np.cumsum([len(example.ids) for example in examples])])

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, i: int) -> tuple[Batch, np.ndarray | None]:
        batch = self._batches[i]
        if self._features is None:
            return batch, None
        held = batch.example >= 0
        states = np.zeros((*batch.tokens.shape, *self._features.shape[1:]), ml_dtypes.bfloat16)
        states[held] = self._features[self._offset[batch.example[held]] + batch.position[held]]
        return batch, states


def build(
    folder: Path,
    target: Target,
    examples: Sequence[Example],
    plan: Plan,
    taps: tuple[int, ...],
    identity: Mapping[str, Any],
    *,
    spans: bool,
) -> np.ndarray:
    """Run the target over all `examples`, batch by batch of `plan` (one epoch, nothing accumulated), and keep its
    states `taps` of all tokens, or of the `spans` of `trim` only.

    Goes on from where an earlier run of the same `identity` was stopped. Returns the features [tokens, taps, D],
    memory-mapped. Raises OSError if there is no room for them, ValueError if `folder` holds those of another run.
    """
    width, identity = target.config.width, {**identity, "taps": list(taps), "spans": spans}
    starts = np.array([_start(example) if spans else 0 for example in examples])
    offset = np.concatenate([[0], np.cumsum([len(e.ids) - start for e, start in zip(examples, starts)])])
    path, note = folder / "features.bin", folder / "features.json"
    shape = (int(offset[-1]), len(taps), width)
    size = int(np.prod(shape)) * 2
    numbers = f"{len(taps)} x {width} bfloat16 numbers"
    say(f"feature cache: {shape[0]:,} tokens of {numbers}, {size / 2**20:,.0f} MiB in {path}")
    folder.mkdir(parents=True, exist_ok=True)
    done = _done(note, identity)
    if not path.exists() or path.stat().st_size != size:
        done = 0
    if done == 0:
        note.unlink(missing_ok=True)  # an older one must not vouch for a file that is empty again
        _reserve(path, size)
    features = np.memmap(path, ml_dtypes.bfloat16, "r+", shape=shape)
    batches = Batches(examples, plan)
    forward = packed_pass(target, taps)
    with progress_bar("features", done, len(batches), "batch") as bar:
        for number in range(done, len(batches)):
            batch = jax.tree.map(lambda x: x[0], batches[number])
            states = np.asarray(forward(batch))
            held = batch.example >= 0
            start = starts[batch.example]
            held &= batch.position >= start
            places = offset[batch.example] + batch.position - start
            features[places[held]] = states[: len(held)][held].astype(ml_dtypes.bfloat16)
            if (number + 1) % _FLUSH == 0 or number + 1 == len(batches):
                features.flush()
                write_json(note, {"identity": identity, "batches": number + 1})
            bar.update()
    return features


def _done(note: Path, identity: Mapping[str, Any]) -> int:
    """How many batches `note` says are done. Raises ValueError naming what differs if they are of something else."""
    if not note.exists():
        return 0
    before = json.loads(note.read_text())
    for name in sorted({*identity, *before["identity"]}):
        was, now = before["identity"].get(name), identity.get(name)
        if was != now:
            raise ValueError(
                f"{note.parent} holds features of a run with {name} {was!r}, and now it is {now!r}; "
                "remove that folder, or train in another --workdir"
            )
    return before["batches"]


def _start(example: Example) -> int:
    return max(0, int(np.argmax(example.mask)) - 1)


def _reserve(path: Path, size: int) -> None:
    """Take the room now: a full disk is met here and not in a write to mapped memory, which would kill the process."""
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        need = f"{path} needs {size / 2**20:,.0f} MiB ({error.strerror})"
        raise OSError(f"{need}; make room, or train without keeping features") from error
