"""EAGLE: one layer drafts token after token; the tree grows where the layer is most confident (EAGLE-2, 2406.16858).

text      ... s  t | u        u: last accepted token, the root; pairs of true features up to (t's feature, u) are cached
level 1   guesses after u     from the output at the last pair: no pass of its own
level 2   guesses after the best `width` guesses of level 1, in one pass that sees its ancestors
 ...
tree      of all guesses the `nodes` - 1 of highest cumulative probability, and the root
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax import lax

from specjax import cache as kv_cache
from specjax import trees
from specjax.cache import KVCache
from specjax.drafters.base import last_of
from specjax.loading.eagle import EagleDraft, parts
from specjax.loading.target import fill
from specjax.models.attention import Earlier
from specjax.models.eagle import EagleConfig, EagleLayer
from specjax.models.layers import rms_norm, rotary
from specjax.models.transformer import BlockKV
from specjax.sharding import row_spec, rowwise, spec
from specjax.trees import Draft


@struct.dataclass
class EagleState:
    """`cache`: the layer's keys and values of the accepted pairs; `output` [B, W]: its output at the last of them."""

    cache: KVCache
    output: jax.Array


@struct.dataclass
class Guesses:
    """All guesses so far [B, C]: token, cumulative log-probability, depth, and which guess stands above (-1: root)."""

    token: jax.Array
    score: jax.Array
    above: jax.Array
    depth: jax.Array


@struct.dataclass
class Eagle:
    """An EAGLE layer that grows trees of `nodes` nodes, root included, at most `depth` deep.

    `width`: guesses that are gone on with at each level, and guesses after each of them; 1 makes a chain.
    `layer`: its parameters; `embed` [V', W]: the target's embedding; `target_norm` [D]: the target's final norm, for
    EAGLE-1; `lm_head` [V', W]: the target's, where the layer has none of its own. Either is over `vocab_size` tokens,
    whose target ids are `token_ids` [vocab_size] (None: all of the target's).
    """

    layer: nnx.State
    embed: jax.Array
    target_norm: jax.Array
    lm_head: jax.Array | None
    token_ids: jax.Array | None
    graph: nnx.GraphDef = struct.field(pytree_node=False)
    config: EagleConfig = struct.field(pytree_node=False)
    taps: tuple[int, ...] = struct.field(pytree_node=False)
    vocab_size: int = struct.field(pytree_node=False)
    nodes: int = struct.field(pytree_node=False)
    depth: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self.nodes,)

    def init(self, batch, slots):
        dtype, layer = self.embed.dtype, self.config.layer
        output = jnp.zeros((batch, layer.width), dtype, out_sharding=row_spec(2))
        return EagleState(kv_cache.empty(layer, batch, slots, dtype), output)

    def grow(self, state, slots):
        return state.replace(cache=kv_cache.grow(state.cache, slots))

    def cut(self, state, length):
        return state.replace(cache=state.cache.replace(length=length))

    def extend(self, state, tokens, features, count, after):
        """One pass over the pairs of the accepted tokens' true features and the tokens that follow them."""
        layer, pairs = nnx.merge(self.graph, self.layer), tokens.shape[1]
        following = rowwise(_following)(tokens, count, after)
        positions = state.cache.length[:, None] + jnp.arange(pairs)
        causal = jnp.tril(jnp.ones((1, pairs, pairs), bool))
        hidden = layer.fuse(self._states(features))
        output, k, v = self._pass(layer, state.cache, following, hidden, positions, causal, None)
        last = rowwise(last_of)(state.output, output, count)
        path = jnp.broadcast_to(jnp.arange(pairs), tokens.shape)
        computed = jnp.isnan(last[:, 0]).astype(jnp.int32)  # for `append`, which has to come after the pass
        return EagleState(kv_cache.append(state.cache, BlockKV((k,), (v,)), path, count, computed), last)

    def draft(self, state, tokens, count, sampling):
        layer = nnx.merge(self.graph, self.layer)
        lm_head = layer.lm_head[...] if self.lm_head is None else self.lm_head
        logits = layer.logits(state.output[:, None], lm_head, self.vocab_size)
        guesses, frontier = rowwise(self._first_level)(logits, self.token_ids)
        fed_back = jnp.repeat(layer.fed_back(state.output[:, None]), self.width, axis=1)
        earlier, mask = None, jnp.eye(self.width, dtype=bool)[None]
        for level in range(2, self.depth + 1):
            inputs = rowwise(_gather)(guesses.token, frontier)
            positions = state.cache.length[:, None] + (level - 2) + jnp.zeros_like(frontier)
            output, k, v = self._pass(layer, state.cache, inputs, fed_back, positions, mask, earlier)
            earlier = Earlier(k, v, positions) if earlier is None else earlier.then(k, v, positions)
            logits = layer.logits(output, lm_head, self.vocab_size)
            guesses, frontier, parent = rowwise(self._next_level)(logits, self.token_ids, guesses, frontier)
            fed_back = rowwise(_gather_rows)(layer.fed_back(output), parent)
            mask = rowwise(_see)(mask, parent)
        return rowwise(self._best)(guesses, tokens, count)

    def _states(self, features: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if self.config.states:
            return features
        return (rms_norm(features[0], self.target_norm, self.config.layer.norm_eps),)

    def _pass(self, layer: EagleLayer, cache: KVCache, tokens, hidden, positions, mask, earlier):
        rope = self.config.layer.rope
        angles = rotary(positions, rope.frequencies(self.config.layer.head_dim), rope.attention_factor)
        embedded = self.embed.at[tokens].get(out_sharding=spec("batch", None, None))
        return layer(embedded, hidden, angles, cache.k[0], cache.v[0], cache.length, positions, mask, earlier)

    def _after_each(self, logits: jax.Array, token_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """logits [B, T, V'] -> the `width` best tokens after each of T [B, T, width] and their log-probabilities."""
        best, places = lax.top_k(logits, self.width)
        best = best - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        return places if token_ids is None else token_ids[places], best

    def _first_level(self, logits, token_ids) -> tuple[Guesses, jax.Array]:
        token, score = (x[:, 0] for x in self._after_each(logits, token_ids))
        places = jnp.broadcast_to(jnp.arange(self.width), token.shape)
        return Guesses(token, score, jnp.full_like(token, -1), jnp.ones_like(token)), places

    def _next_level(self, logits, token_ids, guesses: Guesses, frontier) -> tuple[Guesses, jax.Array, jax.Array]:
        """All guesses with those after the frontier's [B, width], the best of them as the next frontier, and which of
        the old frontier stands above each [B, width]."""
        known = guesses.token.shape[1]
        token, score = self._after_each(logits, token_ids)
        score = score + _gather(guesses.score, frontier)[..., None]
        above = jnp.broadcast_to(frontier[..., None], score.shape)
        depth = jnp.broadcast_to(guesses.depth[:, -1:, None] + 1, score.shape)
        fresh = Guesses(*(x.reshape(len(x), -1) for x in (token, score, above, depth)))
        best = lax.top_k(fresh.score, self.width)[1]
        grown = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), guesses, fresh)
        return grown, best + known, best // self.width

    def _best(self, guesses: Guesses, tokens, count) -> Draft:
        """The tree of the most probable guesses; no guess is more probable than the one above it."""
        picked = jnp.sort(lax.top_k(guesses.score, self.nodes - 1)[1], axis=-1)  # so that parents stand first
        above = _gather(guesses.above, picked)
        parent = jnp.where(above < 0, 0, 1 + (picked[:, None, :] < above[:, :, None]).sum(-1))
        root = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)
        parent = jnp.concatenate([jnp.full_like(root, -1), parent], axis=1)
        nodes = jnp.concatenate([root, _gather(guesses.token, picked)], axis=1)
        depth = jnp.concatenate([jnp.zeros_like(root), _gather(guesses.depth, picked)], axis=1)
        return Draft(trees.grown(parent, depth, self.depth), nodes, jnp.full_like(count, self.nodes))


def _following(tokens: jax.Array, count: jax.Array, after: jax.Array) -> jax.Array:
    """The token that follows each of the first count [B] of tokens [B, P]."""
    ends = jnp.arange(tokens.shape[1]) == count[:, None] - 1
    return jnp.where(ends, after[:, None], jnp.roll(tokens, -1, axis=1))


def _gather(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, places, axis=1)


def _gather_rows(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, places[..., None], axis=1)


def _see(mask: jax.Array, parent: jax.Array) -> jax.Array:
    """The mask of the next level [B, width, U + width]: what the parent saw [B, width, U], and oneself."""
    rows, width = parent.shape
    seen = jnp.take_along_axis(jnp.broadcast_to(mask, (rows, *mask.shape[1:])), parent[..., None], axis=1)
    return jnp.concatenate([seen, jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))], axis=-1)


def from_draft(draft: EagleDraft, target, *, nodes: int, depth: int, width: int) -> Eagle:
    """A trained draft that grows trees of that size, on the mesh and in the dtype of `target` (a
    `decode.target.Target`). Raises ValueError if there are not as many guesses, or as many layers, as asked for."""
    config, layers = draft.config, target.config.layers
    vocab_size = config.draft_vocab or target.config.vocab_size
    guesses = width + (depth - 1) * width * width
    if min(depth, width) < 1 or not 2 <= nodes <= guesses + 1 or width > vocab_size:
        raise ValueError(
            f"a tree of {nodes} nodes does not fit {guesses} guesses, {width} wide and {depth} deep; give 2 to "
            f"{guesses + 1} nodes, or let it be wider or deeper"
        )
    taps = (draft.taps or (2, layers // 2, layers - 3)) if config.states else (layers,)
    if config.states and (len(taps) != config.states or not all(0 <= tap <= layers for tap in taps)):
        raise ValueError(
            f"the draft fuses {config.states} target states, {', '.join(map(str, taps))} of {layers} layers; "
            "name states that there are"
        )
    graph, state = declare(config, target.mesh, target.dtype)
    state = fill(draft.tensors.__getitem__, parts(config), state, target.mesh)
    return Eagle(
        state,
        target.embed if draft.embedding is None else target.put(draft.embedding, target.dtype, None, None),
        target.norm,
        None if config.draft_vocab else target.lm_head,
        None if draft.token_ids is None else target.put(draft.token_ids, np.int32, None),
        graph=graph,
        config=config,
        taps=taps,
        vocab_size=vocab_size,
        nodes=nodes,
        depth=depth,
        width=width,
    )


def declare(config: EagleConfig, mesh: jax.sharding.Mesh, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """Shapes, dtypes and shardings of the layer's parameters on `mesh`; nothing is allocated."""
    with jax.set_mesh(mesh):
        return nnx.split(jax.eval_shape(lambda: EagleLayer(config, rngs=nnx.Rngs(0), dtype=dtype)))
