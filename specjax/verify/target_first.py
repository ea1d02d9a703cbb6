"""Target-first verification: the target draws its own token at a node; the walk goes on while a child carries it.

The draw does not look at the draft, so the text is exactly what eager decoding of the same seed writes, for any
tree chosen in any way (called naive sampling elsewhere). At temperature 0 it is the greedy rule.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.sampling import SamplingState, greedy
from specjax.trees import Draft
from specjax.verify.base import Verdict, child, draw_at, walk_greedily


@dataclasses.dataclass(frozen=True)
class TargetFirst:
    """Verifier for trees at most `depth` deep."""

    depth: int
    lossless = True
    seed_for_seed = True

    def verify(self, draft: Draft, logits: jax.Array, sampling: SamplingState, position: jax.Array) -> Verdict:
        """logits [B, T, V], position [B] of the token after the root -> Verdict."""
        return lax.cond(
            (sampling.temperature > 0).any(),
            lambda: self._walk(draft, lambda node, step: draw_at(logits, node, sampling, position + step)),
            lambda: walk_greedily(draft, greedy(logits), self.depth),
        )

    def _walk(self, draft: Draft, token_at) -> Verdict:
        """Walk while any row goes on, drawing only at visited nodes: vocabulary-sized work is dear."""
        rows = jnp.zeros_like(draft.tokens[:, 0])

        def go_on(carry):
            step, walking = carry[:2]
            return (step <= self.depth) & walking.any()

        def descend(carry):
            step, walking, node, path, count, token = carry
            token = jnp.where(walking, token_at(node, step), token)
            found, below = child(draft, node, token)
            walking &= found & (step < self.depth)
            node = jnp.where(walking, below, node)
            path = jnp.where(jnp.arange(self.depth + 1) > step, node[:, None], path)
            return step + 1, walking, node, path, count + walking, token

        path = jnp.zeros((*rows.shape, self.depth + 1), jnp.int32)
        start = (jnp.int32(0), rows == 0, rows, path, rows, rows)
        _, _, _, path, count, token = lax.while_loop(go_on, descend, start)
        return Verdict(path, count, token)
