"""Prompt lookup: copy what followed the last few tokens the last time they stood in the text.

text   ... the cat sat on ... the cat | sat on        best match: longest, then latest; its continuation is the
               ^^^^^^^        ^^^^^^^                first branch; a further branch is the best match that goes
               match          suffix                 on with another token
"""

import jax
import jax.numpy as jnp
from flax import struct

from specjax import trees
from specjax.sharding import rowwise
from specjax.trees import Draft


@struct.dataclass
class Lookup:
    """n-gram lookup over prompt and output (Saxena 2023, prompt lookup decoding), several matches as a tree.

    `branches`: tokens copied from each match; a single entry makes a chain, the default because no tree of several
    matches kept more tokens per cycle at 8 nodes, or noticeably more at 16 (WORKSPACE.md, Choices). `longest` and
    `shortest`: the n-grams that count as a match. A cycle in which no row has a match runs a one-token pass.
    """

    branches: tuple[int, ...] = struct.field(pytree_node=False, default=(7,))
    longest: int = struct.field(pytree_node=False, default=4)
    shortest: int = struct.field(pytree_node=False, default=2)

    @property
    def blocks(self) -> tuple[int, ...]:
        return 1, 1 + sum(self.branches)

    @property
    def depth(self) -> int:
        return max(self.branches)

    taps = ()

    def init(self, batch, slots):
        return ()

    def draft(self, state, tokens, count, sampling, running, stats):
        return self.copied(tokens, count)[0]

    def copied(self, tokens: jax.Array, count: jax.Array) -> tuple[Draft, jax.Array]:
        """The draft, and how many tokens the best match of each row has [B], `longest` at most (0: no match)."""
        return rowwise(self._copied)(tokens, count)

    def extend(self, state, tokens, features, count, after):
        return state

    def grow(self, state, slots):
        return state

    def cut(self, state, length):
        return state

    def _copied(self, tokens: jax.Array, count: jax.Array) -> tuple[Draft, jax.Array]:
        """What followed the best matches in tokens [B, S], of which the first count [B] are the text so far."""
        last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)
        score, following = self._matches(tokens, count)
        matched = score.max(-1) // tokens.shape[1]
        proposed, known = [last], [last >= 0]
        for length in self.branches:
            best = jnp.argmax(score, axis=-1)[:, None]
            found = jnp.take_along_axis(score, best, axis=1) > 0
            spots = best + 1 + jnp.arange(length)
            proposed.append(jnp.take_along_axis(tokens, jnp.minimum(spots, tokens.shape[1] - 1), axis=1))
            known.append(found & (spots < count[:, None]))
            score = jnp.where(following == jnp.take_along_axis(following, best, axis=1), 0, score)
        tree = trees.static(trees.branches(*self.branches), jnp.concatenate(known, axis=1))
        size = jnp.where(tree.valid[:, 1:].any(-1), self.blocks[-1], 1)
        return Draft(tree, jnp.concatenate(proposed, axis=1), size), matched

    def _matches(self, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Score every text position as the end of a match [B, S] (0: none) and say which token follows it [B, S].

        Longer matches score higher, of equal ones the latest.
        """
        slots = jnp.arange(tokens.shape[1])
        same, matched = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.longest):
            suffix = jnp.take_along_axis(tokens, jnp.maximum(count[:, None] - 1 - back, 0), axis=1)
            same &= (jnp.roll(tokens, back, axis=1) == suffix) & (slots >= back)
            matched += same
        ends_early = slots < count[:, None] - 1
        score = jnp.where(ends_early & (matched >= self.shortest), matched * tokens.shape[1] + slots, 0)
        return score, jnp.roll(tokens, -1, axis=1)
