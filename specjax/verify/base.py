"""What every verifier returns, and the walk down the tree that they share."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from specjax.sampling import SamplingState
from specjax.trees import Draft


@struct.dataclass
class Verdict:
    """`path` [B, depth + 1]: the root and the accepted nodes, in order (then anything); `count` [B]: accepted
    draft tokens; `next_token` [B]: the target's own token after them."""

    path: jax.Array
    count: jax.Array
    next_token: jax.Array


class Verifier(Protocol):
    """Accepts draft tokens so that the text keeps the target's law."""

    def verify(self, draft: Draft, logits: jax.Array, sampling: SamplingState, position: jax.Array) -> Verdict:
        """Judge a draft by target logits [B, T, V]; `position` [B] is the text position after the root."""


def child(draft: Draft, node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lowest valid child of `node` [B] that carries `token` [B]: (whether there is one, its number)."""
    fits = draft.tree.valid & (draft.tree.parent == node[:, None]) & (draft.tokens == token[:, None])
    return fits.any(-1), jnp.argmax(fits, axis=-1).astype(jnp.int32)
