"""What every verifier returns, and the walks down the tree that they share."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from specjax.sampling import SamplingState, draw
from specjax.sharding import whole
from specjax.trees import Draft


@struct.dataclass
class Verdict:
    """`path` [B, depth + 1]: the root and the accepted nodes, in order (then anything); `count` [B]: accepted
    draft tokens; `next_token` [B]: the target's own token after them."""

    path: jax.Array
    count: jax.Array
    next_token: jax.Array


class Verifier(Protocol):
    """Decides which draft tokens the text keeps. `lossless`: whether the text keeps the target's law; `seed_for_seed`:
    whether it is, at every temperature, the text that eager decoding of the same seed writes."""

    lossless: bool
    seed_for_seed: bool

    def verify(self, draft: Draft, logits: jax.Array, sampling: SamplingState, position: jax.Array) -> Verdict:
        """Judge a draft by target logits [B, T, V]; `position` [B] is the text position after the root."""


def child(draft: Draft, node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lowest valid child of `node` [B] that carries `token` [B]: (whether there is one, its number)."""
    fits = draft.tree.valid & (draft.tree.parent == node[:, None]) & (draft.tokens == token[:, None])
    return fits.any(-1), jnp.argmax(fits, axis=-1).astype(jnp.int32)


def walk_greedily(draft: Draft, best: jax.Array, depth: int) -> Verdict:
    """Go on while a child carries its parent's most likely token, best [B, T]: unrolled, nothing vocabulary-sized."""
    node = jnp.zeros_like(best[:, 0])
    walking = node == 0
    path, count = [node], node
    for _ in range(depth):
        found, below = child(draft, node, jnp.take_along_axis(best, node[:, None], axis=1)[:, 0])
        walking &= found
        node = jnp.where(walking, below, node)
        path.append(node)
        count = count + walking
    return Verdict(jnp.stack(path, axis=1), count, jnp.take_along_axis(best, node[:, None], axis=1)[:, 0])


def draw_at(logits: jax.Array, node: jax.Array, sampling: SamplingState, position: jax.Array) -> jax.Array:
    """The target's own token [B] at `node` [B] of logits [B, T, V], for text `position` [B]."""
    return draw(whole(jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]), sampling, position)
