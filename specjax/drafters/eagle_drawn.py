"""EAGLE whose guesses are drawn: a tree of fixed shape, its tokens from the layer's law. For verification by rejection.

text      ... s  t | u        u: last accepted token, the root
level 1   children of u       as many as the shape says, drawn without replacement from the law after u
level 2   children of those   that the shape goes on with, in one pass that sees its ancestors: the earlier a node was
 ...                          drawn among its siblings, the more it gets

All that is drawn is verified: to leave out a child because of what it is would change the text's law.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from specjax import trees
from specjax.drafters import eagle
from specjax.drafters.base import FixedTree
from specjax.drafters.eagle import Eagle
from specjax.loading.eagle import EagleDraft
from specjax.models.attention import Earlier
from specjax.sampling import SamplingState, draw_distinct
from specjax.sharding import rowwise
from specjax.trees import Draft, Law

# How often the child drawn first is accepted, and a further one if it is tried: what the tree's shape is chosen by.
FIRST, FURTHER = 1 / 2, 1 / 3


@struct.dataclass
class DrawnEagle(FixedTree):
    """An EAGLE layer over a fixed tree, `parents` and `ranks` [T] (see `trees.layout`), its nodes level by level.

    At temperature 0 a node's children are the most likely tokens, the most likely first. `eagle`: the layer; the sizes
    of the trees that it grows itself do not matter.
    """

    eagle: Eagle
    parents: tuple[int, ...] = struct.field(pytree_node=False)
    ranks: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.eagle.taps

    def init(self, batch, slots):
        return self.eagle.init(batch, slots)

    def grow(self, state, slots):
        return self.eagle.grow(state, slots)

    def cut(self, state, length):
        return self.eagle.cut(state, length)

    def extend(self, state, tokens, features, count, after):
        return self.eagle.extend(state, tokens, features, count, after)

    def draft(self, state, tokens, count, sampling, running, stats):
        layer = nnx.merge(self.eagle.graph, self.eagle.layer)
        lm_head = layer.lm_head[...] if self.eagle.lm_head is None else self.eagle.lm_head
        parents = np.array(self.parents)
        sees, depth, inner = trees.ancestors(parents), trees.depths(parents), np.unique(parents[1:])
        (nodes, valid), output, earlier, laws = rowwise(_root)(tokens, count), state.output[:, None], None, []
        for level in range(self.depth):
            here = inner[depth[inner] == level]  # the nodes whose children are drawn next
            if level > 0:
                above = np.searchsorted(inner[depth[inner] == level - 1], parents[here])
                inputs, hidden = rowwise(partial(_pairs, here, above))(nodes, layer.fed_back(output))
                positions = state.cache.length[:, None] + (level - 1) + jnp.zeros_like(inputs)
                passed = inner[(depth[inner] > 0) & (depth[inner] <= level)]
                mask = jnp.array(sees[np.ix_(here, passed)])[None]
                output, k, v = self.eagle._pass(layer, state.cache, inputs, hidden, positions, mask, earlier)
                earlier = Earlier(k, v, positions) if earlier is None else earlier.then(k, v, positions)
            laws.append(layer.logits(output, lm_head, self.eagle.vocab_size))
            below = np.flatnonzero(depth == level + 1)
            add = rowwise(partial(self._with_children, here, below))
            nodes, valid = add(nodes, valid, laws[-1], self.eagle.token_ids, sampling, count + level)
        tree, of = rowwise(partial(self._tree, inner))(valid)
        law = Law(jnp.concatenate(laws, axis=1), of, self.eagle.token_ids)
        size, levels = (jnp.full_like(count, number) for number in (len(self.parents), self.depth))
        return Draft(tree, nodes, size, levels, law)

    def _with_children(self, here, below, nodes, valid, logits, token_ids, sampling: SamplingState, position):
        """nodes, valid [B, U] and the nodes `below`, drawn by logits [B, len(here), V'] as children of those `here`."""
        above, rank = np.array(self.parents)[below], np.array(self.ranks)[below]
        places, possible = draw_distinct(logits, sampling, position, int(rank.max()) + 1)
        which = np.searchsorted(here, above)
        drawn = places[:, which, rank]
        drawn = drawn if token_ids is None else token_ids[drawn]
        possible = possible[:, which, rank] & valid[:, above]
        return jnp.concatenate([nodes, drawn], axis=1), jnp.concatenate([valid, possible], axis=1)

    def _tree(self, inner, valid):
        """The tree, and for each node which of the laws its children were drawn from."""
        of = np.minimum(np.searchsorted(inner, np.arange(len(self.parents))), len(inner) - 1)
        return trees.static(np.array(self.parents), valid), jnp.broadcast_to(of, valid.shape)


def _root(tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)
    return last, jnp.ones_like(last, bool)


def _pairs(here: np.ndarray, above: np.ndarray, nodes: jax.Array, fed_back: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The layer's inputs at the nodes `here`: their tokens, and what the pass `above` fed back."""
    return nodes[:, here], fed_back[:, above]


def from_draft(draft: EagleDraft, target, *, nodes: int, depth: int, width: int) -> DrawnEagle:
    """A trained draft over the best tree of that size, no node with more than `width` children; the rest as
    `eagle.from_draft`."""
    layer = eagle.from_draft(draft, target, nodes=nodes, depth=depth, width=width)
    refused = (1 - FIRST) * (1 - FURTHER) ** np.arange(width - 1)
    shape = trees.likeliest([FIRST, *(refused * FURTHER).tolist()], nodes, depth)
    return DrawnEagle(layer, *trees.layout(shape))
