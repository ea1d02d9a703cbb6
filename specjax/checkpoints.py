"""Training state on disk: orbax, behind the few words that a training loop needs. A finished draft is another thing."""

import json
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from specjax.telemetry import say


class Checkpoints:
    """The checkpoints of one training run, a folder for each step, written in the background.

    A checkpoint takes its name only when it is whole, and an older one is removed only after that. As a context
    manager it waits for the last save at the end. A save that failed raises OSError from the next call.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2):
        """Open `folder`, or make it; the last `keep` checkpoints stay. Says which unfinished ones it passes over."""
        logging.get_absl_logger().addFilter(_not_from_orbax)
        self.folder = Path(folder).expanduser().absolute()
        policies = ocp.training.preservation_policies
        self._orbax = ocp.training.Checkpointer(self.folder, preservation_policy=policies.LatestN(keep))
        self._saving: int | None = None
        for path in sorted(self.folder.iterdir()):
            if path.name.partition(".")[0].isdigit() and not path.name.isdigit():
                say(f"warning: {path} is incomplete, its save was cut short; it is passed over ({self._last_whole()})")

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, after waiting for a save under way; None if there is none."""
        self._wait()
        newest = self._orbax.latest
        return newest.step if newest else None

    def save(self, step: int, state, metadata: dict) -> None:
        """Write `state`, any pytree of jax arrays and random keys, and `metadata`, JSON, as checkpoint `step`.

        Returns when the arrays are copied, so that their buffers may be donated; the files are written meanwhile.
        Raises ValueError if `step` is there already, OSError if this save or the one before could not be written.
        """
        json.dumps(metadata, allow_nan=False)  # fails here rather than in the background
        self._wait()
        if step in self._steps():
            raise ValueError(f"{self.folder} already holds step {step}; go on from it, or train in another folder")
        self._saving = step
        with self._writing():
            self._orbax.save_async(step, state, custom_metadata=metadata, force=True)

    def restore(self, abstract_state, step: int | None = None):
        """The state of checkpoint `step`, by default the newest, in the structure of `abstract_state`.

        Its leaves are `jax.ShapeDtypeStruct`s with the shardings wanted, which may be of another mesh than the one that
        saved. Raises FileNotFoundError if there is no such step, ValueError if its arrays are others or damaged.
        """
        step = self._existing(step)
        with self._reading(step):
            stored = _leaves(self._orbax.metadata(step).metadata)
            if not stored:  # what orbax answers where it cannot read the arrays' headers
                raise ValueError("its arrays are missing")
        wanted = _leaves(abstract_state)
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise ValueError(
                    f"{self.folder / str(step)} was written by another configuration: {name} is "
                    f"{stored.get(name, 'absent')} there and {wanted.get(name, 'absent')} here; "
                    "resume with the configuration that began the run, or train in another folder"
                )
        with self._reading(step):
            return self._orbax.load(step, abstract_state)

    def metadata(self, step: int) -> dict:
        """What `save` was given for this step; raises FileNotFoundError if there is no such step."""
        step = self._existing(step)
        with self._reading(step):
            return dict(self._orbax.metadata(step).custom_metadata or {})

    def close(self) -> None:
        """Wait for the save under way; raises OSError if it failed."""
        try:
            self._wait()
        finally:
            self._orbax.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.close()
        except OSError as failure:
            if error is None:
                raise
            say(f"warning: {failure}")  # the error on its way up is the one to report

    def _wait(self) -> None:
        with self._writing():
            self._orbax.wait()

    def _steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def _existing(self, step: int | None) -> int:
        self._wait()
        steps = self._steps()
        if not steps or step not in (None, *steps):
            wanted = "checkpoint" if step is None else f"step {step}"
            found = ", ".join(map(str, sorted(steps))) or "none"
            raise FileNotFoundError(f"{self.folder} holds no {wanted} (steps there: {found}); choose another folder")
        return max(steps) if step is None else step

    def _last_whole(self) -> str:
        return f"the last whole one is step {max(self._steps())}" if self._steps() else "there is no whole one"

    @contextmanager
    def _writing(self):
        """Failures of a save, which orbax raises as various types, become one OSError."""
        try:
            yield
        except Exception as error:
            self._orbax.reload()  # orbax counts a checkpoint from the moment its save begins
            raise OSError(
                f"the checkpoint of step {self._saving} could not be written to {self.folder}: {_first_line(error)}; "
                f"{self._last_whole()}: make room there, then resume"
            ) from error

    @contextmanager
    def _reading(self, step: int):
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"{self.folder / str(step)} is damaged ({_first_line(error)}); remove it to resume from the one before"
            ) from error


def _leaves(tree) -> dict[str, str]:
    """Path -> type and shape of every array, of random keys as the integers that they are stored as."""

    def describe(leaf) -> str:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return f"{np.dtype(leaf.dtype).name} {list(leaf.shape)}"

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): describe(leaf) for path, leaf in leaves}


def _first_line(error: Exception) -> str:
    """What an error says, without the pages that orbax adds."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _not_from_orbax(record) -> bool:
    """Orbax logs each step of each save, and a failure ten times over; what matters is raised."""
    return "orbax" not in Path(record.pathname).parts
