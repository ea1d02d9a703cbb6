"""Typical acceptance: keep every draft token that the target finds likely enough, measured by its own certainty.

Not lossless: the text no longer follows the target's law, it only stays among what the target might have said.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.sampling import SamplingState, greedy, process
from specjax.sharding import whole
from specjax.trees import Draft, Tree
from specjax.verify.base import Verdict, child, draw_at, walk_greedily


@dataclasses.dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance (arXiv 2401.10774) for trees at most `depth` deep.

    A child x of an accepted node is accepted if p(x) > min(epsilon, delta * exp(-H(p))), where p is the law that the
    target samples from there and H its entropy in nats. The longest accepted path is kept, of equally long ones the
    likeliest. At temperature 0 it is the greedy rule.
    """

    depth: int
    epsilon: float = 0.09
    delta: float = 0.3
    lossless = False
    seed_for_seed = False

    def verify(self, draft: Draft, logits: jax.Array, sampling: SamplingState, position: jax.Array) -> Verdict:
        """logits [B, T, V], position [B] of the token after the root -> Verdict."""
        return lax.cond(
            (sampling.temperature > 0).any(),
            lambda: self._likeliest_path(draft, logits, sampling, position),
            lambda: walk_greedily(draft, greedy(logits), self.depth),
        )

    def _likeliest_path(self, draft: Draft, logits, sampling: SamplingState, position) -> Verdict:
        accepted, likelihood = self._judge_nodes(draft, logits, sampling)
        reached = jnp.where(accepted, draft.tree.depth, -1)
        count = reached.max(-1)
        last = jnp.argmax(jnp.where(reached == count[:, None], likelihood, -jnp.inf), axis=-1)
        above = jnp.take_along_axis(draft.tree.mask, last[:, None, None], axis=1)
        at_step = draft.tree.depth[:, None] == jnp.arange(self.depth + 1)[:, None]
        path = jnp.argmax(above & at_step, axis=-1).astype(jnp.int32)
        return Verdict(path, count, draw_at(logits, last, sampling, position + count))

    def _judge_nodes(self, draft: Draft, logits, sampling: SamplingState) -> tuple[jax.Array, jax.Array]:
        """Which nodes are accepted, and the log-likelihood of the path to each [B, T].

        Parents come first; a node that no row has accepted, or that has no children, costs nothing vocabulary-sized.
        """
        tree = draft.tree

        def judge(node, verdicts):
            accepted, likelihood = verdicts
            here = whole(lax.dynamic_index_in_dim(logits, node, axis=1, keepdims=False))
            law = jax.nn.log_softmax(process(here, sampling), axis=-1)
            entropy = -(jnp.exp(law) * law).sum(-1)
            bound = jnp.log(jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy)))
            share = jnp.take_along_axis(law, draft.tokens, axis=1)
            found, below = child(draft, jnp.full_like(draft.tokens[:, 0], node), greedy(here))
            likeliest = found[:, None] & (jnp.arange(tree.valid.shape[1]) == below[:, None])
            kept = jnp.where(sampling.temperature[:, None] > 0, share > bound[:, None], likeliest)
            kept &= _below(tree, node) & lax.dynamic_slice_in_dim(accepted, node, 1, axis=1)
            parent = lax.dynamic_slice_in_dim(likelihood, node, 1, axis=1)
            return accepted | kept, jnp.where(kept, parent + share, likelihood)

        def visit(node, verdicts):
            reached = lax.dynamic_slice_in_dim(verdicts[0], node, 1, axis=1) & _below(tree, node)
            return lax.cond(reached.any(), judge, lambda _, verdicts: verdicts, node, verdicts)

        root = jnp.zeros_like(tree.depth, bool).at[:, 0].set(True)
        return lax.fori_loop(0, tree.valid.shape[1], visit, (root, jnp.zeros(root.shape, jnp.float32)))


def _below(tree: Tree, node: jax.Array) -> jax.Array:
    """Which nodes [B, T] are children of the node of this number."""
    return tree.valid & (tree.parent == node)
