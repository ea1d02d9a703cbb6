"""From logits to a token: temperature, top-k, top-p, and a draw whose noise is keyed by text position.

The draw for position n of a request uses Gumbel noise that depends on (request key, n, token id) and on
nothing else: not on the cycle, the tree, the batch or the padding of the vocabulary. So eager decoding
and target-first verification of any draft draw the same token from the same seed. Whatever else needs noise at
that position names its use of it, which makes it independent.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.extend.random import threefry_2x32

from specjax.models.attention import MASKED

# Uses of noise beside the target's own draws. They are folded into a request's key where draws fold in a position, and
# no text is so long.
GUESSING, ACCEPTING = np.uint32(2**31), np.uint32(2**31 + 1)


@struct.dataclass
class SamplingState:
    """Per row [B]: `temperature` (0: greedy), `top_k` (0: off), `top_p` (1: off), `key` [B, 2] (key data)."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    key: jax.Array


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of logits [..., V]; of equal ones the lowest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` highest of logits [..., V], the highest first, and their tokens; of equal ones the lowest id.

    For a top-k TPUs would gather a vocabulary that is split, and sort it.
    """
    return lax.platform_dependent(
        logits, tpu=lambda x: likeliest_one_by_one(x, count), default=lambda x: tuple(lax.top_k(x, count))
    )


def likeliest_one_by_one(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`likeliest` as so many rounds of finding the highest and taking it out: no room, and little to send."""
    ids, found = jnp.arange(logits.shape[-1]), []
    for _ in range(count):
        found.append((logits.max(-1), greedy(logits)))
        logits = jnp.where(ids == found[-1][1][..., None], -jnp.inf, logits)
    return tuple(jnp.stack(column, axis=-1) for column in zip(*found))


def process(logits: jax.Array, sampling: SamplingState) -> jax.Array:
    """Logits [B, V] -> log-weights [B, V] of the law that is sampled, excluded tokens at MASKED.

    Temperature, then top-k, then top-p of what is left; tokens that tie at a threshold are all kept.
    Rows at temperature 0 come back unscaled.
    """
    scaled = logits - logits.max(-1, keepdims=True)
    scaled = jnp.maximum(scaled / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None], MASKED)
    scaled = jnp.where(logits == MASKED, MASKED, scaled)

    def top_k(scaled):
        k = jnp.minimum(jnp.where(sampling.top_k > 0, sampling.top_k, scaled.shape[-1]), scaled.shape[-1])
        bound = threshold(scaled, jnp.ones_like(scaled), k.astype(jnp.float32))
        return jnp.where(scaled >= bound[:, None], scaled, MASKED)

    def top_p(scaled):
        weights = jnp.exp(scaled)
        smallest = jnp.finfo(jnp.float32).tiny  # a mass of 0 would be reached by no token at all
        bound = threshold(scaled, weights, jnp.maximum(sampling.top_p * weights.sum(-1), smallest))
        outside = (scaled < bound[:, None]) & (sampling.top_p < 1)[:, None]
        return jnp.where(outside, MASKED, scaled)

    scaled = lax.cond((sampling.top_k > 0).any(), top_k, lambda x: x, scaled)
    return lax.cond((sampling.top_p < 1).any(), top_p, lambda x: x, scaled)


def threshold(values: jax.Array, weights: jax.Array, mass: jax.Array) -> jax.Array:
    """The largest t [B] such that the weights of values [B, V] at or above t add up to `mass` [B] or more.

    Bisection over the bit patterns of floats, which order like the floats themselves: 32 rounds find the
    exact bound, at a fraction of the price of sorting a vocabulary. (Sums up to 2^24 in float32 are exact
    for unit weights.)
    """
    ordered = _ordered_bits(values)

    def halve(i, low):
        bound = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        enough = jnp.where(ordered >= bound[:, None], weights, 0.0).sum(-1) >= mass
        return jnp.where(enough, bound, low)

    bits = lax.fori_loop(0, 32, halve, jnp.zeros(values.shape[0], jnp.uint32))
    return _from_ordered_bits(bits)


def draw(logits: jax.Array, sampling: SamplingState, position: jax.Array) -> jax.Array:
    """The token [B] at text `position` [B], sampled from logits [B, V] (greedy where temperature is 0)."""
    weights = process(logits, sampling)
    noise = gumbel(sampling.key, position, jnp.arange(logits.shape[-1]))
    return greedy(jnp.where((sampling.temperature > 0)[:, None], weights + noise, logits))


def draw_distinct(
    logits: jax.Array, sampling: SamplingState, position: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """`count` different guesses at text `position` [B] by each of logits [B, N, V], in draw order: (places in V, and
    whether there was still one to draw) [B, N, count].

    Each is drawn from the processed law without those before it (Gumbel top-k, Kool et al., arXiv 1903.06059); at
    temperature 0 they are the best, best first. A request's noise at a position serves all N laws: they are those of
    nodes at one depth of a draft tree, of which the text passes through one at most.
    """
    warm = (sampling.temperature > 0)[:, None, None]
    weights = jax.vmap(process, in_axes=(1, None), out_axes=1)(logits, sampling)
    noise = gumbel(sampling.key, position, jnp.arange(logits.shape[-1]), GUESSING)
    weights = jnp.where(warm, weights, logits)
    _, places = likeliest(jnp.where(warm, weights + noise[:, None], logits), count)
    return places, jnp.take_along_axis(weights, places, axis=-1) > MASKED


def gumbel(key: jax.Array, position: jax.Array, ids: jax.Array, use: np.uint32 | None = None) -> jax.Array:
    """Gumbel noise [B, n] of request keys [B, 2] at text positions [B] for token ids [n].

    It is what `jax.random.gumbel` gives over a whole vocabulary, made for these tokens alone, so that a draft over few
    tokens knows the noise of the target's draw.
    """
    count = jnp.concatenate([jnp.zeros(ids.shape, jnp.uint32), ids.astype(jnp.uint32)])

    def row(key):
        high, low = jnp.split(threefry_2x32(jax.random.key_data(key), count), 2)
        return high ^ low

    bits = jax.vmap(row)(_keys(key, position, use)) >> 9 | jnp.uint32(0x3F800000)  # 1.xx as a float
    fraction = lax.bitcast_convert_type(bits, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(fraction, jnp.finfo(jnp.float32).tiny)))


def uniform(key: jax.Array, position: jax.Array, count: int, use: np.uint32) -> jax.Array:
    """Uniform noise [B, count] in [0, 1) of request keys [B, 2] at text positions [B]; the i-th does not depend on
    `count`."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(_keys(key, position, use))


def _keys(key: jax.Array, position: jax.Array, use: np.uint32 | None) -> jax.Array:
    """The keys [B] of one use of the noise at text positions [B]."""

    def row(key, position):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.fold_in(key if use is None else jax.random.fold_in(key, use), position)

    return jax.vmap(row)(key, position)


def _ordered_bits(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_bits(bits: jax.Array) -> jax.Array:
    bits = jnp.where(bits >> 31 == 1, bits & jnp.uint32(~(1 << 31) & 0xFFFFFFFF), ~bits)
    return lax.bitcast_convert_type(bits, jnp.float32)
