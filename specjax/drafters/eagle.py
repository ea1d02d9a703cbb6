"""EAGLE: one layer drafts token after token; the tree grows where the layer is most confident (EAGLE-2, 2406.16858).

text      ... s  t | u        u: last accepted token, the root; pairs of true features up to (t's feature, u) are cached
level 1   guesses after u     from the output at the last pair: no pass of its own
level 2   guesses after the best `width` guesses of level 1, in one pass that sees its ancestors
 ...       until `depth`, or until another level does not pay (see `prices`)
tree      of all guesses the `nodes` - 1 of highest cumulative probability, and the root; with prices fewer
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax import lax

from specjax import cache as kv_cache
from specjax import trees
from specjax.cache import KVCache
from specjax.drafters.base import last_of
from specjax.drafters.prices import Prices
from specjax.loading.eagle import EagleDraft, parts
from specjax.loading.target import fill
from specjax.models.attention import Earlier
from specjax.models.eagle import EagleConfig, EagleLayer
from specjax.models.layers import rms_norm, rotary
from specjax.models.transformer import BlockKV
from specjax.sampling import SamplingState, gumbel, likeliest, process
from specjax.sharding import padded, row_spec, rowwise, spec, whole
from specjax.trees import Draft


@struct.dataclass
class EagleState:
    """`cache`: the layer's keys and values of the accepted pairs; `output` [B, W]: its output at the last of them."""

    cache: KVCache
    output: jax.Array


@struct.dataclass
class Guesses:
    """Room for all guesses [B, C]: token, cumulative log-probability (-inf: not guessed yet), which guess stands above
    (-1: the root).

        C     0 .. width | width^2 of level 2 | width^2 of level 3 | ..
    """

    token: jax.Array
    score: jax.Array
    above: jax.Array


@struct.dataclass
class Growth:
    """A tree in growth, with room for the U = (depth - 1) * width guesses that may pass through the layer.

    `level`: of the last guesses; `frontier` [B, width]: the best of them, which are gone on with; `log_share` [B]: what
    part of the probability of the frontier above it has; `hidden` [B, width, W]: what the layer takes in with it; `k`,
    `v` [B, U, K, H]: of the frontiers above; `sees` [B, width, U]: which of those are its ancestors.
    """

    level: jax.Array
    guesses: Guesses
    frontier: jax.Array
    log_share: jax.Array
    hidden: jax.Array
    k: jax.Array
    v: jax.Array
    sees: jax.Array


@struct.dataclass
class Eagle:
    """An EAGLE layer that grows trees of `nodes` nodes, root included, at most `depth` deep.

    `width`: guesses that are gone on with at each level, and guesses after each of them; 1 makes a chain.
    `layer`: its parameters; `embed` [V', W]: the target's embedding; `target_norm` [D]: the target's final norm, for
    EAGLE-1; `lm_head` [V', W]: the target's, where the layer has none of its own. Either is over `vocab_size` tokens,
    whose target ids are `token_ids` [vocab_size] (None: all of the target's).

    With `prices` drafting stops, and the block shrinks, where more is not expected to pay (see `Terms`). Whether a
    level pays is asked before it is drafted, as if it would have one guess after each of the frontier, together as
    probable given the frontier as that was given the one above. Without prices all levels are drafted and all nodes
    verified.

    `coupled`: in rows that sample, a node's children are not the most probable tokens but those that come first with
    the noise of the target's own draw at their position, which the seed fixes: whoever knew the target's law would
    propose the very token that is drawn (Gumbel coupling, arXiv 2408.07978; lists, arXiv 2506.05632). The verifier has
    to be target-first.
    """

    layer: nnx.State
    embed: jax.Array
    target_norm: jax.Array
    lm_head: jax.Array | None
    token_ids: jax.Array | None
    prices: Prices | None
    graph: nnx.GraphDef = struct.field(pytree_node=False)
    config: EagleConfig = struct.field(pytree_node=False)
    taps: tuple[int, ...] = struct.field(pytree_node=False)
    vocab_size: int = struct.field(pytree_node=False)
    nodes: int = struct.field(pytree_node=False)
    depth: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)
    coupled: bool = struct.field(pytree_node=False, default=False)

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self.nodes,) if self.prices is None else self.prices.blocks

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

    def draft(self, state, tokens, count, sampling, running, stats):
        layer, cache = nnx.merge(self.graph, self.layer), state.cache
        lm_head = layer.lm_head[...] if self.lm_head is None else self.lm_head
        terms = self.prices and self.prices.terms(len(count), cache.slots, running, stats)
        places = cache.length[:, None] + jnp.arange((self.depth - 1) * self.width) // self.width

        def go_on(tree: Growth):
            deeper = tree.level < self.depth
            return deeper if terms is None else deeper & terms.go_on(tree.guesses.score, rowwise(_foreseen)(tree))

        def next_level(tree: Growth) -> Growth:
            inputs = rowwise(_gather)(tree.guesses.token, tree.frontier)
            positions = cache.length[:, None] + (tree.level - 1) + jnp.zeros_like(tree.frontier)
            mask, earlier = rowwise(_and_itself)(tree.sees), Earlier(tree.k, tree.v, places)
            output, k, v = self._pass(layer, cache, inputs, tree.hidden, positions, mask, earlier)
            logits = layer.logits(output, lm_head, self.vocab_size)
            guesses, frontier, log_share, parent = rowwise(self._next_level)(
                logits, self.token_ids, sampling, count + tree.level, tree
            )
            place = (tree.level - 1) * self.width
            return Growth(
                tree.level + 1,
                guesses,
                frontier,
                log_share,
                rowwise(_gather_rows)(layer.fed_back(output), parent),
                lax.dynamic_update_slice_in_dim(tree.k, k, place, axis=1),
                lax.dynamic_update_slice_in_dim(tree.v, v, place, axis=1),
                rowwise(_seen_below)(mask, parent, place),
            )

        logits = layer.logits(state.output[:, None], lm_head, self.vocab_size)
        guesses, frontier, log_share = rowwise(self._first_level)(logits, self.token_ids, sampling, count)
        hidden = jnp.repeat(layer.fed_back(state.output[:, None]), self.width, axis=1)
        tree = Growth(jnp.int32(1), guesses, frontier, log_share, hidden, *self._room(len(count)))
        if self.depth > 1:
            tree = lax.while_loop(go_on, next_level, tree)
        size = self.nodes if terms is None else terms.best_block(tree.guesses.score)
        return rowwise(self._best)(tree.guesses, tokens, count, size, tree.level)

    def _room(self, batch: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Keys, values and what is seen of them, of a tree whose guesses have not passed through the layer yet."""
        layer, places = self.config.layer, (self.depth - 1) * self.width
        shape = (batch, places, padded(layer.kv_heads, "kv_heads"), layer.head_dim)
        empty = jnp.zeros(shape, self.embed.dtype, out_sharding=spec("batch", None, "kv_heads", None))
        return empty, empty, jnp.zeros((batch, self.width, places), bool, out_sharding=row_spec(3))

    def _states(self, features: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if self.config.states:
            return features
        return (rms_norm(features[0], self.target_norm, self.config.layer.norm_eps),)

    def _pass(self, layer: EagleLayer, cache: KVCache, tokens, hidden, positions, mask, earlier):
        rope = self.config.layer.rope
        angles = rotary(positions, rope.frequencies(self.config.layer.head_dim), rope.attention_factor)
        embedded = self.embed.at[tokens].get(out_sharding=spec("batch", None, None))
        return layer(embedded, hidden, angles, cache.k[0], cache.v[0], cache.length, positions, mask, earlier)

    def _after_each(self, logits, token_ids, sampling, position) -> tuple[jax.Array, jax.Array]:
        """logits [B, T, V'] for text `position` [B] -> the `width` best tokens after each of T [B, T, width] and their
        log-probabilities."""
        if self.coupled:
            sampled = (sampling.temperature > 0).any()
            logits = lax.cond(sampled, _with_noise, lambda logits, *_: logits, logits, token_ids, sampling, position)
        best, places = likeliest(logits, self.width)
        best = best - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        return places if token_ids is None else token_ids[places], best

    def _first_level(self, logits, token_ids, sampling, position) -> tuple[Guesses, jax.Array, jax.Array]:
        """The guesses after the root by logits [B, 1, V'], all of them the frontier [B, width], and its `log_share`."""
        token, score = (x[:, 0] for x in self._after_each(logits, token_ids, sampling, position))
        later = ((0, 0), (0, (self.depth - 1) * self.width**2))
        above = jnp.full_like(token, -1)
        guesses = Guesses(jnp.pad(token, later), jnp.pad(score, later, constant_values=-jnp.inf), jnp.pad(above, later))
        return guesses, jnp.broadcast_to(jnp.arange(self.width), token.shape), _log_sum(score)

    def _next_level(self, logits, token_ids, sampling, position, tree: Growth):
        """The guesses with those after the frontier by its logits [B, width, V'], the next frontier [B, width], its
        `log_share`, and which of the frontier stands above each of the next [B, width]."""
        token, score = self._after_each(logits, token_ids, sampling, position)
        reached = _gather(tree.guesses.score, tree.frontier)
        score = score + reached[..., None]
        above = jnp.broadcast_to(tree.frontier[..., None], score.shape)
        fresh = Guesses(*(x.reshape(len(x), -1) for x in (token, score, above)))
        start = self.width + (tree.level - 1) * self.width**2
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        best_score, best = lax.top_k(fresh.score, self.width)
        share = _log_sum(best_score) - _log_sum(reached)
        return jax.tree.map(put, tree.guesses, fresh), start + best, share, best // self.width

    def _best(self, guesses: Guesses, tokens, count, size, levels) -> Draft:
        """The tree of the most probable guesses, the best first, so that its first nodes are the best smaller tree: no
        guess is more probable than the one above it, which, made earlier, also wins a tie."""
        score, picked = lax.top_k(guesses.score, self.nodes - 1)
        above = _gather(guesses.above, picked)
        parent = jnp.where(above < 0, 0, 1 + jnp.argmax(picked[:, None] == above[..., None], axis=-1))
        depth = jnp.where(picked < self.width, 1, 2 + (picked - self.width) // self.width**2)
        root = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)

        def below(root, others):
            return jnp.concatenate([root, others], axis=1)

        valid = below(root >= 0, score > -jnp.inf)
        parent, depth = below(jnp.full_like(root, -1), parent), below(jnp.zeros_like(root), depth)
        nodes = below(root, _gather(guesses.token, picked))
        return Draft(
            trees.grown(parent, depth, valid, self.depth),
            nodes,
            jnp.full_like(count, size),
            jnp.full_like(count, levels),
        )


def _with_noise(logits: jax.Array, token_ids: jax.Array | None, sampling: SamplingState, position: jax.Array):
    """logits [B, T, V'], in rows that sample turned into the draft's law with the noise of the draw at `position` [B].

    Temperature, top-k and top-p are the row's own, as in the target's draw: noise never makes it draw a token outside
    its nucleus, and finding the draft's costs no more than the noise. The softmax of the result is the score: it is how
    probable a token is to be the target's draw given the noise, should the draft's log-law be wrong by Gumbel noise of
    its own, while the law alone says nothing of a token that leads by its noise and is nearly sure to be drawn.
    """
    logits_here = whole(logits)
    law = jax.vmap(process, (1, None), 1)(logits_here, sampling)
    ids = jnp.arange(logits.shape[-1])
    if token_ids is not None:
        ids = jnp.pad(token_ids, (0, len(ids) - len(token_ids)))  # the padding is masked in the law
    noise = gumbel(sampling.key, position, ids)[:, None]
    return jnp.where((sampling.temperature > 0)[:, None, None], law + noise, logits_here)


def _foreseen(tree: Growth) -> jax.Array:
    """Scores [B, width] of a next level that is like the last one."""
    return _gather(tree.guesses.score, tree.frontier) + tree.log_share[:, None]


def _log_sum(scores: jax.Array) -> jax.Array:
    return jax.scipy.special.logsumexp(scores, axis=-1)


def _following(tokens: jax.Array, count: jax.Array, after: jax.Array) -> jax.Array:
    """The token that follows each of the first count [B] of tokens [B, P]."""
    ends = jnp.arange(tokens.shape[1]) == count[:, None] - 1
    return jnp.where(ends, after[:, None], jnp.roll(tokens, -1, axis=1))


def _gather(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, places, axis=1)


def _gather_rows(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, places[..., None], axis=1)


def _and_itself(sees: jax.Array) -> jax.Array:
    """The mask of a level [B, width, U + width]: the ancestors that each guess sees [B, width, U], and itself."""
    rows, width = sees.shape[:2]
    return jnp.concatenate([sees, jnp.broadcast_to(jnp.eye(width, dtype=bool), (rows, width, width))], axis=-1)


def _seen_below(mask: jax.Array, parent: jax.Array, place: jax.Array) -> jax.Array:
    """What the next level sees [B, width, U]: what its parents saw, and they themselves, now kept from `place` on."""
    seen = _gather_rows(mask, parent)
    places = seen.shape[-1] - seen.shape[1]
    return lax.dynamic_update_slice_in_dim(seen[..., :places], seen[..., places:], place, axis=2)


def from_draft(
    draft: EagleDraft,
    target,
    *,
    nodes: int,
    depth: int,
    width: int,
    prices: Prices | None = None,
    coupled: bool = False,
) -> Eagle:
    """A trained draft that grows trees of that size, on the mesh and in the dtype of `target` (a
    `decode.target.Target`); with prices, given as arrays on the host, trees of at most that size. Raises ValueError if
    there are not as many guesses, or as many layers, as asked for."""
    config, layers = draft.config, target.config.layers
    vocab_size = config.draft_vocab or target.config.vocab_size
    guesses = width + (depth - 1) * width * width
    if min(depth, width) < 1 or not 2 <= nodes <= guesses + 1 or width > vocab_size:
        raise ValueError(
            f"a tree of {nodes} nodes does not fit {guesses} guesses, {width} wide and {depth} deep; give 2 to "
            f"{guesses + 1} nodes, or let it be wider or deeper"
        )
    taps = draft.taps_among(layers) if config.states else (layers,)
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
        jax.tree.map(lambda ms: target.put(ms, np.float32, *[None] * ms.ndim), prices),
        graph=graph,
        config=config,
        taps=taps,
        vocab_size=vocab_size,
        nodes=nodes,
        depth=depth,
        width=width,
        coupled=coupled,
    )


def declare(config: EagleConfig, mesh: jax.sharding.Mesh, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """Shapes, dtypes and shardings of the layer's parameters on `mesh`; nothing is allocated."""
    with jax.set_mesh(mesh):
        return nnx.split(jax.eval_shape(lambda: EagleLayer(config, rngs=nnx.Rngs(0), dtype=dtype)))
