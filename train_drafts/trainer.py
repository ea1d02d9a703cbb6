"""The compiled step of a run and the states it goes through, from a checkpoint on."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from specjax.checkpoints import Checkpoints
from specjax.decode.target import Target
from specjax.sharding import spec
from specjax.telemetry import say
from train_drafts import packing
from train_drafts.material import Material
from train_drafts.packing import Batch
from train_drafts.step import Metrics, Optimizer, TrainState, make_step, place


class Trainer:
    """One run of `task` over `steps` steps."""

    def __init__(self, target: Target, task, material: Material, optimizer: Optimizer, steps: int):
        self.target, self.task, self._steps = target, task, steps
        transform = optimizer.build(steps)
        self.graph, self._declared = task.declare(target)
        self._update = make_step(task, target, self.graph, transform)
        everywhere = jax.NamedSharding(target.mesh, spec(None))
        ids = material.token_ids, material.draft_ids
        self.vocabulary = jax.tree.map(lambda x: jax.device_put(x, everywhere), ids)
        self._fresh = jax.jit(lambda params: TrainState(jnp.int32(0), params, transform.init(params)))

    def begin(self, checkpoints: Checkpoints) -> tuple[TrainState, int]:
        """The newest checkpoint's state and step, or a fresh state and 0.

        Raises ValueError if the run has come further than it is to go.
        """
        start = checkpoints.latest() or 0
        if start > self._steps:
            raise ValueError(
                f"the run in {checkpoints.folder.parent} has come to step {start} and {self._steps} are asked for; "
                "raise training.epochs or training.max_steps, or train in another --workdir"
            )
        with jax.set_mesh(self.target.mesh):
            if not start:
                return self._fresh(self.task.init(self.target, self.vocabulary[0])), 0
            abstract = jax.eval_shape(self._fresh, self._declared)
        say(f"going on from step {start} of {self._steps}")
        return checkpoints.restore(jax.tree.map(self._placed, abstract)), start

    def steps(self, state: TrainState, batches, start: int) -> Iterator[tuple[int, TrainState, Metrics, Batch]]:
        """Yield (steps done, state, metrics, batch) after each step; the next one takes the state's buffers."""
        source = packing.loader(batches, start) if start < self._steps else iter(())
        for number in range(start, self._steps):
            batch, states = next(source)
            with jax.set_mesh(self.target.mesh):
                placed = place(self.target, (batch, states), axis=1)
                state, metrics = self._update(self.target.leaves, self.vocabulary, state, *placed)
            yield number + 1, state, metrics, batch

    def _placed(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The leaf on this run's mesh; what is a scalar says no sharding."""
        split = leaf.sharding.spec if leaf.sharding else spec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(self.target.mesh, split))
