"""One optimiser step for any task: frozen target -> its states -> loss and gradient -> update; state donated."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax import lax

from specjax import cache
from specjax.decode.target import Target
from specjax.models.transformer import Transformer
from specjax.sharding import spec
from train_drafts.packing import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW on float32 masters: `learning_rate` after a warm-up over that share of the steps, then a cosine down to
    `final` of it; gradients are clipped to a global norm of `clip`."""

    learning_rate: float = 1e-3
    warmup: float = 0.05
    final: float = 0.05
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0

    def __post_init__(self):
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0")
        for name in ("warmup", "final", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a share, from 0 to 1")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay is {self.weight_decay}; give 0 or more")

    def schedule(self, steps: int) -> optax.Schedule:
        """Updates made so far -> the learning rate of the next one; never 0 during the warm-up, not even at first."""
        warm = max(1, round(self.warmup * steps))
        whole = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, warm, max(steps, warm + 1), self.final * self.learning_rate
        )
        return lambda made: whole(made + 1)

    def build(self, steps: int) -> optax.GradientTransformation:
        adam = optax.adamw(self.schedule(steps), self.beta1, self.beta2, weight_decay=self.weight_decay)
        return optax.chain(optax.clip_by_global_norm(self.clip), adam)


@struct.dataclass
class TrainState:
    """All that a step changes: `step` counts updates asked for; `params` and the optimiser's moments are float32."""

    step: jax.Array
    params: nnx.State
    moments: optax.OptState


@struct.dataclass
class Metrics:
    """Of one step: per-guess `loss` (mean) and `accuracy` [guesses], total `objective`, `grad_norm`, and `tokens`: the
    places that teach the first guess."""

    loss: jax.Array
    accuracy: jax.Array
    objective: jax.Array
    grad_norm: jax.Array
    tokens: jax.Array


def place(target: Target, arrays, axis: int):
    """Put host arrays on the mesh, split by their rows, which dimension `axis` counts; empty rows fill up what the mesh
    does not divide."""
    devices = target.mesh.shape["data"]

    def put(x):
        surplus = [(0, -size % devices if dimension == axis else 0) for dimension, size in enumerate(x.shape)]
        axes = ["batch" if dimension == axis else None for dimension in range(x.ndim)]
        return jax.device_put(np.pad(x, surplus), jax.NamedSharding(target.mesh, spec(*axes)))

    return jax.tree.map(put, arrays)


def target_states(model: Transformer, batch: Batch, taps: tuple[int, ...]) -> jax.Array:
    """The states `taps` (see `TargetOutput`) of packed rows [R, T] -> [R, T, taps, D]."""
    rows, tokens = batch.tokens.shape
    nothing = cache.empty(model.config, rows, 1, model.norm[...].dtype)
    same = batch.segment[:, :, None] == batch.segment[:, None, :]
    sees = same & jnp.tril(jnp.ones((tokens, tokens), bool))
    first = jnp.zeros_like(batch.tokens[:, :1])
    return jnp.stack(model(batch.tokens, batch.position, nothing, sees, at=first, taps=taps).features, axis=2)


def packed_pass(target: Target, taps: tuple[int, ...]) -> Callable[[Batch], jax.Array]:
    """`target_states` of one packed batch of host arrays [R, T], compiled once for each shape."""
    program = jax.jit(lambda leaves, batch: target_states(target.module(leaves), batch, taps))

    def run(batch: Batch) -> jax.Array:
        with jax.set_mesh(target.mesh):
            return program(target.leaves, place(target, batch, axis=0))

    return run


def in_dtype(graph: nnx.GraphDef, params: nnx.State, dtype):
    """The module around float32 masters, in the type that it runs in."""
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), params))


def make_step(task, target: Target, graph: nnx.GraphDef, optimizer: optax.GradientTransformation):
    """The jitted step: (target's leaves, vocabulary, state, batch [A, R, T], states) -> (state, Metrics).

    `vocabulary`: (token_ids, draft id of each target id) or (None, None). `states` [A, R, T, taps, D]: the target's
    states that the task takes, or None to compute them here. Gradients of the A parts are added before the one update,
    each guess's loss being the mean over all of its places: A parts give what one batch as large gives. A step in
    which nothing is taught, or whose gradient is not finite, changes no parameter.
    """

    taps = task.taps(target.config)

    def step(leaves, vocabulary, state: TrainState, batch: Batch, states):
        model = target.module(leaves)
        token_ids, draft_ids = vocabulary
        labels, taught = task.labels(batch, draft_ids)
        known = (taught & (labels >= 0)).sum((0, 1, 2))
        share = jnp.asarray(task.coefficients()) / jnp.maximum(known, 1)

        key = jax.random.fold_in(jax.random.key(0), state.step)

        def part(carry, piece):
            batch, states, labels, taught = piece
            states = target_states(model, batch, taps) if states is None else states.astype(target.dtype)

            def objective(params):
                draft = in_dtype(graph, params, target.dtype)
                given = (batch, lax.stop_gradient(states), labels, taught)
                sums, right = task.loss_sums(draft, model, token_ids, *given, key)
                return (share * sums).sum(), (sums, right)

            (total, sums), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
            return jax.tree.map(jnp.add, carry, (total, sums, gradient)), None

        zero = jnp.zeros(len(task.coefficients()))
        nothing = (jnp.float32(0), (zero, zero), jax.tree.map(jnp.zeros_like, state.params))
        (total, (sums, right), gradient), _ = lax.scan(part, nothing, (batch, states, labels, taught))
        norm = optax.tree.norm(gradient)
        updated = jnp.isfinite(norm) & (known.sum() > 0)
        updates, moments = optimizer.update(gradient, state.moments, state.params)
        after = (optax.apply_updates(state.params, updates), moments)
        before = (state.params, state.moments)
        params, moments = jax.tree.map(lambda new, old: jnp.where(updated, new, old), after, before)
        places = taught.sum((0, 1, 2))
        metrics = Metrics(
            loss=sums / jnp.maximum(known, 1),
            accuracy=right / jnp.maximum(places, 1),
            objective=total,
            grad_norm=norm,
            tokens=places[0],
        )
        return TrainState(state.step + 1, params, moments), metrics

    return jax.jit(step, donate_argnums=2)
