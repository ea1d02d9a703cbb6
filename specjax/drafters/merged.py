"""Lookup merged into a learned drafter's tree; where the text copies itself at length, nothing is drafted.

learned, best first      copied           both in 8 nodes
       0                   0                     0
     / | \\                 |                   / | \\
    1  2  5                a (as 2)           1  2  5      the beginning of the learned tree that leaves room,
    |  |  |                |                  |  |         here 6 nodes; of them 2 and 4 are copied tokens, too;
    3  4  6                b (as 4)           3  4         behind them what they lack of the chain, c and d
       |                   |                     |
       7                   c - d                 6 - 7
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specjax import trees
from specjax.drafters.base import Drafter
from specjax.drafters.lookup import Lookup
from specjax.sharding import rowwise
from specjax.trees import Draft

LONGEST = 8  # tokens of a match that is copied as far as a block goes
BLOCK = 16  # nodes, root included, of that block where the learned tree has fewer


@struct.dataclass
class Merged:
    """`learned` with the chain that `lookup` copies in its tree, which does not grow by that.

    A match of n tokens is trusted for 2n copied ones (in proportion, like SuffixDecoding, arXiv 2411.04975), one of
    `lookup.longest` for all that lookup has (figures: WORKSPACE.md, Choices). Where these fill the tree of every
    running row, the learned drafter is not asked. Copied nodes displace drafted ones, which target-first verification
    allows, and temperature 0. No two children of a learned node may carry the same token; the best nodes go first.
    """

    learned: Drafter
    lookup: Lookup

    @property
    def nodes(self) -> int:
        """Of the learned drafter's tree, root included."""
        return self.learned.blocks[-1]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.learned.blocks, 1 + self.lookup.depth}))

    @property
    def depth(self) -> int:
        return max(self.learned.depth, self.lookup.depth)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.learned.taps

    def init(self, batch, slots):
        return self.learned.init(batch, slots)

    def draft(self, state, tokens, count, sampling, running, stats):
        copied = rowwise(self._trusted)(*self.lookup.copied(tokens, count))
        # The learned drafter knows of its own blocks alone.
        own = stats.replace(passes=stats.passes[:, np.array([self.blocks.index(size) for size in self.learned.blocks])])

        def merged():
            learned = self.learned.draft(state, tokens, count, sampling, running, own)
            return rowwise(self._merged)(learned, copied)

        return lax.cond(((copied.size >= self.nodes) | ~running).all(), lambda: copied, merged)

    def extend(self, state, tokens, features, count, after):
        return self.learned.extend(state, tokens, features, count, after)

    def grow(self, state, slots):
        return self.learned.grow(state, slots)

    def cut(self, state, length):
        return self.learned.cut(state, length)

    def _trusted(self, copied: Draft, matched: jax.Array) -> Draft:
        """The beginning of the copied chain that a match of `matched` [B] tokens is trusted for."""
        slots = copied.tokens.shape[1]
        trust = jnp.where(matched < self.lookup.longest, jnp.minimum(2 * matched, self.nodes - 1), slots - 1)
        valid = copied.tree.valid & (jnp.arange(slots) <= trust[:, None])
        tree, size = trees.static(trees.branches(slots - 1), valid), valid.sum(-1)
        return Draft(tree, copied.tokens, size, jnp.zeros_like(size))

    def _merged(self, learned: Draft, copied: Draft) -> Draft:
        """The longest beginning of the learned tree that leaves room for the copied chain, and what it lacks of that.

        There is room for as many nodes as the smallest block has that holds either of them alone.
        """
        tree, slots = learned.tree, copied.tokens.shape[1]
        length = jnp.minimum(copied.size, self.nodes) - 1
        blocks = jnp.array(self.learned.blocks)
        room = blocks[(blocks < jnp.maximum(learned.size, 1 + length)[:, None]).sum(-1)]

        alike = learned.tokens == jnp.take_along_axis(copied.tokens, tree.depth, axis=1)
        alike &= tree.valid & (tree.depth <= length[:, None])
        shared = (alike[:, None] | ~tree.mask).all(-1)  # so that all on the path to the node is copied, too
        kept = (jnp.cumsum(~shared, axis=1) < (room - length)[:, None]).sum(-1)
        kept = jnp.minimum(kept, learned.size)

        within = jnp.arange(slots) < kept[:, None]
        depth = jnp.where(shared & within[:, : self.nodes], tree.depth, -1)
        rest = length - depth.max(-1)
        tree = trees.with_chain(tree, kept, jnp.argmax(depth, axis=-1), rest, slots)
        known = jnp.pad(learned.tokens, ((0, 0), (0, slots - self.nodes)))
        fresh = jnp.take_along_axis(copied.tokens, jnp.minimum(tree.depth, slots - 1), axis=1)
        levels = jnp.zeros_like(kept) if learned.levels is None else learned.levels
        return Draft(tree, jnp.where(within, known, fresh), kept + rest, levels)


def with_lookup(learned: Drafter) -> Merged:
    """A learned drafter with lookup merged in."""
    return Merged(learned, Lookup(branches=(max(learned.blocks[-1], BLOCK) - 1,), longest=LONGEST))
