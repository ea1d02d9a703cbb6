"""Whether more drafting pays: tokens that it is expected to add against what its time is worth, by a cost table.

level 1 -> more expected than the next level costs? -> level 2 -> ... -> no -> the block worth most -> target pass

Costs are the table's, never a clock's, so that runs repeat.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.costs import CostTable
from specjax.drafters.base import Stats
from specjax.sharding import rowwise

FAR = 2**20  # a batch or context past any other: between it and the last one measured, costs go on as the table's do
BEGUN = 8  # tokens that a row counts as written eagerly, so that its first cycles do not decide alone


@struct.dataclass
class Prices:
    """Milliseconds at `batches` [b] and `contexts` [c]: `level_ms` [b, c] of one more draft level, `block_ms` [b, c, n]
    of a target pass over each of `blocks` [n], ascending from 1. As arrays: another table compiles nothing anew.
    """

    level_ms: jax.Array
    block_ms: jax.Array
    blocks: tuple[int, ...] = struct.field(pytree_node=False)
    batches: tuple[int, ...] = struct.field(pytree_node=False)
    contexts: tuple[int, ...] = struct.field(pytree_node=False)

    def terms(self, batch: int, context: int, running: jax.Array, stats: Stats) -> "Terms":
        """What drafting costs the running [B] rows of a batch in this cycle, whose cache has `context` slots.

        A millisecond is worth what the batch writes in one: for each running row the tokens that it has written over
        what its levels and passes cost, no less than eager decoding. Were the worth known exactly, the most tokens -
        worth x ms in every cycle would make the most tokens per ms of all (Dinkelbach 1967); estimates from below,
        such as eager's, with which it begins, only rise towards it.
        """
        shares = _shares(batch, self.batches)[:, None] * _shares(context, self.contexts)
        level_ms = (shares * self.level_ms).sum()
        block_ms = (shares[..., None] * self.block_ms).sum((0, 1))
        spent = stats.levels * level_ms + (stats.passes * block_ms).sum(-1)
        written = (BEGUN + stats.emitted) / (BEGUN * block_ms[0] + spent)
        worth = jnp.where(running, jnp.maximum(written, 1 / block_ms[0]), 0.0).sum()
        return Terms(worth * level_ms, worth * block_ms, running, self.blocks)


@struct.dataclass
class Terms:
    """The tokens that a `level` and each of the `blocks` [n], of `sizes` [n], have to bring to be worth their time.

    There is one decision for the whole batch, since a pass is as wide, and a level as dear, for one row as for all:
    what is expected of the running rows is added up, and rows that have finished bring nothing.
    """

    level: jax.Array
    block: jax.Array
    running: jax.Array
    sizes: tuple[int, ...] = struct.field(pytree_node=False)

    def go_on(self, scores: jax.Array, foreseen: jax.Array) -> jax.Array:
        """Whether to draft another level: scores [B, C] of the guesses so far, foreseen [B, F] of those that it would
        add, as cumulative log-probabilities. A larger block that it would take is paid for as well."""
        with_them = jnp.concatenate([scores, foreseen], axis=1)
        return self._gains(with_them).max() - self._gains(scores).max() > self.level

    def best_block(self, scores: jax.Array) -> jax.Array:
        """How many nodes, root included, of the tree of these guesses [B, C] are worth a target pass: a scalar."""
        return jnp.array(self.sizes)[jnp.argmax(self._gains(scores))]

    def _gains(self, scores: jax.Array) -> jax.Array:
        """What each block [n] brings beyond its cost: the draft tokens expected of the best tree that fits it."""

        def expected(scores):
            best = jnp.exp(jax.lax.top_k(scores, self.sizes[-1] - 1)[0])
            sums = jnp.cumsum(jnp.pad(best, ((0, 0), (1, 0))), axis=1)
            return sums[:, np.array(self.sizes) - 1]

        return jnp.where(self.running[:, None], rowwise(expected)(scores), 0.0).sum(0) - self.block


def from_table(costs: CostTable, draft: str, levels: int, blocks: tuple[int, ...]) -> Prices:
    """The prices of a table, as arrays on the host; `draft`: the method whose drafts, of so many levels, it has."""
    batches, contexts = (*costs.batches, FAR), (*costs.contexts, FAR)
    level_ms = [[costs.draft_ms(draft, batch, context) / levels for context in contexts] for batch in batches]
    block_ms = [[[costs.target_ms(size, b, c) for size in blocks] for c in contexts] for b in batches]
    return Prices(np.array(level_ms, np.float32), np.array(block_ms, np.float32), blocks, batches, contexts)


def _shares(x: int, known: tuple[int, ...]) -> np.ndarray:
    """What part each of the known points has in a linear interpolation at x."""
    return np.array([np.interp(x, known, point) for point in np.eye(len(known))], np.float32)
