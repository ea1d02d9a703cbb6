"""Medusa: all nodes of a fixed tree at once, each from the head of its depth, none knowing what stands above it.

text  ... s t | u     t: last cached token, whose feature is kept; u: last accepted token, the tree's root
                      head 0 guesses what follows u (depth 1), head 1 what follows that (depth 2), ...
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax import lax

from specjax import trees
from specjax.drafters.base import FixedTree, last_of
from specjax.loading.drafts import MedusaDraft
from specjax.models.layers import rms_norm
from specjax.models.medusa import MedusaHeads
from specjax.sharding import padded, row_spec, rowwise
from specjax.trees import Draft, Path


@struct.dataclass
class Medusa(FixedTree):
    """Medusa heads (Cai et al. 2024, arXiv 2401.10774) over a fixed tree.

    `heads`: their parameters, no more heads than the tree is deep; `norm` [D]: the target's final norm; `lm_head`
    [V', D]: the target's own, or the draft's over `vocab_size` tokens, whose target ids are then `token_ids`
    [vocab_size]. `parents`, `ranks` [T]: the tree (see `trees.layout`); `tap`: the target's layer count.
    """

    heads: nnx.State
    norm: jax.Array
    lm_head: jax.Array
    token_ids: jax.Array | None
    graph: nnx.GraphDef = struct.field(pytree_node=False)
    parents: tuple[int, ...] = struct.field(pytree_node=False)
    ranks: tuple[int, ...] = struct.field(pytree_node=False)
    vocab_size: int = struct.field(pytree_node=False)
    eps: float = struct.field(pytree_node=False)
    tap: int = struct.field(pytree_node=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def init(self, batch, slots):
        """The target's last hidden state, before its final norm, of each row's last cached token [B, D]."""
        return jnp.zeros((batch, *self.norm.shape), self.norm.dtype, out_sharding=row_spec(2))

    def draft(self, state, tokens, count, sampling, running, stats):
        heads = nnx.merge(self.graph, self.heads)
        hidden = heads(rms_norm(state, self.norm, self.eps)[:, None])
        logits = heads.logits(hidden, self.lm_head, self.vocab_size)[:, 0]
        return rowwise(self._picked)(logits, self.token_ids, tokens, count)

    def extend(self, state, tokens, features, count, after):
        return rowwise(last_of)(state, features[0], count)

    def grow(self, state, slots):
        return state

    def cut(self, state, length):
        return state

    def _picked(self, logits: jax.Array, token_ids: jax.Array | None, tokens: jax.Array, count: jax.Array) -> Draft:
        """The tree of the best guesses by logits [B, heads, V']."""
        depth = trees.depths(np.array(self.parents))[1:]
        _, best = lax.top_k(logits, max(self.ranks) + 1)
        guesses = best[:, depth - 1, np.array(self.ranks[1:])]
        guesses = guesses if token_ids is None else token_ids[guesses]
        last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)
        nodes = jnp.concatenate([last, guesses], axis=1)
        tree = trees.static(np.array(self.parents), jnp.ones(nodes.shape, bool))
        return Draft(tree, nodes, jnp.full_like(count, len(self.parents)))


def from_draft(draft: MedusaDraft, paths: Sequence[Path], target) -> Medusa:
    """A trained draft, its tree given by `paths`, on the mesh and in the dtype of `target` (a `decode.target.Target`).

    Heads below the tree's deepest node are left out. Raises ValueError if the tree needs more than the draft has.
    """
    parents, ranks = trees.layout(paths)
    depth, (heads, layers, width) = max(map(len, paths), default=0), draft.weight.shape[:3]
    vocab_size = target.config.vocab_size if draft.lm_head is None else len(draft.lm_head)
    if not 0 < depth <= heads or max(ranks) >= vocab_size:
        raise ValueError(
            f"a tree of depth {depth} and {max(ranks) + 1} guesses a head does not fit the draft's {heads} heads over "
            f"{vocab_size} tokens; choose one that needs 1 to {heads}"
        )
    graph, state = declare(width, depth, layers, target.mesh, target.dtype)
    for name, value in {"weight": draft.weight, "bias": draft.bias}.items():
        state[name] = state[name].replace(target.put(value[:depth], target.dtype, *[None] * value.ndim))
    lm_head, token_ids = (target.lm_head, None) if draft.lm_head is None else _own_vocabulary(draft, target)
    return Medusa(
        state,
        target.norm,
        lm_head,
        token_ids,
        graph=graph,
        parents=parents,
        ranks=ranks,
        vocab_size=vocab_size,
        eps=target.config.norm_eps,
        tap=target.config.layers,
    )


def _own_vocabulary(draft: MedusaDraft, target) -> tuple[jax.Array, jax.Array]:
    """The draft's LM head, padded for the mesh, and the target ids of its tokens."""
    with jax.set_mesh(target.mesh):
        surplus = padded(len(draft.lm_head), "vocab") - len(draft.lm_head)
    lm_head = np.pad(draft.lm_head, [(0, surplus), (0, 0)])
    return target.put(lm_head, target.dtype, "vocab", None), target.put(draft.token_ids, np.int32, None)


def declare(width: int, heads: int, layers: int, mesh: jax.sharding.Mesh, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """Shapes, dtypes and shardings of the heads' parameters on `mesh`; nothing is allocated."""

    def make():
        return MedusaHeads(width, heads=heads, layers=layers, draft_vocab=None, rngs=nnx.Rngs(0), dtype=dtype)

    with jax.set_mesh(mesh):
        return nnx.split(jax.eval_shape(make))
