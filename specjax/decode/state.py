"""The state of a decode loop. Every array leads with B, so a row can be inserted, extracted or moved alone."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.cache import KVCache
from specjax.drafters.base import Drafter, Stats
from specjax.sampling import SamplingState
from specjax.sharding import unsplit_rows

RUNNING, STOP, LENGTH, CONTEXT = range(4)


@struct.dataclass
class Text:
    """The tokens of each row and when it ends.

    `tokens` [B, S + 1]: prompt and output, `count` [B] of them; `prompt` [B]: prompt length; `limit` [B]: the
    count to stop at, `limit_reason` [B]: LENGTH or CONTEXT, whichever set it; `ends` [B, E]: end tokens
    (-1: none); `finish` [B]: RUNNING, or why the row ended.
    """

    tokens: jax.Array
    count: jax.Array
    prompt: jax.Array
    limit: jax.Array
    limit_reason: jax.Array
    ends: jax.Array
    finish: jax.Array

    @property
    def running(self) -> jax.Array:
        return self.finish == RUNNING


@struct.dataclass
class DecodeState:
    """All that a cycle reads and writes; `drafter` is the drafter's own state.

    Invariant after prefill and after every cycle: the cache holds all tokens but the last one, which is the
    root of the next draft.
    """

    text: Text
    cache: KVCache
    drafter: Any
    sampling: SamplingState
    stats: Stats


def no_stats(batch: int, drafter: Drafter) -> Stats:
    """Counters at zero."""

    def zero(*shape: int) -> jax.Array:
        return jnp.zeros((batch, *shape), jnp.int32)

    at_depth = zero(drafter.depth)
    return Stats(zero(), zero(), zero(), zero(), zero(), at_depth, at_depth, zero(len(drafter.blocks)))


def insert(state: DecodeState, fresh: DecodeState, rows: jax.Array) -> DecodeState:
    """`state` with its row rows[i] replaced by row i of `fresh`; rows [n], negative: not at all."""
    here = rows == jnp.arange(state.text.count.shape[0])[:, None]
    source, replaced = jnp.argmax(here, axis=1), here.any(1)

    def pick(old, new):
        moved = unsplit_rows(new).at[source].get(out_sharding=jax.typeof(old).sharding.spec)
        replaced_all = jnp.broadcast_to(
            replaced.reshape(-1, *[1] * (old.ndim - 1)), old.shape, out_sharding=jax.typeof(old).sharding.spec
        )
        return jnp.where(replaced_all, moved, old)

    return jax.tree.map(pick, state, fresh)


def emit(text: Text, emitted: jax.Array, accepted: jax.Array) -> tuple[Text, jax.Array]:
    """Write the accepted drafts and the target's own token, emitted [B, P], behind each row's text.

    Of the accepted [B] + 1 tokens a row takes those up to its limit and up to its first end token, and none
    if it has finished. Returns the text and how many tokens each row took [B].
    """
    steps = jnp.arange(emitted.shape[1])
    taken = jnp.minimum(accepted + 1, text.limit - text.count)
    ending = (emitted[:, :, None] == text.ends[:, None, :]).any(-1) & (steps < taken[:, None])
    stops = ending.any(-1)
    taken = jnp.where(stops, jnp.argmax(ending, axis=-1) + 1, taken)
    taken = jnp.where(text.running, taken, 0)

    offset = jnp.arange(text.tokens.shape[1]) - text.count[:, None]
    fresh = jnp.take_along_axis(emitted, jnp.clip(offset, 0, emitted.shape[1] - 1), axis=1)
    tokens = jnp.where((offset >= 0) & (offset < taken[:, None]), fresh, text.tokens)
    count = text.count + taken
    ended = jnp.where(stops, STOP, jnp.where(count >= text.limit, text.limit_reason, RUNNING))
    finish = jnp.where(text.running, ended, text.finish)
    return text.replace(tokens=tokens, count=count, finish=finish), taken
