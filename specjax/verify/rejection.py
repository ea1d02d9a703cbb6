"""Rejection without replacement: a node's children are tried in the order in which the draft's law gave them.

p: the target's law, q: the draft's; tried are x, y, z (only z is accepted)

try   accepted if       otherwise go on with
x     u1 q(x) < p(x)    p' = norm(max(p - q, 0)),     q' = q without x, renormalised
y     u2 q'(y) < p'(y)  p'' = norm(max(p' - q', 0)),  q'' = q' without y, renormalised
z     u3 q''(z) < p''(z)

If all are refused, the residual p''' is what the target's own token is drawn from; after the deepest accepted node, p.
So every position follows p, as long as what is drafted was decided before the children that it concerns were drawn.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models.attention import MASKED
from specjax.sampling import ACCEPTING, SamplingState, greedy, gumbel, process, uniform
from specjax.sharding import whole
from specjax.trees import Draft
from specjax.verify.base import Verdict, walk_greedily


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Verifier for trees at most `depth` deep whose children were drawn from `Draft.law`, all of them.

    With one child for each node it is speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al.,
    2302.01318), with several the rule of Sequoia (2402.12374) and EAGLE-1. The text keeps the target's processed law,
    but it is not the text that eager decoding of the same seed writes. At temperature 0 it is the greedy rule.
    """

    depth: int
    lossless = True
    seed_for_seed = False

    def verify(self, draft: Draft, logits: jax.Array, sampling: SamplingState, position: jax.Array) -> Verdict:
        """logits [B, T, V], position [B] of the token after the root -> Verdict. Raises ValueError without a law."""
        if draft.law is None:
            raise ValueError(
                "rejection has to know the law that draft tokens were drawn from, and this drafter does not tell one; "
                "draft by eagle:rejection, or verify target-first"
            )
        return lax.cond(
            (sampling.temperature > 0).any(),
            lambda: self._walk(draft, logits, sampling, position),
            lambda: walk_greedily(draft, greedy(logits), self.depth),
        )

    def _walk(self, draft: Draft, logits, sampling: SamplingState, position) -> Verdict:
        """Walk while any row goes on; the target's own token is drawn once, at the end."""
        rows = jnp.zeros_like(draft.tokens[:, 0])

        def go_on(carry):
            step, walking = carry[:2]
            return (step <= self.depth) & walking.any()

        def descend(carry):
            step, walking, node, path, count, residual = carry
            p = _target_law(logits, node, sampling)
            children, number = _children(draft, node)
            tokens = jnp.take_along_axis(draft.tokens, children, axis=1)
            noise = uniform(sampling.key, position + step, tokens.shape[1], ACCEPTING)
            accepted, rest = try_in_order(p, _draft_weights(draft, node, sampling, p.shape[1]), tokens, number, noise)
            residual = jnp.where(walking[:, None], rest, residual)
            walking &= accepted < number
            node = jnp.where(walking, jnp.take_along_axis(children, accepted[:, None], axis=1)[:, 0], node)
            path = jnp.where(jnp.arange(self.depth + 1) > step, node[:, None], path)
            return step + 1, walking, node, path, count + walking, residual

        path = jnp.zeros((*rows.shape, self.depth + 1), jnp.int32)
        residual = jnp.zeros((*rows.shape, logits.shape[-1]), jnp.float32)
        start = (jnp.int32(0), rows == 0, rows, path, rows, residual)
        _, _, _, path, count, residual = lax.while_loop(go_on, descend, start)
        noise = gumbel(sampling.key, position + count, jnp.arange(residual.shape[1]))
        return Verdict(path, count, greedy(jnp.log(residual) + noise))


def try_in_order(
    p: jax.Array, weights: jax.Array, tokens: jax.Array, number: jax.Array, noise: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One node's children against the target's law p [B, V] -> (which is accepted [B], else the token's law [B, V]).

    weights [B, V]: the log-weights that the first `number` [B] of tokens [B, K] were drawn from without replacement, in
    that order (MASKED: never drawn); noise [B, K]: uniform, one number a try. Where all are refused `number` comes
    back. Vocabulary-sized work is done only while some row has a child to try.
    """

    def go_on(carry):
        trial, accepted = carry[:2]
        return ((accepted == number) & (trial < number)).any()

    def attempt(carry):
        trial, accepted, p, weights = carry
        token, threshold = (lax.dynamic_slice_in_dim(x, trial, 1, axis=1) for x in (tokens, noise))
        q = jnp.where(weights > MASKED, jax.nn.softmax(weights, axis=-1), 0)
        guessed, share = (jnp.take_along_axis(law, token, axis=1) for law in (q, p))
        passes = (threshold * guessed < share) & (guessed > 0)
        trying = ((accepted == number) & (trial < number))[:, None]
        rest = jnp.maximum(p - q, 0)
        mass = rest.sum(-1, keepdims=True)
        # Where p and q are equal up to rounding nothing is left, and p itself is as good a residual as any.
        p = jnp.where(trying & ~passes & (mass > 0), rest / mass, p)
        weights = jnp.where(jnp.arange(weights.shape[1]) == token, MASKED, weights)
        return trial + 1, jnp.where((trying & passes)[:, 0], trial, accepted), p, weights

    _, accepted, p, _ = lax.while_loop(go_on, attempt, (jnp.int32(0), number, p, weights))
    return accepted, p


def _target_law(logits: jax.Array, node: jax.Array, sampling: SamplingState) -> jax.Array:
    """What the target's token after `node` [B] follows [B, V]; all of it on the most likely token at temperature 0."""
    here = whole(jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0])
    law = jax.nn.softmax(process(here, sampling), axis=-1)
    likeliest = jax.nn.one_hot(greedy(here), here.shape[1], dtype=law.dtype)
    return jnp.where((sampling.temperature > 0)[:, None], law, likeliest)


def _draft_weights(draft: Draft, node: jax.Array, sampling: SamplingState, vocab: int) -> jax.Array:
    """The log-weights [B, V] over the target's tokens that the children of `node` [B] were drawn from."""
    law = draft.law
    of = jnp.take_along_axis(law.of, node[:, None], axis=1)
    here = whole(jnp.take_along_axis(law.logits, of[..., None], axis=1)[:, 0])
    weights = jnp.where((sampling.temperature > 0)[:, None], process(here, sampling), here)
    if law.token_ids is None:
        return weights
    known = len(law.token_ids)
    return jnp.full((len(node), vocab), MASKED).at[:, law.token_ids].set(weights[:, :known], unique_indices=True)


def _children(draft: Draft, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of the valid children of `node` [B], lowest first, before all others [B, T], and how many [B]."""
    below = draft.tree.valid & (draft.tree.parent == node[:, None])
    return jnp.argsort(~below, axis=1, stable=True), below.sum(-1, dtype=jnp.int32)
