"""The target's hidden states of the training text, kept on disk for several epochs.

Without it every epoch runs the frozen target again, which is most of the work of a step. Only the spans that
are trained on are kept: from the token before the first answer to the end.

example   p p p p p a a a a a u u a a a        features.bin    bfloat16 [tokens kept, D], one example after another
                  ^ kept ...............       features.json   what they are of, and how many batches are done
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
    """`Batches` with the hidden states of their tokens: `[i]` -> (Batch, bfloat16 [A, R, T, D]), or (Batch, None) where
    none are kept. `features`: those of `build`, `examples`: what `trim` left."""

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
        hidden = np.zeros((*batch.tokens.shape, self._features.shape[1]), ml_dtypes.bfloat16)
        hidden[held] = self._features[self._offset[batch.example[held]] + batch.position[held]]
        return batch, hidden


def build(
    folder: Path, target: Target, examples: Sequence[Example], plan: Plan, identity: Mapping[str, Any]
) -> np.ndarray:
    """Run the target over all `examples`, batch by batch of `plan` (one epoch, nothing accumulated), and keep the
    spans of `trim`.

    Goes on from where an earlier run of the same `identity` was stopped.
    Returns the features, memory-mapped. Raises OSError if there is no room for them.
    """
    width = target.config.width
    starts = np.array([_start(example) for example in examples])
    offset = np.concatenate([[0], np.cumsum([len(e.ids) - start for e, start in zip(examples, starts)])])
    path, note = folder / "features.bin", folder / "features.json"
    size = int(offset[-1]) * width * 2
    say(f"feature cache: {offset[-1]:,} tokens of {width} bfloat16 numbers, {size / 2**20:,.0f} MiB in {path}")
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    if path.exists() and note.exists():
        before = json.loads(note.read_text())
        done = before["batches"] if before["identity"] == identity and path.stat().st_size == size else 0
    if done == 0:
        note.unlink(missing_ok=True)  # an older one must not vouch for a file that is empty again
        _reserve(path, size)
    features = np.memmap(path, ml_dtypes.bfloat16, "r+", shape=(int(offset[-1]), width))
    batches = Batches(examples, plan)
    forward = packed_pass(target)
    with progress_bar("features", done, len(batches), "batch") as bar:
        for number in range(done, len(batches)):
            batch = jax.tree.map(lambda x: x[0], batches[number])
            hidden = np.asarray(forward(batch))
            held = batch.example >= 0
            start = starts[batch.example]
            held &= batch.position >= start
            places = offset[batch.example] + batch.position - start
            features[places[held]] = hidden[: len(held)][held].astype(ml_dtypes.bfloat16)
            if (number + 1) % _FLUSH == 0 or number + 1 == len(batches):
                features.flush()
                write_json(note, {"identity": dict(identity), "batches": number + 1})
            bar.update()
    return features


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
