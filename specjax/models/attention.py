"""Attention of a block of tokens over a cached prefix and over the block itself.

The block is never written into the cache before it is accepted, so every query sees two key sets:

    prefix: cache slots < length            (and, with a sliding window, slot > position - window)
    block:  nodes that the mask allows      (ancestors and itself; causal in a prefill chunk)

Both halves share one softmax: their maxima and sums are merged exactly.
"""

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax

from specjax.models.config import ModelConfig
from specjax.models.layers import parameter, precision, project, rms_norm, rotate
from specjax.sharding import padded, spec

MASKED = -1e30
FEW_QUERIES = 8  # up to so many queries a key head, CPUs are faster with the keys as the left operand


def attend(q, k, v, cache_k, cache_v, length, positions, block_positions, mask, window=None) -> jax.Array:
    """One softmax over cached prefix and block.

    q [B, T, K, G, H] (scaled); block k, v [B, U, K, H] with U >= T; cache_k, cache_v [B, K, S, H], valid
    below length [B]; positions [B, T] and block_positions [B, U] absolute; mask [B | 1, T, U].
    Returns [B, T, K, G, H].
    """
    batch, nodes, groups, per_group, head_dim = q.shape
    split = spec("batch", "kv_heads", None, None)
    wide = {"precision": precision(q.dtype), "preferred_element_type": jnp.float32, "out_sharding": split}
    slots = jnp.arange(cache_k.shape[2])
    seen = jnp.broadcast_to((slots < length[:, None])[:, None], (batch, nodes, slots.shape[0]))
    if window is not None:
        seen &= slots > positions[..., None] - window
        mask = mask & (block_positions[:, None] > positions[..., None] - window)

    def keys_first(queries, keys):
        found = jnp.einsum("bksh,bkqh->bksq", keys, queries, **wide)
        return jnp.swapaxes(lax.optimization_barrier(found), 2, 3)  # as in `project`, which says why the barrier

    def plain(queries, keys):
        return jnp.einsum("bkqh,bksh->bkqs", queries, keys, **wide)

    def scores(keys, allowed):
        on_cpu = keys_first if per_group * nodes <= FEW_QUERIES else plain
        found = lax.platform_dependent(queries, keys, cpu=on_cpu, default=plain)
        return jnp.where(allowed[:, None, None], found.reshape(batch, groups, per_group, nodes, -1), MASKED)

    def weighted(weights, values):
        weights = weights.astype(values.dtype).reshape(batch, groups, per_group * nodes, -1)
        return jnp.einsum("bkqs,bksh->bkqh", weights, values, **wide)

    queries = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(batch, groups, per_group * nodes, head_dim)
    prefix, block = scores(cache_k, seen), scores(jnp.swapaxes(k, 1, 2), mask)
    top = jnp.maximum(prefix.max(-1, keepdims=True), block.max(-1, keepdims=True))
    prefix, block = jnp.exp(prefix - top), jnp.exp(block - top)
    total = prefix.sum(-1) + block.sum(-1)
    out = weighted(prefix, cache_v) + weighted(block, jnp.swapaxes(v, 1, 2))
    out = out.reshape(batch, groups, per_group, nodes, head_dim) / total[..., None]
    return jnp.transpose(out, (0, 3, 1, 2, 4)).astype(q.dtype)


@struct.dataclass
class Earlier:
    """Block tokens that an earlier pass computed and this one sees: k, v [B, U, K, H], absolute positions [B, U]."""

    k: jax.Array
    v: jax.Array
    positions: jax.Array

    def then(self, k: jax.Array, v: jax.Array, positions: jax.Array) -> "Earlier":
        """These and the tokens of one more pass."""
        pairs = ((self.k, k), (self.v, v), (self.positions, positions))
        return Earlier(*(jnp.concatenate(pair, axis=1) for pair in pairs))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; q, k and v come from one fused product, whose input has
    `in_width` numbers (default: the model's width)."""

    def __init__(self, config: ModelConfig, window: int | None, *, rngs: nnx.Rngs, dtype, in_width: int | None = None):
        groups, per_group = padded(config.kv_heads, "kv_heads"), config.group
        self.window, self.eps, self.per_group = window, config.norm_eps, per_group
        shape = (groups, per_group + 2, config.head_dim)
        self.qkv = parameter(rngs, (*shape, in_width or config.width), ("kv_heads", None, None, None), dtype)
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros(shape, dtype, out_sharding=spec("kv_heads", None, None)))
        if config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(config.head_dim, dtype))
            self.k_norm = nnx.Param(jnp.ones(config.head_dim, dtype))
        heads = groups * per_group * config.head_dim
        self.out = parameter(rngs, (config.width, heads), (None, "kv_heads"), dtype)

    def __call__(self, x, rope, cache_k, cache_v, length, positions, mask, earlier: Earlier | None = None):
        """x [B, T, D] -> (output [B, T, D], block k and v [B, T, K, H]); arguments as in `attend`.

        mask [B | 1, T, U + T]: `earlier` block tokens first, where there are any.
        """
        qkv = project(self.qkv[...], x, ("kv_heads", None, None))
        if hasattr(self, "qkv_bias"):
            qkv = qkv + self.qkv_bias[...]
        q, k, v = qkv[..., : self.per_group, :], qkv[..., self.per_group, :], qkv[..., self.per_group + 1, :]
        if hasattr(self, "q_norm"):
            q, k = rms_norm(q, self.q_norm[...], self.eps), rms_norm(k, self.k_norm[...], self.eps)
        q, k = rotate(q, *rope) * q.shape[-1] ** -0.5, rotate(k, *rope)
        block = Earlier(k, v, positions) if earlier is None else earlier.then(k, v, positions)
        y = attend(q, block.k, block.v, cache_k, cache_v, length, positions, block.positions, mask, self.window)
        y = y.reshape(*y.shape[:2], -1, out_sharding=spec("batch", None, "kv_heads"))
        return project(self.out[...], y, (None,)), k, v
